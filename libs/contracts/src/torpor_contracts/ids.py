"""Identifiers: `NewType`s over text, made of a short prefix and a UUIDv7, always one subject token `[a-z0-9-]`."""

import re
from typing import Final, NewType

TenantId = NewType("TenantId", str)
SessionId = NewType("SessionId", str)
HostId = NewType("HostId", str)
VmId = NewType("VmId", str)
CheckpointId = NewType("CheckpointId", str)
ExecId = NewType("ExecId", str)
CommandId = NewType("CommandId", str)
GoalId = NewType("GoalId", str)

SYSTEM_TENANT: Final = TenantId("system")
"""The operator's tenant: hosts and fleet-wide commands belong to it, never a customer's session."""

RESERVED_PREFIXES: Final = ("host-", "vm-", "ckp-", "cleanup-", "acc-")
"""How ids begin that no client may choose for a session: all streams of the log share one name space."""

TOKEN: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
"""What one subject token may be; every identifier is one (`fullmatch`)."""


def is_token(text: str) -> bool:
    """Whether `text` may stand as one token of a subject, and so as an identifier."""
    return TOKEN.fullmatch(text) is not None

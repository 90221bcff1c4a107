"""Every published tag and the type it stands for; the only place where the two meet."""

from types import UnionType
from typing import Any, Final, NamedTuple, get_args

import msgspec

from torpor_contracts import checkpoint, cleanup, host, log_heads, scheduling, session, usage, vm


def _by_tag(*unions: UnionType) -> dict[str, type[msgspec.Struct]]:
    found: dict[str, type[msgspec.Struct]] = {}
    for union in unions:
        for kind in get_args(union):
            tag: Any = kind.__struct_config__.tag
            found[tag] = kind
    return found


EVENTS: Final = _by_tag(
    session.SessionEvent, host.HostEvent, vm.VmEvent, checkpoint.CheckpointEvent, cleanup.CleanupEvent
)
"""Tag -> type of every event that may stand in the log."""

COMMANDS: Final = {
    "scheduler": _by_tag(session.SessionCommand, host.HostCommand),
    "vm-host": _by_tag(vm.VmCommand),
    "snapshot-store": _by_tag(checkpoint.CheckpointCommand),
}
"""Service -> tag -> type of every command it takes."""


class QueryShape(NamedTuple):
    """What a query takes and what it is answered with."""

    parameters: type[msgspec.Struct]
    answer: type[msgspec.Struct]


QUERIES: Final = {
    "scheduler": {
        "session": QueryShape(scheduling.SessionQuery, scheduling.SessionView),
        "sessions": QueryShape(scheduling.SessionsQuery, scheduling.SessionsAnswer),
        "exec": QueryShape(scheduling.ExecQuery, scheduling.ExecView),
        "hosts": QueryShape(scheduling.HostsQuery, scheduling.HostsAnswer),
    },
    "snapshot-store": {
        "checkpoint": QueryShape(checkpoint.CheckpointQuery, checkpoint.CheckpointView),
        "checkpoints": QueryShape(checkpoint.CheckpointsQuery, checkpoint.CheckpointsAnswer),
        "verify-checkpoint": QueryShape(checkpoint.VerifyCheckpointQuery, checkpoint.CheckpointVerification),
    },
    "log-relay": {"head": QueryShape(log_heads.HeadQuery, log_heads.HeadAnswer)},
    "billing": {"usage": QueryShape(usage.UsageQuery, usage.UsageAnswer)},
    "reaper": {
        "resources": QueryShape(cleanup.ResourcesQuery, cleanup.ResourcesAnswer),
        "candidates": QueryShape(cleanup.CandidatesQuery, cleanup.CandidatesAnswer),
    },
}
"""Service -> query type -> its parameters and answer; published like commands, recorded nowhere."""

"""Which error class a refusal becomes; a code we do not know is a plain `Refused`."""

from collections.abc import Mapping
from typing import Final

from torpor.errors import (
    CommandIdReused,
    InvalidRequest,
    Refused,
    SessionExists,
    SessionNotFound,
    StaleIncarnation,
    WrongState,
)
from torpor_contracts.replies import Refusal

KINDS: Final[Mapping[str, type[Refused]]] = {
    "session-not-found": SessionNotFound,
    "session-exists": SessionExists,
    "stale-incarnation": StaleIncarnation,
    "command-id-reused": CommandIdReused,
}


def refusal_error(refusal: Refusal) -> Refused:
    """The error to raise for a refusal."""
    kind = KINDS.get(refusal.code, Refused)
    return kind(refusal.code, refusal.message, refusal.advice, refusal.retry_after_s)


__all__ = ["InvalidRequest", "WrongState", "refusal_error"]

"""What a session's own stream says about checkpoints: which of them it would go back to, and so holds."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torpor_contracts.ids import CheckpointId
from torpor_contracts.session import SessionRequested, SessionSuspended, SessionTerminated
from torpor_contracts.session_branches import RollbackRequested, SessionCheckpointed


class Placed(NamedTuple):
    """An event and its position in the log."""

    position: int
    event: Any


BASES = (SessionRequested, SessionSuspended, SessionCheckpointed, RollbackRequested)
"""Events that say which checkpoint a session would be resumed from, from then on."""


def base_of(event: Any) -> CheckpointId | None:
    """The checkpoint that an event makes its session rest on; None when it changes nothing of that."""
    match event:
        case SessionSuspended() | SessionCheckpointed() | RollbackRequested():
            return event.checkpoint_id
        case SessionRequested() if event.lineage is not None:
            return event.lineage.checkpoint_id
        case _:
            return None


def session_pin(checkpoint_id: CheckpointId, recorded_position: int, session: Iterable[Placed]) -> str | None:
    """Why a session holds its own checkpoint, or None when it does not.

    A living session holds the checkpoint it rests on, and any that was recorded after it came to rest on that: it may
    be about to rest on it. A session nobody has heard of is taken for living.
    """
    resting_since, resting_on = 0, None
    for position, event in session:
        if isinstance(event, SessionTerminated):
            return None
        base = base_of(event)
        if base is not None:
            resting_since, resting_on = position, base
    if resting_on is not None and resting_on != checkpoint_id and resting_since > recorded_position:
        return None
    return "its session is alive and may be resumed from it"

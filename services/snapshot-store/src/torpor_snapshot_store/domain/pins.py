"""What a session's own stream says about a checkpoint of it: whether the session may still go back to it."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torpor_contracts.ids import CheckpointId
from torpor_contracts.session import SessionSuspended, SessionTerminated


class Placed(NamedTuple):
    """An event and its position in the log."""

    position: int
    event: Any


def session_pin(checkpoint_id: CheckpointId, recorded_position: int, session: Iterable[Placed]) -> str | None:
    """Why the session holds its checkpoint, or None when it does not.

    A living session holds its newest checkpoint, and any that was recorded after that: a suspend may be about to
    name it. A session nobody has heard of is taken for living.
    """
    for position, event in session:
        if isinstance(event, SessionTerminated):
            return None
        if isinstance(event, SessionSuspended):
            superseded = event.checkpoint_id != checkpoint_id and position > recorded_position
            if superseded:
                return None
    return "its session is alive and may be resumed from it"

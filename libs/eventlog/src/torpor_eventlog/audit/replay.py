"""Replays one stream: the state after each of its events, as the code of today folds it."""

from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import msgspec

from torpor_eventlog.codec import PUBLISHED, EventCodec
from torpor_eventlog.port import EventLog, Recorded

State = TypeVar("State")


class Step(msgspec.Struct, Generic[State], frozen=True, kw_only=True):
    """One event of the stream, and the state after it."""

    recorded: Recorded
    event: Any
    state: State


async def replay(
    log: EventLog,
    stream: str,
    initial: State,
    evolve: Callable[[State, Any], State],
    *,
    codec: EventCodec = PUBLISHED,
    up_to_version: int | None = None,
    up_to_position: int | None = None,
) -> AsyncIterator[Step[State]]:
    """The stream's events in order with the state after each, up to a version or a position of the log.

    Raises `UnknownTag` or `Undecodable` at an event this release cannot read: a state without it would be a wrong one.
    """
    state = initial
    for recorded in await log.load(stream):
        if up_to_version is not None and recorded.version > up_to_version:
            return
        if up_to_position is not None and recorded.position > up_to_position:
            return
        event = codec.decode(recorded)
        state = evolve(state, event)
        yield Step(recorded=recorded, event=event, state=state)

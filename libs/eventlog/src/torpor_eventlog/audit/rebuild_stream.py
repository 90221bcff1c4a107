"""Makes the stream EVENTS afresh from the log; it deletes the old one first, for a copy cannot be mended in place."""

import asyncio
from typing import Final

import msgspec

from torpor_contracts.errors import Transient
from torpor_eventlog.audit.findings import OnProgress, silent
from torpor_eventlog.audit.stream import StoredStream
from torpor_eventlog.following import Backoff
from torpor_eventlog.port import EventLog
from torpor_eventlog.relay import WINDOW_MAX, StreamMismatch

FAILURES_MAX: Final = 10
"""Failures in a row, without a message stored in between, after which the rebuild gives up; it can be run again."""


class StreamRebuilt(msgspec.Struct, frozen=True, kw_only=True):
    """The stream holds the log up to `position`; `published` of its messages by this rebuild, the others by a relay."""

    position: int
    published: int


async def rebuild_stream(log: EventLog, stream: StoredStream, on_progress: OnProgress = silent) -> StreamRebuilt:
    """Recreate the stream and publish the log as it is now.

    A relay may be running: both publish under the same fence. Raises `StreamMismatch` when somebody else publishes
    something else meanwhile, `Transient` after too many failures in a row.
    """
    goal = (await log.head()).position
    await stream.recreate()
    published = failures = 0
    position = -1
    backoff = Backoff(first_s=0.05, max_s=2.0)
    while True:
        try:
            reached = (await stream.last()).sequence
            if reached > position:
                position, failures = reached, 0
                backoff.worked()
                on_progress("stream", min(position, goal), goal)
            if position >= goal:
                break
            rows = await log.read(position, min(WINDOW_MAX, goal - position))
            await stream.publish(rows)
            published += len(rows)
        except Transient:
            failures += 1
            if failures > FAILURES_MAX:
                raise
            await asyncio.sleep(backoff.failed())
    await _check_end(log, stream)
    return StreamRebuilt(position=position, published=published)


async def _check_end(log: EventLog, stream: StoredStream) -> None:
    sequence, digest = await stream.last()
    if sequence == 0:
        return
    rows = await log.read(sequence - 1, 1)
    if not rows or rows[0].digest != digest:
        raise StreamMismatch(sequence, "somebody else publishes into the new stream; stop that, then rebuild again")

"""The simulated stream `EVENTS`: what the relay copies into it under a fence, and how followers read it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from msgspec.structs import replace

from torpor_contracts.errors import Transient
from torpor_eventlog.healing import Carried
from torpor_eventlog.port import Recorded
from torpor_eventlog.relay import FencedOut, StreamEnd
from torpor_simulation.surroundings import Surroundings

LOOK_S: Final = 1.0
"""How long a reader that was cut off waits before it tries again."""


class EventsStream:
    """The stream's content; it outlives every process. Rows are kept as rows: their encoding is proved elsewhere."""

    def __init__(self) -> None:
        self.rows: list[Recorded] = []
        self._waiting: list[asyncio.Future[None]] = []

    def store(self, row: Recorded) -> None:
        """Store one message; the sequence is fenced by the position."""
        if row.position != len(self.rows) + 1:
            raise FencedOut(f"the stream ends at {len(self.rows)}, not before {row.position}")
        self.rows.append(row)
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def truncate(self, length: int) -> None:
        """Lose the tail, as a server that had not yet written it to its disk does."""
        del self.rows[length:]

    def change(self, position: int) -> None:
        """Let a message be another than was put."""
        row = self.rows[position - 1]
        self.rows[position - 1] = replace(row, data=row.data.replace(b'"type"', b'"typo"', 1))

    def grown(self) -> asyncio.Future[None]:
        """Done at the next message."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future


class RelayEnd:
    """`torpor_eventlog.relay.EventStream` for one relay process."""

    def __init__(self, stream: EventsStream, around: Surroundings) -> None:
        self._stream = stream
        self._around = around

    async def last(self) -> StreamEnd:
        """Where the stream ends."""
        self._around.reach_bus()
        rows = self._stream.rows
        return StreamEnd(len(rows), rows[-1].digest if rows else None)

    async def publish(self, rows: Sequence[Recorded]) -> None:
        """Publish rows; the process may die before, between and after any of them, and the answer may get lost."""
        around = self._around
        await asyncio.sleep(around.network.delay_s())
        for row in rows:
            around.reach_bus()
            around.faults.strike(around.process, "relay.publish")
            self._stream.store(row)
        around.faults.strike(around.process, "relay.published")
        if around.network.chance(around.network.faults.stored_but_unanswered):
            raise Transient("the server did not say whether the rows are stored", retry_after_s=0.1)


class ReaderEnd:
    """`torpor_eventlog.healing.StreamSource` for one process."""

    def __init__(self, stream: EventsStream, around: Surroundings) -> None:
        self._stream = stream
        self._around = around

    async def follow(self, after_sequence: int) -> AsyncGenerator[list[Carried], None]:
        """Messages as they come, each after its way through the network."""
        sequence = after_sequence
        while True:
            self._around.reach_bus()
            rows = self._stream.rows[sequence:]
            if not rows:
                await self._stream.grown()
                await asyncio.sleep(self._around.network.delay_s())
                continue
            yield [Carried(row.position, row) for row in rows]
            sequence += len(rows)

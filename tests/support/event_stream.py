"""The stream EVENTS in memory: it keeps every promise of the relay's port, and can be damaged, fail and kill."""

import asyncio
from collections.abc import Sequence

from torpor_contracts.errors import Transient
from torpor_eventlog.following import Wake
from torpor_eventlog.healing import Carried
from torpor_eventlog.port import Recorded
from torpor_eventlog.relay import FencedOut, StreamEnd


class KilledError(BaseException):
    """The process that uses the stream dies here."""


class FakeStream:
    """A stream that checks the expected sequence of every message, and can fail or kill at any of them."""

    def __init__(self) -> None:
        self.stored: list[Recorded] = []
        self.lost: set[int] = set()
        self.garbled: set[int] = set()
        self.changed = Wake()
        self.kill_at: int | None = None
        self.lose_answer_at: int | None = None
        self.away = 0
        self.steps = 0

    async def last(self) -> StreamEnd:
        await self._step()
        return StreamEnd(len(self.stored), self.stored[-1].digest if self.stored else None)

    async def publish(self, rows: Sequence[Recorded]) -> None:
        for row in rows:
            await self._step()
            if row.position != len(self.stored) + 1:
                raise FencedOut(f"expected {row.position - 1}, the stream is at {len(self.stored)}")
            self.stored.append(row)
            self.changed.notify()
            if self.lose_answer_at == row.position:
                self.lose_answer_at = None
                raise Transient("no answer")
            await self._step()

    async def read(self, after_sequence: int, limit: int) -> list[Carried]:
        await self._step()
        there = [
            Carried(sequence, None if sequence in self.garbled else row)
            for sequence, row in enumerate(self.stored, 1)
            if sequence > after_sequence and sequence not in self.lost
        ]
        return there[:limit]

    async def recreate(self) -> None:
        await self._step()
        self.stored, self.lost, self.garbled = [], set(), set()

    async def _step(self) -> None:
        self.steps += 1
        if self.steps == self.kill_at:
            raise KilledError
        await asyncio.sleep(0)
        if self.away:
            self.away -= 1
            raise Transient("the server is away")

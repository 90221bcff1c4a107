"""A service's views as one simulated process reaches them: a transaction may be cut off before or after its commit."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from torpor_eventlog.views_port import Rows, Table, ViewStore, ViewWrite
from torpor_simulation.surroundings import Surroundings


class SimViews:
    """`torpor_eventlog.views_port.ViewStore` over a durable one, for one process; never out of reach: it is local."""

    def __init__(self, durable: ViewStore, around: Surroundings) -> None:
        self._durable = durable
        self._around = around

    async def prepare(self, follower: str, tables: Sequence[Table]) -> int:
        """Make the follower's tables ready."""
        self._around.process.check()
        return await self._durable.prepare(follower, tables)

    @asynccontextmanager
    async def writing(self, follower: str) -> AsyncIterator[ViewWrite]:
        """A transaction; a process that dies in it leaves nothing of it behind."""
        faults, process = self._around.faults, self._around.process
        process.check()
        async with self._durable.writing(follower) as write:
            yield write
            faults.strike(process, f"views.commit {follower}")
        faults.strike(process, f"views.committed {follower}")

    async def position(self, follower: str) -> int:
        """The follower's committed position."""
        self._around.process.check()
        return await self._durable.position(follower)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Rows]:
        """A consistent read."""
        self._around.process.check()
        async with self._durable.reading() as rows:
            yield rows

    async def drop(self, follower: str, tables: Sequence[Table]) -> None:
        """Forget a view."""
        self._around.process.check()
        await self._durable.drop(follower, tables)

    async def close(self) -> None:
        """Let go; the rows outlive the process."""

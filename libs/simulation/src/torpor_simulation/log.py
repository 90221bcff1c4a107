"""The event log as one simulated process reaches it: far away at times, slow, and able to commit without saying so."""

import asyncio
from collections.abc import Callable

from torpor_contracts.errors import Transient
from torpor_contracts.ids import CommandId
from torpor_contracts.replies import Receipt
from torpor_eventlog.port import Commit, EventLog, Head, Recorded
from torpor_simulation.surroundings import Surroundings


class SimLog:
    """`torpor_eventlog.port.EventLog` over the world's one durable log, for one process on one machine."""

    def __init__(self, durable: EventLog, around: Surroundings, hint: Callable[[], object]) -> None:
        self._durable = durable
        self._around = around
        self._hint = hint

    async def append(self, commit: Commit) -> Receipt:
        """Append; the process may die before or after the commit, or never hear of it."""
        around = self._around
        await around.faults.enter(around.process, "log.append")
        await self._travel()
        receipt = await self._durable.append(commit)
        around.note("append", commit.command_id, receipt.position)
        self._hint()
        around.faults.strike(around.process, "log.appended")
        if around.network.chance(around.network.faults.stored_but_unanswered):
            around.note("unanswered", "log.append")
            raise Transient("the database answered nothing; whether it committed is not known", retry_after_s=0.5)
        await self._travel()
        return receipt

    async def receipt(self, command_id: CommandId) -> Receipt | None:
        """The receipt of a command, or None."""
        self._around.reach_log()
        return await self._durable.receipt(command_id)

    async def load(self, stream: str, after_version: int = 0) -> list[Recorded]:
        """A stream's events."""
        self._around.reach_log()
        return await self._durable.load(stream, after_version)

    async def read(self, after_position: int, limit: int) -> list[Recorded]:
        """Events by position."""
        self._around.reach_log()
        return await self._durable.read(after_position, limit)

    async def head(self) -> Head:
        """The log's present end."""
        self._around.reach_log()
        return await self._durable.head()

    async def inclusion_proof(self, position: int, tree_size: int) -> list[bytes]:
        """The inclusion proof of a row."""
        self._around.reach_log()
        return await self._durable.inclusion_proof(position, tree_size)

    async def consistency_proof(self, old_size: int, new_size: int) -> list[bytes]:
        """The consistency proof of two sizes."""
        self._around.reach_log()
        return await self._durable.consistency_proof(old_size, new_size)

    async def close(self) -> None:
        """Let go; the log itself outlives its readers."""

    async def _travel(self) -> None:
        await asyncio.sleep(self._around.network.delay_s())
        self._around.reach_log()

"""The world's one durable log, with somebody looking over its shoulder at every commit."""

from collections.abc import Callable

from torpor_contracts.replies import Receipt
from torpor_eventlog.memory import MemoryDatabase, MemoryLog
from torpor_eventlog.port import Commit, Recorded


class WatchedLog(MemoryLog):
    """Production's log in memory; `committed` is told of the rows of each commit, in order, before anybody else."""

    def __init__(self, committed: Callable[[list[Recorded]], None]) -> None:
        self._rows = MemoryDatabase()
        super().__init__(self._rows)
        self._committed = committed

    @property
    def rows(self) -> list[Recorded]:
        """Every row, in order."""
        return self._rows.rows

    def knows(self, command_id: str) -> bool:
        """Whether a command is in the log."""
        return command_id in self._rows.commands

    async def append(self, commit: Commit) -> Receipt:
        """See `EventLog.append`."""
        before = len(self._rows.rows)
        receipt = await super().append(commit)
        new = self._rows.rows[before:]
        if new:
            self._committed(new)
        return receipt

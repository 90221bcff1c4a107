"""The log in memory: every promise of the port but durability, for simulations and specifications."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from torpor_contracts.errors import TorporError, Transient
from torpor_contracts.ids import CommandId
from torpor_contracts.replies import Receipt
from torpor_eventlog.merkle import Node, Span
from torpor_eventlog.planning import START, End, Known, plan, prepare, receipt_of, recorded
from torpor_eventlog.port import Commit, Head, Recorded
from torpor_eventlog.proving import checked_consistency_plan, checked_inclusion_plan


@dataclass
class MemoryDatabase:
    """What outlives a log instance; several instances on one database are several replicas."""

    rows: list[Recorded] = field(default_factory=list)
    streams: dict[str, list[Recorded]] = field(default_factory=dict)
    commands: dict[str, Known] = field(default_factory=dict)
    nodes: dict[tuple[int, int], bytes] = field(default_factory=dict)
    end: End = START


class MemoryLog:
    """An `EventLog` over a `MemoryDatabase`.

    `on_commit` is told the new last position after each append that added something.
    """

    def __init__(self, database: MemoryDatabase | None = None, on_commit: Callable[[int], None] | None = None) -> None:
        self._database = database or MemoryDatabase()
        self._on_commit = on_commit
        self._closed = False

    async def append(self, commit: Commit) -> Receipt:
        """See `EventLog.append`."""
        self._check_open()
        database = self._database
        versions = {stream: len(database.streams.get(stream, ())) for stream in commit.expected}
        planned = plan([prepare(commit)], database.end, versions, database.commands)
        (outcome,) = planned.outcomes
        if isinstance(outcome, TorporError):
            raise outcome
        for row in planned.rows:
            event, request_digest = recorded(row), row[-1]
            database.rows.append(event)
            database.streams.setdefault(event.stream, []).append(event)
            if request_digest is not None:
                database.commands[event.command_id] = Known(request_digest, receipt_of(row))
        self._store_nodes(planned.nodes)
        database.end = planned.end
        if planned.rows and self._on_commit is not None:
            asyncio.get_running_loop().call_soon(self._on_commit, planned.end.position)
        return outcome

    async def receipt(self, command_id: CommandId) -> Receipt | None:
        """See `EventLog.receipt`."""
        self._check_open()
        known = self._database.commands.get(command_id)
        return None if known is None else known.receipt

    async def load(self, stream: str, after_version: int = 0) -> list[Recorded]:
        """See `EventLog.load`."""
        self._check_open()
        return self._database.streams.get(stream, [])[max(0, after_version) :]

    async def read(self, after_position: int, limit: int) -> list[Recorded]:
        """See `EventLog.read`."""
        self._check_open()
        start = max(0, after_position)
        return self._database.rows[start : start + max(0, limit)]

    async def head(self) -> Head:
        """See `EventLog.head`."""
        self._check_open()
        return self._database.end.head()

    async def inclusion_proof(self, position: int, tree_size: int) -> list[bytes]:
        """See `EventLog.inclusion_proof`."""
        self._check_open()
        planned = checked_inclusion_plan(position, tree_size, self._database.end.position)
        return planned.resolve({span: self._digests(span) for span in planned.spans()})

    async def consistency_proof(self, old_size: int, new_size: int) -> list[bytes]:
        """See `EventLog.consistency_proof`."""
        self._check_open()
        planned = checked_consistency_plan(old_size, new_size, self._database.end.position)
        return planned.resolve({span: self._digests(span) for span in planned.spans()})

    async def close(self) -> None:
        """See `EventLog.close`; the database stays."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Transient("the log is closed")

    def _store_nodes(self, nodes: list[Node]) -> None:
        for node in nodes:
            self._database.nodes[node.level, node.number] = node.digest

    def _digests(self, span: Span) -> list[bytes]:
        numbers = range(span.first, span.first + span.size)
        if span.level == 0:
            return [self._database.rows[number].digest for number in numbers]
        return [self._database.nodes[span.level, number] for number in numbers]

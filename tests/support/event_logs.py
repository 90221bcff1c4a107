"""The three places a log can be kept in, with as many log instances on one database as a test wants; and commits."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol

from torpor_contracts.ids import CommandId, TenantId
from torpor_contracts.replies import Receipt
from torpor_eventlog.canonical import NO_DIGEST, row_digest
from torpor_eventlog.memory import MemoryDatabase, MemoryLog
from torpor_eventlog.merkle import Frontier
from torpor_eventlog.port import Commit, EventLog, NewEvent, Recorded
from torpor_eventlog.postgres import PostgresLog
from torpor_eventlog.sqlite import SqliteLog

NOON_US: Final = 1_796_040_000_000_000

_NUMBERS: Final = count(1)

OnCommit = Callable[[int], None]
Open = Callable[..., Awaitable[EventLog]]


class Database(Protocol):
    """A database of a test's own; every `open` is another process's view of it."""

    async def open(self, on_commit: OnCommit | None = None) -> EventLog: ...


class InMemory:
    """Instances share what would be a database."""

    def __init__(self) -> None:
        self._database = MemoryDatabase()

    async def open(self, on_commit: OnCommit | None = None) -> EventLog:
        return MemoryLog(self._database, on_commit)


class InSqlite:
    """Instances have connections and threads of their own on one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def open(self, on_commit: OnCommit | None = None) -> EventLog:
        return await SqliteLog.open(self.path, on_commit)


class InPostgres:
    """Instances have connections of their own to one database."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    async def open(self, on_commit: OnCommit | None = None) -> EventLog:
        return await PostgresLog.open(self.dsn, on_commit)


def new_id(prefix: str) -> str:
    """An identifier that no other test uses."""
    return f"{prefix}-{next(_NUMBERS)}"


def commit(
    *streams: str,
    expected: Mapping[str, int] | None = None,
    request: bytes = b"",
    data: bytes = b"{}",
    **fields: Any,
) -> Commit:
    """One event for each stream named, in that order; `expected` is 0 for all unless it is said."""
    name = fields.get("command_id", new_id("cmd"))
    values: dict[str, Any] = {
        "command_id": CommandId(name),
        "tenant_id": TenantId("default"),
        "causation_id": name,
        "correlation_id": "goal-1",
        "request_digest": sha256(name.encode(errors="surrogatepass") + request).digest(),
        "occurred_at_us": NOON_US,
        "expected": dict.fromkeys(streams, 0) if expected is None else expected,
        "events": [NewEvent(stream=stream, tag="thing-happened.v1", data=data) for stream in streams],
    }
    return Commit(**{**values, **fields})


async def grow(log: EventLog, events: int, stream: str = "stream-a") -> list[Receipt]:
    """Append events of one stream, as many at once as the log takes."""
    version = len(await log.load(stream))
    return await asyncio.gather(
        *(log.append(commit(stream, expected={stream: version + at})) for at in range(events)),
    )


async def everything(log: EventLog, page: int = 1000) -> list[Recorded]:
    """All rows, read by page."""
    rows: list[Recorded] = []
    while found := await log.read(len(rows), page):
        rows += found
    return rows


def tree_over(rows: Sequence[Recorded]) -> Frontier:
    """The Merkle tree recomputed from what the rows say, not from their digests."""
    digest, tree = NO_DIGEST, Frontier()
    for row in rows:
        digest = row_digest(digest, row)
        tree.extend([digest])
    return tree


async def check_sound(log: EventLog) -> list[Recorded]:
    """All rows, after a check of everything that must hold of any log: positions, versions, chain, head and tree."""
    rows = await everything(log)
    assert [row.position for row in rows] == list(range(1, len(rows) + 1))
    versions: dict[str, int] = {}
    digest = NO_DIGEST
    for row in rows:
        assert row.version == versions.get(row.stream, 0) + 1, row
        versions[row.stream] = row.version
        digest = row_digest(digest, row)
        assert row.digest == digest, row
    head = await log.head()
    assert (head.position, head.digest, head.root) == (len(rows), digest, tree_over(rows).root())
    return rows

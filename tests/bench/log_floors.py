"""What the log is measured against: the same bytes in a bare table; no expected versions, receipts, chain or tree."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import asyncpg

from tests.bench.log_load import BareRow

_BATCH_MAX: Final = 512
_SQLITE_TABLE: Final = """
    CREATE TABLE events (
        position INTEGER PRIMARY KEY, stream TEXT NOT NULL, version INTEGER NOT NULL, tag TEXT NOT NULL,
        data BLOB NOT NULL, occurred_at_us INTEGER NOT NULL, command_id TEXT NOT NULL, causation_id TEXT NOT NULL,
        correlation_id TEXT NOT NULL, tenant_id TEXT NOT NULL, digest BLOB NOT NULL, request_digest BLOB NOT NULL,
        UNIQUE (stream, version)
    )
"""
_SQLITE_INSERT: Final = """
    INSERT INTO events (
        stream, version, tag, data, occurred_at_us, command_id, causation_id, correlation_id, tenant_id,
        digest, request_digest
    ) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_POSTGRES_TABLE: Final = """
    CREATE TABLE events (
        position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, stream text NOT NULL, version bigint NOT NULL,
        tag text NOT NULL, data bytea NOT NULL, occurred_at_us bigint NOT NULL, command_id text NOT NULL,
        causation_id text NOT NULL, correlation_id text NOT NULL, tenant_id text NOT NULL, digest bytea NOT NULL,
        request_digest bytea NOT NULL, UNIQUE (stream, version)
    )
"""
_POSTGRES_INSERT: Final = """
    INSERT INTO events (
        stream, version, tag, data, occurred_at_us, command_id, causation_id, correlation_id, tenant_id,
        digest, request_digest
    ) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
"""


class BareGroupCommit:
    """The barest group commit in SQLite: a queue, a thread, one `executemany` and one durable commit for each batch."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute(_SQLITE_TABLE)
        self._queue: asyncio.Queue[tuple[BareRow, asyncio.Future[None]]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1)

    async def append(self, row: BareRow) -> None:
        """Wait until the row is durable."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((row, future))
        await future

    @asynccontextmanager
    async def running(self) -> AsyncIterator["BareGroupCommit"]:
        """Write what is appended while this is open."""
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(self._write())
            yield self
            writer.cancel()

    def close(self) -> None:
        """Let go of the file."""
        self._thread.shutdown()
        self._connection.close()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty() and len(batch) < _BATCH_MAX:
                batch.append(self._queue.get_nowait())
            await loop.run_in_executor(self._thread, self._commit, [row for row, _ in batch])
            for _, future in batch:
                future.set_result(None)

    def _commit(self, rows: list[BareRow]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(_SQLITE_INSERT, rows)
        self._connection.execute("COMMIT")


class BareTransactions:
    """One event a transaction in PostgreSQL, over many connections, so that the server can group their commits."""

    def __init__(self, connections: int) -> None:
        self._free: asyncio.Queue[tuple[asyncpg.Connection, Any]] = asyncio.Queue()
        self._connections = connections

    async def open(self, dsn: str) -> None:
        """Connect, and make the table."""
        for number in range(self._connections):
            connection = await asyncpg.connect(dsn)
            if number == 0:
                await connection.execute(_POSTGRES_TABLE)
            self._free.put_nowait((connection, await connection.prepare(_POSTGRES_INSERT)))

    async def append(self, row: BareRow) -> None:
        """Wait until the row is durable."""
        free = await self._free.get()
        try:
            await free[1].fetch(*row)
        finally:
            self._free.put_nowait(free)

    async def close(self) -> None:
        """Let go of the connections."""
        while not self._free.empty():
            await self._free.get_nowait()[0].close()

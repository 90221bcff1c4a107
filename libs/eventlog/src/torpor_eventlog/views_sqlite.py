"""One service's views in one SQLite file: write-ahead log, synchronous=NORMAL, for what is lost can be folded again.

A file that is damaged is set aside, and the views are folded afresh: it holds nothing that the log does not.
"""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from torpor_contracts.errors import Transient
from torpor_eventlog.sqlite_file import while_busy
from torpor_eventlog.view_sql import Dialect, SqlRows, SqlWrite, Statement, prepare
from torpor_eventlog.view_tables import Cell
from torpor_eventlog.views_port import Rows, Table, ViewWrite

Answer = TypeVar("Answer")

SQLITE: Final = Dialect(text="TEXT", integer="INTEGER", numbered=False, index_order="", unindexed="+")

READERS_MAX: Final = 8
"""Reads open at the same time; one more waits."""

BUSY_WAIT_S: Final = 5.0
"""How long a write waits for another process's, which lasts milliseconds."""

_DAMAGED: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_log: Final = logging.getLogger(__name__)


class SqliteViewStore:
    """A view store in the file at `path`, opened at the first use. All of SQLite's work is done in one thread."""

    def __init__(self, path: Path, busy_wait_s: float = BUSY_WAIT_S) -> None:
        self._path = path
        self._busy_wait_s = busy_wait_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"views-{path.stem}")
        self._writer: sqlite3.Connection | None = None
        self._idle_readers: list[sqlite3.Connection] = []
        self._writing = asyncio.Lock()
        self._reading = asyncio.Semaphore(READERS_MAX)
        self._damaged = False
        self._closed = False

    async def prepare(self, follower: str, tables: Sequence[Table]) -> int:
        """See `ViewStore.prepare`."""
        async with self._write_transaction() as session:
            position = await prepare(session, SQLITE, follower, tables)
            await self._run(_commit, session.connection, [])
            return position

    @asynccontextmanager
    async def writing(self, follower: str) -> AsyncIterator[ViewWrite]:
        """See `ViewStore.writing`."""
        async with self._write_transaction() as session:
            position, fingerprints = await self._run(_standing, session.connection, follower)
            write = SqlWrite(session, SQLITE, fingerprints, follower, position)
            yield write
            await self._run(_commit, session.connection, write.rest())

    async def position(self, follower: str) -> int:
        """See `ViewStore.position`."""
        async with self._read_transaction() as session:
            position, _ = await self._run(_standing, session.connection, follower)
            return position

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Rows]:
        """See `ViewStore.reading`."""
        async with self._read_transaction() as session:
            _, fingerprints = await self._run(_standing, session.connection, "")
            yield SqlRows(session, SQLITE, fingerprints)

    async def drop(self, follower: str, tables: Sequence[Table]) -> None:
        """See `ViewStore.drop`."""
        async with self._write_transaction() as session:
            forgotten = SQLITE.forget(follower, [table.name for table in tables])
            await self._run(_commit, session.connection, forgotten)

    async def close(self) -> None:
        """See `ViewStore.close`; what is open must have ended."""
        if not self._closed:
            await self._run(self._let_go)
            self._closed = True
            self._thread.shutdown()

    @asynccontextmanager
    async def _write_transaction(self) -> AsyncIterator["_SqliteSession"]:
        async with self._writing:
            connection = await self._run(self._begin_write, undo=_roll_back)
            try:
                yield _SqliteSession(self._run, connection)
            except BaseException:
                with suppress(Transient):
                    await self._run(_roll_back, connection)
                raise

    @asynccontextmanager
    async def _read_transaction(self) -> AsyncIterator["_SqliteSession"]:
        async with self._reading:
            connection = await self._run(self._begin_read, undo=self._end_read)
            try:
                yield _SqliteSession(self._run, connection)
            finally:
                with suppress(Transient):
                    await self._run(self._end_read, connection)

    async def _run(
        self, work: Callable[..., Answer], *parameters: Any, undo: Callable[[Answer], object] | None = None
    ) -> Answer:
        """Do `work` in the thread.

        It is waited for even when we are cancelled, for nobody else may use its connection meanwhile; and undone then.
        """
        if self._closed:
            raise Transient(f"the views {self._path} are closed")
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._thread, partial(work, *parameters))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait({done})
            if done.exception() is None and undo is not None:
                await loop.run_in_executor(self._thread, undo, done.result())
            raise
        except sqlite3.Error as error:
            raise self._as_transient(error) from error

    def _as_transient(self, error: sqlite3.Error) -> Transient:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        self._damaged = self._damaged or code in _DAMAGED
        reason, retry_after_s = {
            sqlite3.SQLITE_BUSY: ("are locked by another process; end it if this lasts", 0.5),
            sqlite3.SQLITE_LOCKED: ("are locked by another process; end it if this lasts", 0.5),
            sqlite3.SQLITE_FULL: ("are on a full disk; free some space there", 5.0),
            sqlite3.SQLITE_READONLY: ("are read-only; make the file and its directory writable", 5.0),
            sqlite3.SQLITE_CANTOPEN: ("cannot be opened; make the directory writable", 5.0),
            sqlite3.SQLITE_CORRUPT: ("are damaged; they are set aside and folded afresh", 0.1),
            sqlite3.SQLITE_NOTADB: ("are damaged; they are set aside and folded afresh", 0.1),
        }.get(code, ("could not be used", 1.0))
        return Transient(f"the views {self._path} {reason} (SQLite: {error})", retry_after_s)

    # From here on: in the thread.

    def _begin_write(self) -> sqlite3.Connection:
        if self._damaged:
            self._set_aside()
        if self._writer is None:
            self._writer = self._open()
        connection = self._writer
        while_busy(lambda: connection.execute("BEGIN IMMEDIATE"), self._busy_wait_s)
        return connection

    def _begin_read(self) -> sqlite3.Connection:
        if self._writer is None:
            self._writer = self._open()
        connection = self._idle_readers.pop() if self._idle_readers else self._connect()
        connection.execute("PRAGMA busy_timeout = 1000")  # a reader waits only while another process recovers the file
        connection.execute("BEGIN")
        connection.execute("SELECT 1 FROM view_followers").fetchone()  # the snapshot begins with the first look
        return connection

    def _end_read(self, connection: sqlite3.Connection) -> None:
        try:
            connection.execute("COMMIT")
        except sqlite3.Error:
            connection.close()
        else:
            self._idle_readers.append(connection)

    def _open(self) -> sqlite3.Connection:
        try:
            return while_busy(self._make_ready, self._busy_wait_s)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _DAMAGED:
                raise
        self._set_aside()
        return while_busy(self._make_ready, self._busy_wait_s)

    def _make_ready(self) -> sqlite3.Connection:
        connection = self._connect()
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("BEGIN IMMEDIATE")
            _commit(connection, SQLITE.schema())
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA journal_size_limit = 16777216")
        return connection

    def _set_aside(self) -> None:
        self._let_go()
        aside = self._path.with_name(f"{self._path.name}.damaged")
        _log.error("the views %s are damaged; kept as %s, and folded afresh from the log", self._path, aside)
        for ending in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                self._path.with_name(self._path.name + ending).replace(aside.with_name(aside.name + ending))
        self._damaged = False

    def _let_go(self) -> None:
        for connection in (self._writer, *self._idle_readers):
            if connection is not None:
                with suppress(sqlite3.Error):
                    connection.close()
        self._writer = None
        self._idle_readers.clear()


class _SqliteSession:
    """A transaction on one connection."""

    def __init__(self, run: Callable[..., Any], connection: sqlite3.Connection) -> None:
        self._run = run
        self.connection = connection

    async def fetch(
        self, sql: str, parameters: Sequence[Cell], first: Sequence[Statement] = ()
    ) -> Sequence[Sequence[Any]]:
        """See `Session.fetch`."""
        found: Sequence[Sequence[Any]] = await self._run(_fetch, self.connection, sql, parameters, first)
        return found

    async def run(self, statements: Sequence[Statement]) -> None:
        """See `Session.run`."""
        await self._run(_execute, self.connection, statements)


def _fetch(
    connection: sqlite3.Connection, sql: str, parameters: Sequence[Cell], first: Sequence[Statement]
) -> list[tuple[Any, ...]]:
    _execute(connection, first)
    return connection.execute(sql, parameters).fetchall()


def _execute(connection: sqlite3.Connection, statements: Sequence[Statement]) -> None:
    for sql, many in statements:
        if len(many) == 1:
            connection.execute(sql, many[0])
        else:
            connection.executemany(sql, many)


def _commit(connection: sqlite3.Connection, statements: Sequence[Statement]) -> None:
    _execute(connection, statements)
    connection.execute("COMMIT")


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _standing(connection: sqlite3.Connection, follower: str) -> tuple[int, dict[str, str]]:
    """A follower's position, and the fingerprints of all tables."""
    found = connection.execute("SELECT position FROM view_followers WHERE name = ?", (follower,)).fetchone()
    return (found[0] if found else 0), dict(connection.execute("SELECT name, fingerprint FROM view_tables").fetchall())

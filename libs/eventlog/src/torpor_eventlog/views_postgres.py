"""One service's views in one schema of a PostgreSQL database; commits are asynchronous, for views can be refolded."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from typing import Any, Final

import asyncpg

from torpor_contracts.errors import InvariantViolation, Poison, TorporError, Transient
from torpor_contracts.ids import is_token
from torpor_eventlog.view_sql import Dialect, SqlRows, SqlWrite, Statement, prepare
from torpor_eventlog.view_tables import Cell
from torpor_eventlog.views_port import Rows, Table, ViewWrite

POSTGRES: Final = Dialect(text='text COLLATE "C"', integer="bigint", numbered=True, index_order="NULLS FIRST")

CONNECTIONS_MAX: Final = 4
"""Connections of one service: a writer and some readers."""

WAIT_S: Final = 10.0
"""How long a connection, an answer or another writer is waited for."""

_STANDING: Final = """
    SELECT '', position::text FROM view_followers WHERE name = $1
    UNION ALL SELECT name, fingerprint FROM view_tables
"""


class PostgresViewStore:
    """A view store in the schema `views_<service>`, which is made at the first use if it is not there.

    `dsn` is a PostgreSQL URL. Writers of one schema take turns, also those of other processes.
    """

    def __init__(self, dsn: str, service: str) -> None:
        if not is_token(service):
            raise InvariantViolation(f"{service!r} is no service's name")
        self._dsn = dsn
        self._schema = f"views_{service.replace('-', '_')}"
        self._lock = int.from_bytes(sha256(f"torpor {self._schema}".encode()).digest()[:8], signed=True)
        self._opening = asyncio.Lock()
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._closed = False

    async def prepare(self, follower: str, tables: Sequence[Table]) -> int:
        """See `ViewStore.prepare`."""
        async with self._transaction(f"BEGIN; SELECT pg_advisory_xact_lock({self._lock})") as session:
            return await prepare(session, POSTGRES, follower, tables)

    @asynccontextmanager
    async def writing(self, follower: str) -> AsyncIterator[ViewWrite]:
        """See `ViewStore.writing`."""
        async with self._transaction(f"BEGIN; SELECT pg_advisory_xact_lock({self._lock})") as session:
            position, fingerprints = await session.standing(follower)
            write = SqlWrite(session, POSTGRES, fingerprints, follower, position)
            yield write
            await session.run(write.rest())

    async def position(self, follower: str) -> int:
        """See `ViewStore.position`."""
        async with self._transaction("BEGIN READ ONLY") as session:
            position, _ = await session.standing(follower)
            return position

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Rows]:
        """See `ViewStore.reading`."""
        async with self._transaction("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY") as session:
            _, fingerprints = await session.standing("")
            yield SqlRows(session, POSTGRES, fingerprints)

    async def drop(self, follower: str, tables: Sequence[Table]) -> None:
        """See `ViewStore.drop`."""
        async with self._transaction(f"BEGIN; SELECT pg_advisory_xact_lock({self._lock})") as session:
            await session.run(POSTGRES.forget(follower, [table.name for table in tables]))

    async def close(self) -> None:
        """See `ViewStore.close`."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            try:
                async with asyncio.timeout(WAIT_S):
                    await pool.close()
            except TimeoutError:
                pool.terminate()

    @asynccontextmanager
    async def _transaction(self, begin: str) -> AsyncIterator["_PostgresSession"]:
        pool = await self._opened()
        try:
            connection = await pool.acquire(timeout=WAIT_S)
        except Exception as error:
            raise _translated(error) from error
        session = _PostgresSession(connection)
        try:
            await session.execute(begin)
            yield session
            await session.execute("COMMIT")
        except BaseException:
            with suppress(TorporError):
                await session.execute("ROLLBACK")
            raise
        finally:
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                await pool.release(connection, timeout=WAIT_S)

    async def _opened(self) -> "asyncpg.Pool[asyncpg.Record]":
        async with self._opening:
            if self._closed:
                raise Transient(f"the views of {self._schema} are closed")
            if self._pool is None:
                self._pool = await self._open()
            return self._pool

    async def _open(self) -> "asyncpg.Pool[asyncpg.Record]":
        try:
            pool = await asyncpg.create_pool(
                self._dsn,
                min_size=0,
                max_size=CONNECTIONS_MAX,
                command_timeout=WAIT_S * 3,
                timeout=WAIT_S,
                server_settings={
                    "application_name": f"torpor {self._schema}",
                    "search_path": self._schema,
                    "synchronous_commit": "off",
                    "lock_timeout": f"{WAIT_S:.0f}s",
                    "idle_in_transaction_session_timeout": "60s",
                },
            )
            async with pool.acquire(timeout=WAIT_S) as connection:
                await self._make_ready(connection)
        except Exception as error:
            raise _translated(error) from error
        return pool

    async def _make_ready(self, connection: "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]") -> None:
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", self._lock)
            # CREATE SCHEMA IF NOT EXISTS asks for a right that a service with a schema made for it need not have.
            if await connection.fetchval("SELECT to_regnamespace($1) IS NULL", self._schema):
                await connection.execute(f'CREATE SCHEMA "{self._schema}"')
            for sql, _ in POSTGRES.schema():
                await connection.execute(sql)


class _PostgresSession:
    """A transaction on one connection."""

    def __init__(self, connection: "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]") -> None:
        self._connection = connection

    async def execute(self, sql: str) -> None:
        """Run statements without parameters."""
        try:
            await self._connection.execute(sql)
        except Exception as error:
            raise _translated(error) from error

    async def fetch(
        self, sql: str, parameters: Sequence[Cell], first: Sequence[Statement] = ()
    ) -> Sequence[Sequence[Any]]:
        """See `Session.fetch`."""
        await self.run(first)
        try:
            return [tuple(record) for record in await self._connection.fetch(sql, *parameters)]
        except Exception as error:
            raise _translated(error) from error

    async def run(self, statements: Sequence[Statement]) -> None:
        """See `Session.run`."""
        try:
            for sql, many in statements:
                if len(many) == 1:
                    await self._connection.execute(sql, *many[0])
                elif many:
                    await self._connection.executemany(sql, many)
        except Exception as error:
            raise _translated(error) from error

    async def standing(self, follower: str) -> tuple[int, dict[str, str]]:
        """A follower's position, and the fingerprints of all tables."""
        found = {str(name): str(text) for name, text in await self.fetch(_STANDING, (follower,))}
        return int(found.pop("", "0")), found


def _translated(error: Exception) -> Exception:
    """Who must act on an error of the database: time, an operator, or us."""
    if isinstance(error, TorporError):
        return error
    if isinstance(error, asyncpg.DataError | asyncpg.CharacterNotInRepertoireError):
        return Poison(f"a view cannot hold this row (PostgreSQL: {error})")
    if isinstance(error, asyncpg.UndefinedTableError | asyncpg.InvalidCachedStatementError):
        return Transient("the view is being dropped and folded afresh; ask again", retry_after_s=0.2)
    if isinstance(error, asyncpg.SyntaxOrAccessError) and not isinstance(error, asyncpg.InsufficientPrivilegeError):
        return InvariantViolation(f"a view's statement is wrong (PostgreSQL: {error})")
    retry_after_s, advice = 1.0, "see that the server runs and can be reached"
    if isinstance(error, asyncpg.LockNotAvailableError):
        retry_after_s, advice = 0.5, "another process keeps the views locked; end it if this lasts"
    elif isinstance(error, asyncpg.DiskFullError):
        retry_after_s, advice = 5.0, "free some space on the server's disk"
    elif isinstance(error, asyncpg.ReadOnlySQLTransactionError):
        retry_after_s, advice = 5.0, "the server is read-only; connect to the primary"
    elif isinstance(error, asyncpg.InsufficientPrivilegeError | asyncpg.InvalidAuthorizationSpecificationError):
        retry_after_s, advice = 5.0, "give the service's role its schema"
    return Transient(f"the views' database: {type(error).__name__}: {error}; {advice}", retry_after_s)

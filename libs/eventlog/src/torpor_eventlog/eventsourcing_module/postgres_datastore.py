"""A log in a PostgreSQL database, used from any thread: one thread of ours runs the event loop of the connections."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any, Final, TypeVar

import asyncpg
from eventsourcing.persistence import IntegrityError, OperationalError, PersistenceError, ProgrammingError

from torpor_contracts.errors import TorporError
from torpor_eventlog.eventsourcing_module.datastore import Arrivals, Transaction, meaning_of
from torpor_eventlog.planning import Plan, Prepared
from torpor_eventlog.postgres_schema import COMMAND_S_MAX, CONNECT_S_MAX, ERRORS, as_transient, prepare_database
from torpor_eventlog.postgres_writer import place

Answer = TypeVar("Answer")
Connection = Any
"""A connection of the pool: asyncpg's type of it is no `Connection`, but has all its methods."""

CONNECTIONS_MAX: Final = 8
"""Connections of one factory; one thread more waits."""

_SCHEMA: Final = "torpor_eventsourcing"


class PostgresDatastore:
    """The log in the database that `dsn` names, which is made if there is none."""

    events = "torpor_log.events"
    bytes_type = "bytea"

    def __init__(self, dsn: str) -> None:
        self.arrived = Arrivals()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="eventsourcing-postgres", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._pool = self._wait_for(self._open(dsn))
        except BaseException:
            self._stop()
            raise

    def marks(self, count: int) -> list[str]:
        """See `Datastore.marks`."""
        return [f"${number}" for number in range(1, count + 1)]

    def own(self, table: str) -> str:
        """See `Datastore.own`."""
        return f"{_SCHEMA}.{table}"

    def create(self, statements: Sequence[str]) -> None:
        """See `Datastore.create`."""
        with self.writing() as transaction:
            transaction.fetch("SELECT pg_advisory_xact_lock(hashtext('torpor_eventsourcing'))")
            if not transaction.fetch("SELECT to_regnamespace($1)::text", _SCHEMA)[0][0]:
                transaction.fetch(f"CREATE SCHEMA {_SCHEMA}")
            for statement in statements:
                transaction.fetch(statement)

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """See `Datastore.reading`."""
        with self._transaction("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY") as transaction:
            yield transaction

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        """See `Datastore.writing`."""
        with self._transaction("BEGIN") as transaction:
            yield transaction
        self.arrived.notify()

    def close(self) -> None:
        """See `Datastore.close`."""
        if not self._closed:
            self._wait_for(self._close_pool())
            self._closed = True
            self._stop()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Transaction]:
        connection = self._wait_for(self._begun(begin))
        ended = "ROLLBACK"
        try:
            yield _PostgresTransaction(self, connection)
            self._wait_for(connection.execute("COMMIT"))
            ended = ""
        finally:
            self._wait_for(self._give_back(connection, ended))

    async def _begun(self, begin: str) -> Connection:
        connection = await self._pool.acquire(timeout=COMMAND_S_MAX)
        try:
            await connection.execute(begin)
        except BaseException:
            await self._pool.release(connection)
            raise
        return connection

    async def _give_back(self, connection: Connection, ended: str) -> None:
        try:
            if ended and not connection.is_closed():
                await connection.execute(ended)
        finally:
            await self._pool.release(connection)

    def _wait_for(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        if self._closed:
            work.close()
            raise ProgrammingError("the log's database is closed")
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except PersistenceError:
            raise
        except TorporError as error:
            raise meaning_of(error) from error
        except asyncpg.IntegrityConstraintViolationError as error:
            raise IntegrityError(str(error)) from error
        except ERRORS as error:
            raise OperationalError(str(as_transient(error))) from error

    async def _open(self, dsn: str) -> asyncpg.Pool:
        await prepare_database(dsn)
        return await asyncpg.create_pool(
            dsn,
            min_size=0,
            max_size=CONNECTIONS_MAX,
            timeout=CONNECT_S_MAX,
            command_timeout=COMMAND_S_MAX,
            server_settings={"application_name": "torpor-eventsourcing", "lock_timeout": "10s"},
            init=_make_durable,
            reset=_leave,
        )

    async def _close_pool(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _make_durable(connection: asyncpg.Connection) -> None:
    await connection.execute(
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    )


async def _leave(_connection: asyncpg.Connection) -> None:
    """Leave a connection as it is when it goes back: its transaction has ended, and nothing else was changed."""


class _PostgresTransaction:
    """A transaction on one connection; every step is waited for in the calling thread."""

    def __init__(self, datastore: PostgresDatastore, connection: Connection) -> None:
        self._wait_for = datastore._wait_for  # noqa: SLF001  (one thing in two classes)
        self._connection = connection

    def fetch(self, sql: str, *parameters: Any) -> Sequence[Sequence[Any]]:
        """See `Transaction.fetch`."""
        return [tuple(record) for record in self._wait_for(self._connection.fetch(sql, *parameters))]

    def place(self, batch: Sequence[Prepared]) -> Plan:
        """See `Transaction.place`."""
        return self._wait_for(place(self._connection, batch))

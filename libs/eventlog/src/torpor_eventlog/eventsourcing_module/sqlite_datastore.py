"""A log in an SQLite file, used in the calling thread: writers take turns, readers have a connection each."""

import sqlite3
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final

from eventsourcing.persistence import IntegrityError, OperationalError, ProgrammingError

from torpor_contracts.errors import TorporError
from torpor_eventlog.eventsourcing_module.datastore import Arrivals, Transaction, meaning_of
from torpor_eventlog.planning import Plan, Prepared
from torpor_eventlog.sqlite_file import as_transient, connect, prepare_file, while_busy
from torpor_eventlog.sqlite_writer import place

BUSY_WAIT_S: Final = 5.0
IDLE_MAX: Final = 8
"""Connections kept for the next reader; any number may be in use."""


class SqliteDatastore:
    """The log in the file at `path`, which is made if there is none."""

    events = "events"
    bytes_type = "BLOB"

    def __init__(self, path: Path) -> None:
        self.arrived = Arrivals()
        self._path = path
        self._write_lock = Lock()
        self._idle: deque[sqlite3.Connection] = deque()
        self._in_use: set[sqlite3.Connection] = set()
        self._lock = Lock()
        self._closed = False
        try:
            prepare_file(path, BUSY_WAIT_S)
        except TorporError as error:
            raise meaning_of(error) from error

    def marks(self, count: int) -> list[str]:
        """See `Datastore.marks`."""
        return ["?"] * count

    def own(self, table: str) -> str:
        """See `Datastore.own`."""
        return f"eventsourcing_{table}"

    def create(self, statements: Sequence[str]) -> None:
        """See `Datastore.create`."""
        with self.writing() as transaction:
            for statement in statements:
                transaction.fetch(statement)

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """See `Datastore.reading`."""
        with self._connection() as connection:
            connection.execute(f"PRAGMA busy_timeout = {BUSY_WAIT_S * 1000:.0f}")  # while another recovers the file
            connection.execute("BEGIN")
            yield _SqliteTransaction(connection)
            connection.execute("COMMIT")

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        """See `Datastore.writing`."""
        with self._write_lock, self._connection() as connection:
            connection.execute("PRAGMA busy_timeout = 0")
            while_busy(lambda: connection.execute("BEGIN IMMEDIATE"), BUSY_WAIT_S)
            yield _SqliteTransaction(connection)
            connection.execute("COMMIT")
        self.arrived.notify()

    def close(self) -> None:
        """See `Datastore.close`."""
        with self._lock:
            self._closed = True
            connections = [*self._idle]
            self._idle.clear()
        for connection in connections:
            connection.close()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._closed:
                raise ProgrammingError(f"the log {self._path} is closed")
            connection = self._idle.pop() if self._idle else None
        try:
            connection = connection or connect(self._path)
            yield connection
        except sqlite3.IntegrityError as error:
            raise IntegrityError(str(error)) from error
        except sqlite3.Error as error:
            raise OperationalError(str(as_transient(error, self._path))) from error
        finally:
            if connection is not None:
                self._give_back(connection)

    def _give_back(self, connection: sqlite3.Connection) -> None:
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        with self._lock:
            keep = not self._closed and not connection.in_transaction and len(self._idle) < IDLE_MAX
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()


class _SqliteTransaction:
    """A transaction on one connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def fetch(self, sql: str, *parameters: Any) -> Sequence[Sequence[Any]]:
        """See `Transaction.fetch`."""
        return self._connection.execute(sql, parameters).fetchall()

    def place(self, batch: Sequence[Prepared]) -> Plan:
        """See `Transaction.place`."""
        return place(self._connection, batch)

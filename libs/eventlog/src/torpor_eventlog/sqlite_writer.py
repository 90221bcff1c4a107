"""The one connection of a process that writes to the log's SQLite file; used by one thread at a time."""

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.errors import InvariantViolation, Transient
from torpor_eventlog.merkle import Frontier
from torpor_eventlog.optimism import NONE_KNOWN, Kept, all_placed, streams_of
from torpor_eventlog.planning import End, Known, Plan, Prepared, plan, receipt_from
from torpor_eventlog.sqlite_file import as_transient, connect, while_busy

_INSERT_ROW: Final = "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_NODE: Final = "INSERT INTO nodes VALUES (?, ?, ?)"
_SET_HEAD: Final = "UPDATE head SET position = ?, digest = ?, frontier = ?"
_GET_HEAD: Final = "SELECT position, digest, frontier FROM head"
_GET_VERSIONS: Final = """
    SELECT wanted.value, (SELECT max(version) FROM events WHERE stream = wanted.value) FROM json_each(?) AS wanted
"""
_GET_KNOWN: Final = """
    SELECT command_id, request_digest, stream, version, position, digest
    FROM json_each(?) AS wanted CROSS JOIN events ON command_id = wanted.value AND request_digest IS NOT NULL
"""


class SqliteWriter:
    """Writes batches. Every error leaves nothing of its batch in the log, and the next batch starts afresh.

    A batch is first written in the hope that no commit lost its race or is known already: the unique indexes would
    tell. Only when that fails does each commit get looked up, so that the others are not held up by it.
    """

    def __init__(self, path: Path, busy_wait_s: float) -> None:
        self._path = path
        self._busy_wait_s = busy_wait_s
        self._connection: sqlite3.Connection | None = None
        self._opened_file: tuple[int, int] | None = None
        self._kept = Kept()

    def write(self, batch: Sequence[Prepared]) -> Plan:
        """Place the batch and make it durable. Raises `Transient` when the database does not let us."""
        try:
            connection = self._connected()
            planned = self._hopefully(connection, batch) or self._exactly(connection, batch)
        except sqlite3.IntegrityError as error:
            self.close()
            raise InvariantViolation(
                f"the log {self._path} holds rows its head does not know; run `torpor audit verify` ({error})"
            ) from error
        except sqlite3.Error as error:
            self.close()
            raise as_transient(error, self._path) from error
        except BaseException:
            self.close()
            raise
        self._kept.remember(planned)
        return planned

    def _hopefully(self, connection: sqlite3.Connection, batch: Sequence[Prepared]) -> Plan | None:
        end = self._begin(connection)
        versions, unsure = self._kept.versions_at(end, batch)
        if unsure:
            versions.update(_versions(connection, unsure))
        planned = plan(batch, end, versions, NONE_KNOWN)
        if all_placed(planned):
            try:
                _insert(connection, planned)
                connection.execute("COMMIT")
            except sqlite3.IntegrityError:
                pass
            else:
                return planned
        connection.execute("ROLLBACK")
        return None

    def _exactly(self, connection: sqlite3.Connection, batch: Sequence[Prepared]) -> Plan:
        self._begin(connection)
        planned = place(connection, batch)
        connection.execute("COMMIT")
        return planned

    def _begin(self, connection: sqlite3.Connection) -> End:
        while_busy(lambda: connection.execute("BEGIN IMMEDIATE"), self._busy_wait_s)
        position, digest, frontier = connection.execute(_GET_HEAD).fetchone()
        if digest == self._kept.end.digest:
            return self._kept.end
        return End(position, digest, Frontier.from_bytes(position, frontier))

    def close(self) -> None:
        """Roll back what is open, and let go of the file."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _connected(self) -> sqlite3.Connection:
        try:
            status = self._path.stat()
        except OSError as error:
            self.close()
            raise Transient(f"the log {self._path} is not there; put it back ({error})", 5.0) from error
        file = (status.st_dev, status.st_ino)
        if self._opened_file not in {None, file}:
            raise Transient(f"another file has taken the place of the log {self._path}; restart Torpor", 30.0)
        if self._connection is None:
            self._connection, self._opened_file = connect(self._path), file
            self._connection.execute("PRAGMA busy_timeout = 0")  # `while_busy` waits better
        return self._connection


def place(connection: sqlite3.Connection, batch: Sequence[Prepared]) -> Plan:
    """Place a batch in the write transaction that is open, looking everything up; nothing is committed."""
    position, digest, frontier = connection.execute(_GET_HEAD).fetchone()
    end = End(position, digest, Frontier.from_bytes(position, frontier))
    planned = plan(batch, end, _versions(connection, streams_of(batch)), _known(connection, batch))
    if planned.rows:
        _insert(connection, planned)
    return planned


def _insert(connection: sqlite3.Connection, planned: Plan) -> None:
    connection.executemany(_INSERT_ROW, planned.rows)
    if planned.nodes:
        connection.executemany(_INSERT_NODE, planned.nodes)
    end = planned.end
    connection.execute(_SET_HEAD, (end.position, end.digest, end.frontier.to_bytes()))


def _versions(connection: sqlite3.Connection, streams: Iterable[str]) -> dict[str, int]:
    found = connection.execute(_GET_VERSIONS, (msgspec.json.encode(list(streams)).decode(),))
    return {stream: version for stream, version in found if version is not None}


def _known(connection: sqlite3.Connection, batch: Sequence[Prepared]) -> dict[str, Known]:
    ids = [prepared.commit.command_id for prepared in batch]
    found = connection.execute(_GET_KNOWN, (msgspec.json.encode(ids).decode(),))
    return {
        command_id: Known(request_digest, receipt_from(command_id, stream, version, position, digest))
        for command_id, request_digest, stream, version, position, digest in found
    }

"""Reads the log's SQLite file; every call is one consistent look, and none can change anything."""

import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import starmap
from pathlib import Path
from typing import Final

from torpor_contracts.ids import CommandId
from torpor_contracts.replies import Receipt
from torpor_eventlog.merkle import Frontier, ProofPlan, Span
from torpor_eventlog.planning import End, receipt_from
from torpor_eventlog.port import Head, Recorded
from torpor_eventlog.sqlite_file import connect

_COLUMNS: Final = (
    "position, stream, version, tag, data, occurred_at_us, command_id, causation_id, correlation_id, tenant_id, digest"
)
_READ: Final = f"SELECT {_COLUMNS} FROM events WHERE position > ? ORDER BY position LIMIT ?"  # noqa: S608  (constants)
_LOAD: Final = f"SELECT {_COLUMNS} FROM events WHERE stream = ? AND version > ? ORDER BY version"  # noqa: S608
_RECEIPT: Final = """
    SELECT stream, version, position, digest FROM events WHERE command_id = ? AND request_digest IS NOT NULL
"""
_LEAVES: Final = "SELECT digest FROM events WHERE position > ? AND position <= ? ORDER BY position"
_NODES: Final = "SELECT digest FROM nodes WHERE level = ? AND number >= ? AND number < ? ORDER BY number"


class SqliteReader:
    """One connection for each thread that reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own = threading.local()
        self._all: list[sqlite3.Connection] = []

    def read(self, after_position: int, limit: int) -> list[Recorded]:
        """See `EventLog.read`."""
        return self._rows(_READ, (max(0, after_position), max(0, limit)))

    def load(self, stream: str, after_version: int) -> list[Recorded]:
        """See `EventLog.load`."""
        return self._rows(_LOAD, (stream, after_version))

    def receipt(self, command_id: CommandId) -> Receipt | None:
        """See `EventLog.receipt`."""
        row = self._connected().execute(_RECEIPT, (command_id,)).fetchone()
        if row is None:
            return None
        stream, version, position, digest = row
        return receipt_from(command_id, stream, version, position, digest)

    def head(self) -> Head:
        """See `EventLog.head`."""
        position, digest, frontier = self._connected().execute("SELECT position, digest, frontier FROM head").fetchone()
        return End(position, digest, Frontier.from_bytes(position, frontier)).head()

    def proof(self, planned_at: Callable[[int], ProofPlan]) -> list[bytes]:
        """The proof that is planned for the log's last position."""
        (last_position,) = self._connected().execute("SELECT position FROM head").fetchone()
        planned = planned_at(last_position)
        return planned.resolve({span: self._digests(span) for span in planned.spans()})

    def close(self) -> None:
        """Let go of the file; no thread may be reading."""
        for connection in self._all:
            with suppress(sqlite3.Error):
                connection.close()
        self._all.clear()

    def _rows(self, statement: str, parameters: tuple[str | int, ...]) -> list[Recorded]:
        return list(starmap(Recorded, self._connected().execute(statement, parameters)))

    def _digests(self, span: Span) -> list[bytes]:
        if span.level == 0:
            found = self._connected().execute(_LEAVES, (span.first, span.first + span.size))
        else:
            found = self._connected().execute(_NODES, (span.level, span.first, span.first + span.size))
        return [digest for (digest,) in found]

    def _connected(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = connect(self._path)
            connection.execute("PRAGMA query_only = ON")
            self._own.connection = connection
            self._all.append(connection)
        return connection

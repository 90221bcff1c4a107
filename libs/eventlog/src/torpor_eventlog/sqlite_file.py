"""The log's SQLite file: its schema, how it is opened and checked, and what SQLite's errors mean to who appends."""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from torpor_contracts.errors import Transient
from torpor_eventlog.failures import LogUnusable

Answer = TypeVar("Answer")

APPLICATION_ID: Final = 0x54525052
"""Marks a file as a Torpor log (`file` shows it)."""

SCHEMA_VERSION: Final = 1

BUSY_WAIT_S: Final = 5.0
"""How long other processes are waited for; their transactions last milliseconds."""

_WAL_PAGES: Final = 4000
"""After so many pages (16 MB) the write-ahead log is folded back into the file."""

_PAUSE_S_MIN: Final = 0.000_2
_PAUSE_S_MAX: Final = 0.002

_SCHEMA: Final = (
    """
    CREATE TABLE events (
        position INTEGER PRIMARY KEY,
        stream TEXT NOT NULL,
        version INTEGER NOT NULL,
        tag TEXT NOT NULL,
        data BLOB NOT NULL,
        occurred_at_us INTEGER NOT NULL,
        command_id TEXT NOT NULL,
        causation_id TEXT NOT NULL,
        correlation_id TEXT NOT NULL,
        tenant_id TEXT NOT NULL,
        digest BLOB NOT NULL,
        request_digest BLOB
    ) STRICT
    """,
    "CREATE UNIQUE INDEX events_by_stream ON events (stream, version)",
    "CREATE UNIQUE INDEX receipts ON events (command_id) WHERE request_digest IS NOT NULL",
    """
    CREATE TABLE nodes (
        level INTEGER NOT NULL, number INTEGER NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (level, number)
    ) STRICT, WITHOUT ROWID
    """,
    """
    CREATE TABLE head (
        id INTEGER PRIMARY KEY CHECK (id = 1), position INTEGER NOT NULL, digest BLOB NOT NULL, frontier BLOB NOT NULL
    ) STRICT
    """,
    "INSERT INTO head VALUES (1, 0, zeroblob(32), x'')",
    """
    CREATE TRIGGER events_are_never_changed BEFORE UPDATE ON events
    BEGIN SELECT raise(ABORT, 'the log never edits an event'); END
    """,
    """
    CREATE TRIGGER events_are_never_deleted BEFORE DELETE ON events
    BEGIN SELECT raise(ABORT, 'the log never forgets an event'); END
    """,
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)


def connect(path: Path, busy_wait_s: float = BUSY_WAIT_S) -> sqlite3.Connection:
    """A connection in autocommit mode; it may move between threads, but only one may use it at a time."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        timeout=busy_wait_s,  # whoever comes first after a crash recovers the write-ahead log; the others wait for it
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_PAGES * 4096 * 2}")
    return connection


def prepare_file(path: Path, busy_wait_s: float) -> None:
    """Make sure that `path` is a log of this release, and make one if there is nothing yet.

    Raises `LogUnusable` when it is something else or cannot be written, `Transient` when it stays locked.
    """
    if not path.parent.is_dir():
        raise LogUnusable(
            "log-without-directory", f"the directory {path.parent} does not exist", "create it, or name another path"
        )
    try:
        while_busy(lambda: _prepare(path, busy_wait_s), busy_wait_s)
    except sqlite3.Error as error:
        raise _opening_error(error, path) from error
    except OSError as error:
        raise LogUnusable(
            "log-unwritable", str(error), "make the file and its directory readable and writable"
        ) from error


def while_busy(attempt: Callable[[], Answer], busy_wait_s: float) -> Answer:
    """Repeat `attempt` while another connection holds the lock, for `busy_wait_s` at most.

    SQLite's own waiting sleeps up to 100 ms at a time, far longer than any of our transactions lasts: turn it off.
    """
    deadline, pause_s = time.monotonic() + busy_wait_s, _PAUSE_S_MIN
    while True:
        try:
            return attempt()
        except sqlite3.OperationalError as error:
            if _primary_code(error) not in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
                raise
            if time.monotonic() >= deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _PAUSE_S_MAX)


def as_transient(error: sqlite3.Error, path: Path) -> Transient:
    """What an error of a log that could be opened means: nothing was appended, and what must change first."""
    message, retry_after_s = {
        sqlite3.SQLITE_BUSY: ("another process keeps the log {path} locked; end it if this lasts", 0.5),
        sqlite3.SQLITE_LOCKED: ("another process keeps the log {path} locked; end it if this lasts", 0.5),
        sqlite3.SQLITE_FULL: ("the disk under the log {path} is full; free some space there", 5.0),
        sqlite3.SQLITE_READONLY: ("the log {path} is read-only; make the file and its directory writable", 5.0),
        sqlite3.SQLITE_PERM: ("the log {path} may not be opened; give this user access to it", 5.0),
        sqlite3.SQLITE_CANTOPEN: ("the log {path} cannot be opened; see that the disk is mounted and writable", 5.0),
        sqlite3.SQLITE_IOERR: ("the disk under the log {path} fails; look at the system's log", 5.0),
        sqlite3.SQLITE_CORRUPT: ("the log {path} is damaged; stop Torpor and run `torpor audit verify`", 30.0),
        sqlite3.SQLITE_NOTADB: ("the log {path} is damaged; stop Torpor and run `torpor audit verify`", 30.0),
    }.get(_primary_code(error), ("the log {path} could not be used", 1.0))
    return Transient(f"{message.format(path=path)} (SQLite: {error})", retry_after_s)


def _prepare(path: Path, busy_wait_s: float) -> None:
    path.open("ab").close()  # SQLite's own creation would also create files for a mistyped path in later connections
    connection = connect(path, busy_wait_s)
    try:
        connection.execute("BEGIN IMMEDIATE")
        if _is_empty(connection):
            connection.execute("ROLLBACK")
            _use_wal(connection, path)
            connection.execute("BEGIN IMMEDIATE")
            if _is_empty(connection):
                for statement in _SCHEMA:
                    connection.execute(statement)
        _check(connection, path)
        connection.execute("COMMIT")
    finally:
        connection.close()


def _use_wal(connection: sqlite3.Connection, path: Path) -> None:
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise LogUnusable(
            "log-without-wal",
            f"the file system under {path} lacks the shared memory of a write-ahead log",
            "keep the log on a local disk",
        )


def _is_empty(connection: sqlite3.Connection) -> bool:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    return bool(tables == 0)


def _check(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise LogUnusable("log-foreign", f"{path} is another program's database", "name another path for the log")
    if version != SCHEMA_VERSION:
        raise LogUnusable(
            "log-schema-unknown",
            f"{path} has schema version {version}; this release knows {SCHEMA_VERSION}",
            "run the release that wrote it, or a newer one",
        )
    (last,) = connection.execute("SELECT max(position) FROM events").fetchone()
    (head,) = connection.execute("SELECT position FROM head").fetchone()
    if (last or 0) != head:
        raise LogUnusable(
            "log-damaged",
            f"{path} ends at position {last}, but its head says {head}",
            "restore the file from a backup or a replica; nothing may be appended to it as it is",
        )


def _opening_error(error: sqlite3.Error, path: Path) -> Exception:
    code = _primary_code(error)
    if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL}:
        return as_transient(error, path)
    if code == sqlite3.SQLITE_NOTADB:
        return LogUnusable("log-not-a-database", f"{path} is no SQLite file", "name another path for the log")
    if code == sqlite3.SQLITE_CORRUPT:
        return LogUnusable("log-damaged", f"{path} is damaged: {error}", "restore the file from a backup or a replica")
    return LogUnusable("log-unwritable", f"{path}: {error}", "make the file and its directory readable and writable")


def _primary_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 for an error that the Python module raised by itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF

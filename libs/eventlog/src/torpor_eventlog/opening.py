"""Opens the log that a DSN names; each implementation is imported only when it is asked for."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from torpor_eventlog.failures import LogUnusable
from torpor_eventlog.port import EventLog


async def open_log(dsn: str, on_commit: Callable[[int], None] | None = None) -> EventLog:
    """The log at `sqlite:///path` (`sqlite:////absolute/path`) or `postgresql://user@host/database`.

    `on_commit` is told the new last position after each commit of this instance; it must be quick and not raise.
    Raises `LogUnusable` for a log that cannot be opened as it is, `Transient` when the database is away.
    """
    scheme = urlsplit(dsn).scheme
    if scheme == "sqlite":
        from torpor_eventlog.sqlite import SqliteLog  # noqa: PLC0415  (a cluster never needs it)

        return await SqliteLog.open(sqlite_path(dsn), on_commit)
    if scheme in {"postgresql", "postgres"}:
        from torpor_eventlog.postgres import PostgresLog  # noqa: PLC0415  (an embedded Torpor never needs it)

        return await PostgresLog.open(dsn, on_commit)
    raise LogUnusable(
        "log-dsn-illegal", f"{dsn!r} names no log", "use sqlite:///path/to/log.db or postgresql://user@host/database"
    )


def sqlite_path(dsn: str) -> Path:
    """The file that an SQLite DSN names: three slashes before a relative path, four before an absolute one."""
    parts = urlsplit(dsn)
    path = unquote(parts.path)[1:]
    if parts.netloc or not path:
        raise LogUnusable("log-dsn-illegal", f"{dsn!r} names no file", "use sqlite:///relative or sqlite:////absolute")
    return Path(path)

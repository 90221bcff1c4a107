"""The log's PostgreSQL schema, how it is made and checked, and what the server's errors mean to who appends."""

import asyncio
from typing import Final

import asyncpg

from torpor_contracts.errors import Transient
from torpor_eventlog.failures import LogUnusable

SCHEMA_VERSION: Final = 1

COMMAND_S_MAX: Final = 30.0
"""How long one statement may take before the connection is given up."""

CONNECT_S_MAX: Final = 5.0

LOCK_WAIT_S: Final = 5.0
"""How long a statement waits for other writers' batches, which last milliseconds."""

_SCHEMA_LOCK: Final = 0x54525052
"""The advisory lock under which the schema is made, so that several services may start at once."""

_SCHEMA: Final = """
CREATE SCHEMA torpor_log;
CREATE TABLE torpor_log.events (
    position bigint PRIMARY KEY,
    stream text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    tag text NOT NULL,
    data bytea NOT NULL,
    occurred_at_us bigint NOT NULL,
    command_id text COLLATE "C" NOT NULL,
    causation_id text NOT NULL,
    correlation_id text NOT NULL,
    tenant_id text NOT NULL,
    digest bytea NOT NULL,
    request_digest bytea
);
CREATE UNIQUE INDEX events_by_stream ON torpor_log.events (stream, version);
CREATE UNIQUE INDEX receipts ON torpor_log.events (command_id) WHERE request_digest IS NOT NULL;
CREATE TABLE torpor_log.nodes (
    level smallint NOT NULL, number bigint NOT NULL, digest bytea NOT NULL, PRIMARY KEY (level, number)
);
CREATE TABLE torpor_log.head (
    id smallint PRIMARY KEY CHECK (id = 1),
    schema_version integer NOT NULL,
    position bigint NOT NULL,
    digest bytea NOT NULL,
    frontier bytea NOT NULL
) WITH (fillfactor = 10);
INSERT INTO torpor_log.head VALUES (1, 1, 0, decode(repeat('00', 32), 'hex'), '');
CREATE FUNCTION torpor_log.refuse() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'the log never edits or forgets an event'; END $$;
CREATE TRIGGER events_are_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON torpor_log.events
    FOR EACH STATEMENT EXECUTE FUNCTION torpor_log.refuse();
"""

AWAY: Final = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InternalClientError,
)
"""Errors after which the connection is gone, and what was under way may have happened or not."""

ERRORS: Final = (*AWAY, asyncpg.PostgresError)


async def connect(dsn: str, lock_wait_s: float = LOCK_WAIT_S) -> asyncpg.Connection:
    """A connection with bounded waits, whose commits are durable whatever the server's default is."""
    connection: asyncpg.Connection = await asyncpg.connect(
        dsn,
        timeout=CONNECT_S_MAX,
        command_timeout=COMMAND_S_MAX,
        server_settings={"lock_timeout": f"{lock_wait_s * 1000:.0f}ms", "application_name": "torpor-log"},
    )
    try:
        await connection.execute(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
    except BaseException:
        connection.terminate()
        raise
    return connection


async def let_go(connection: asyncpg.Connection) -> None:
    """Close a connection, whatever state it is in; the server rolls back what is open."""
    try:
        await connection.close(timeout=CONNECT_S_MAX)
    except ERRORS:
        connection.terminate()


async def prepare_database(dsn: str, lock_wait_s: float = LOCK_WAIT_S) -> None:
    """Make sure that the database holds a log of this release, and make one if there is none yet.

    Raises `LogUnusable` when it cannot be one, `Transient` when the server is away.
    """
    try:
        connection = await connect(dsn, lock_wait_s)
        try:
            async with connection.transaction():
                await connection.execute("SELECT pg_advisory_xact_lock($1)", _SCHEMA_LOCK)
                if await connection.fetchval("SELECT to_regclass('torpor_log.head') IS NULL"):
                    await connection.execute(_SCHEMA)
                await _check(connection)
        finally:
            await let_go(connection)
    except (*ERRORS, ValueError) as error:
        raise _opening_error(error) from error


def as_transient(error: BaseException) -> Transient:
    """What an error of a log that could be opened means: nothing was appended, and what must change first."""
    for kind, message, retry_after_s in (
        (asyncpg.LockNotAvailableError, "another writer keeps the log locked; end it if this lasts", 0.5),
        (asyncpg.DiskFullError, "the disk under the log's database is full; free some space there", 5.0),
        (asyncpg.ReadOnlySQLTransactionError, "the log's database is a read-only replica; name the primary", 5.0),
        (asyncpg.InsufficientPrivilegeError, "the log's user may not write; grant it the schema torpor_log", 5.0),
        (asyncpg.DataCorruptedError, "the log's database is damaged; stop Torpor and run `torpor audit verify`", 30.0),
        (asyncpg.UndefinedTableError, "the log's tables are gone; restore the database from a backup", 30.0),
        (asyncpg.InvalidAuthorizationSpecificationError, "the log's database refuses this user", 5.0),
        (asyncpg.TooManyConnectionsError, "the log's database has no connection left; raise max_connections", 1.0),
        (asyncio.TimeoutError, "the log's database does not answer", 1.0),
    ):
        if isinstance(error, kind):
            return Transient(f"{message} ({_words(error)})", retry_after_s)
    return Transient(f"the log's database is away ({_words(error)})", 1.0)


async def _check(connection: asyncpg.Connection) -> None:
    ((version, head, last),) = await connection.fetch(
        "SELECT schema_version, position, (SELECT coalesce(max(position), 0) FROM torpor_log.events)"
        " FROM torpor_log.head"
    )
    if version != SCHEMA_VERSION:
        raise LogUnusable(
            "log-schema-unknown",
            f"the database's log has schema version {version}; this release knows {SCHEMA_VERSION}",
            "run the release that wrote it, or a newer one",
        )
    if head != last:
        raise LogUnusable(
            "log-damaged",
            f"the log ends at position {last}, but its head says {head}",
            "restore the database from a backup or a replica; nothing may be appended to it as it is",
        )


def _opening_error(error: BaseException) -> Exception:
    words = _words(error)
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return LogUnusable("log-without-database", words, "create the database, or name another one")
    if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError):
        return LogUnusable("log-login-refused", words, "check the user and the password of the DSN")
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return LogUnusable("log-unwritable", words, "let the user create schemas in this database, or make torpor_log")
    if isinstance(error, ValueError):
        return LogUnusable("log-dsn-illegal", words, "use postgresql://user@host/database")
    return as_transient(error)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__

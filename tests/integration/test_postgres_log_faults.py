"""What the log in PostgreSQL says when server, rights or neighbours will not let it, and that it goes on then."""

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.support.event_logs import check_sound, commit, new_id
from tests.support.postgres import PostgresServer
from torpor_contracts.errors import InvariantViolation, Transient
from torpor_eventlog.failures import LogUnusable
from torpor_eventlog.postgres import PostgresLog

pytestmark = [pytest.mark.anyio, pytest.mark.postgres]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def log(postgres_dsn: str) -> AsyncIterator[PostgresLog]:
    async with asyncio.timeout(60):
        log = await PostgresLog.open(postgres_dsn, lock_wait_s=0.05)
        yield log
        await log.close()


@pytest.fixture
async def administrator(log: PostgresLog, postgres_dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """Another connection to the log's database, made after the log."""
    connection = await asyncpg.connect(postgres_dsn)
    yield connection
    await connection.close()


async def test_a_locked_log_says_so_and_goes_on(log: PostgresLog, administrator: asyncpg.Connection) -> None:
    first = await log.append(commit("stream-a"))
    async with administrator.transaction():
        await administrator.execute("SELECT * FROM torpor_log.head FOR UPDATE")
        answers = await asyncio.gather(
            *(log.append(commit(new_id("stream"))) for _ in range(5)), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [Transient] * 5
        assert "locked" in str(answers[0])
        assert await log.receipt(first.command_id) == first
    assert (await log.append(commit("stream-b"))).position == 2
    await check_sound(log)


async def test_a_read_only_database_says_so_and_goes_on(
    log: PostgresLog, administrator: asyncpg.Connection, postgres_dsn: str
) -> None:
    database = urlsplit(postgres_dsn).path[1:]
    await log.append(commit("stream-a"))
    await administrator.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    await log._writer.close()  # as a fail-over would: the next connection finds a replica
    with pytest.raises(Transient, match="name the primary"):
        await log.append(commit("stream-b"))
    await administrator.execute(f"ALTER DATABASE {database} RESET default_transaction_read_only")
    assert (await log.append(commit("stream-b"))).position == 2


async def test_rows_beyond_the_head_are_a_broken_invariant_and_nothing_is_written_over(
    log: PostgresLog, administrator: asyncpg.Connection
) -> None:
    await log.append(commit("stream-a"))
    await administrator.execute(
        "INSERT INTO torpor_log.events SELECT 2, 'x', 1, 'x', data, 0, 'x', 'x', 'x', 'x', digest, NULL"
        " FROM torpor_log.events"
    )
    with pytest.raises(InvariantViolation, match="audit verify"):
        await log.append(commit("stream-b"))
    assert [row.stream for row in await log.read(0, 10)] == ["stream-a", "x"]


@pytest.mark.parametrize(
    "statement",
    ["UPDATE torpor_log.events SET data = ''", "DELETE FROM torpor_log.events", "TRUNCATE torpor_log.events"],
)
async def test_the_database_itself_refuses_to_edit_or_forget(
    log: PostgresLog, administrator: asyncpg.Connection, statement: str
) -> None:
    await log.append(commit("stream-a"))
    with pytest.raises(asyncpg.RaiseError, match="the log never"):
        await administrator.execute(statement)
    await check_sound(log)


async def test_commits_are_durable_whatever_the_server_defaults_to(
    log: PostgresLog, administrator: asyncpg.Connection, postgres_dsn: str
) -> None:
    database = urlsplit(postgres_dsn).path[1:]
    await administrator.execute(f"ALTER DATABASE {database} SET synchronous_commit = off")
    await log.append(commit("stream-a"))
    assert log._writer._connection is not None
    assert await log._writer._connection.fetchval("SHOW synchronous_commit") == "on"


async def test_many_may_make_the_same_log_at_once(postgres_dsn: str) -> None:
    logs = await asyncio.gather(*(PostgresLog.open(postgres_dsn) for _ in range(6)))
    receipts = await asyncio.gather(*(log.append(commit(new_id("stream"))) for log in logs))
    assert sorted(receipt.position for receipt in receipts) == list(range(1, 7))
    for log in logs:
        await log.close()


async def test_a_log_of_the_future_is_refused(
    log: PostgresLog, administrator: asyncpg.Connection, postgres_dsn: str
) -> None:
    await administrator.execute("UPDATE torpor_log.head SET schema_version = 2")
    with pytest.raises(LogUnusable) as refused:
        await PostgresLog.open(postgres_dsn)
    assert refused.value.code == "log-schema-unknown"


async def test_a_log_without_its_tail_is_refused(
    log: PostgresLog, administrator: asyncpg.Connection, postgres_dsn: str
) -> None:
    await log.append(commit("stream-a", "stream-a"))
    await administrator.execute("DROP TRIGGER events_are_never_changed ON torpor_log.events")
    await administrator.execute("DELETE FROM torpor_log.events WHERE position = 2")
    with pytest.raises(LogUnusable) as refused:
        await PostgresLog.open(postgres_dsn)
    assert refused.value.code == "log-damaged"


async def test_a_database_that_does_not_exist_is_refused(postgres_server: PostgresServer) -> None:
    with pytest.raises(LogUnusable) as refused:
        await PostgresLog.open(postgres_server.dsn("nowhere"))
    assert refused.value.code == "log-without-database"


async def test_a_user_without_rights_is_refused(administrator: asyncpg.Connection, postgres_dsn: str) -> None:
    role = new_id("guest").replace("-", "_")
    await administrator.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'guest'")
    try:
        parts = urlsplit(postgres_dsn)
        guest = parts._replace(netloc=f"{role}:guest@{parts.netloc.rpartition('@')[2]}").geturl()
        with pytest.raises(LogUnusable) as refused:
            await PostgresLog.open(guest)
        assert refused.value.code == "log-unwritable"
    finally:
        await administrator.execute(f"DROP ROLE {role}")


async def test_a_server_that_is_away_is_waited_for(postgres_server: PostgresServer) -> None:
    away = postgres_server.dsn("postgres").replace("host=/tmp/", "host=/tmp/nowhere-")
    with pytest.raises(Transient, match="away"):
        await PostgresLog.open(away if "nowhere" in away else "postgresql://torpor@127.0.0.1:1/postgres")


async def test_a_dsn_that_is_none_is_refused() -> None:
    with pytest.raises(LogUnusable) as refused:
        await PostgresLog.open("postgresql://user@host:port/database")
    assert refused.value.code == "log-dsn-illegal"

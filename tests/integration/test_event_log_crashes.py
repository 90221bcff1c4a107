"""Processes that append are killed, and so is the database: no gap, no torn command, no acknowledged one lost."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import asyncpg
import msgspec
import pytest

from tests.support.event_logs import InPostgres, InSqlite, check_sound, commit, new_id
from tests.support.postgres import PostgresServer
from torpor_contracts.errors import Transient
from torpor_contracts.replies import Receipt
from torpor_eventlog.opening import open_log
from torpor_eventlog.port import Commit, EventLog

pytestmark = pytest.mark.anyio

ROOT: Final = Path(__file__).resolve().parents[2]
BOUND_S: Final = 120
TRIES_MAX: Final = 200


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def dsn(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'log.db'}"
    return str(request.getfixturevalue("postgres_dsn"))


async def test_killed_writers_leave_a_sound_log_with_every_receipt(dsn: str) -> None:
    acknowledged: list[Receipt] = []
    async with asyncio.timeout(BOUND_S):
        for life, enough in enumerate((1, 40, 150, 400)):
            acknowledged += await _killed_after(dsn, f"life-{life}", enough)
        log = await open_log(dsn)
        rows = await check_sound(log)
        of_command = Counter(row.command_id for row in rows)
        assert set(of_command.values()) == {2}  # a command's events stand together, or not at all
        for receipt in acknowledged:
            assert await log.receipt(receipt.command_id) == receipt
            assert rows[receipt.position - 1].digest.hex() == receipt.digest
        await log.append(commit(new_id("stream")))
        await log.close()


async def _killed_after(dsn: str, name: str, enough: int) -> list[Receipt]:
    """What two writers at once were told before both were killed, each after `enough` receipts."""
    lives = await asyncio.gather(*(_killed_writer(dsn, f"{name}-{twin}", enough) for twin in "ab"))
    return [receipt for life in lives for receipt in life]


async def _killed_writer(dsn: str, name: str, enough: int) -> list[Receipt]:
    writer = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.log_writer", dsn, name), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert writer.stdout is not None
    told: list[bytes] = []
    try:
        while len(told) < enough:
            line = await writer.stdout.readline()
            assert line, "the writer ended by itself"
            told.append(line)
    finally:
        writer.kill()
        rest, _ = await writer.communicate()
    told += [line for line in rest.splitlines(keepends=True) if line.endswith(b"\n")]
    return [msgspec.json.decode(line, type=Receipt) for line in told]


async def _until_told(log: EventLog, one: Commit) -> Receipt:
    """Ask with the same command id until the log answers."""
    for _ in range(TRIES_MAX):
        try:
            return await log.append(one)
        except Transient as error:
            await asyncio.sleep(min(error.retry_after_s, 0.05))
    raise AssertionError(f"no answer in {TRIES_MAX} tries")


async def _streams_of(log: EventLog, streams: int, events: int) -> AsyncGenerator[Receipt, None]:
    """Receipts as they come, of commands that are each asked for until they are answered."""

    async def write(stream: str) -> list[Receipt]:
        return [await _until_told(log, commit(stream, expected={stream: version})) for version in range(events)]

    for finished in asyncio.as_completed([write(new_id("stream")) for _ in range(streams)]):
        for receipt in await finished:
            yield receipt


@pytest.mark.postgres
async def test_connections_cut_at_any_moment_neither_lose_nor_repeat_a_command(
    postgres_dsn: str, postgres_server: PostgresServer
) -> None:
    log = await InPostgres(postgres_dsn).open()
    cut = 0
    administrator = await asyncpg.connect(postgres_server.dsn("postgres"))

    async def cut_connections() -> None:
        nonlocal cut
        while True:
            cut += await administrator.fetchval(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = $1",
                urlsplit(postgres_dsn).path[1:],
            )
            await asyncio.sleep(0.05)

    async with asyncio.timeout(BOUND_S):
        cutting = asyncio.ensure_future(cut_connections())
        async with aclosing(_streams_of(log, streams=20, events=10)) as told:
            receipts = [receipt async for receipt in told]
        cutting.cancel()
        rows = await check_sound(log)
        assert sorted(receipt.position for receipt in receipts) == [row.position for row in rows]
        assert len(rows) == 200
        assert cut > 3
        await log.close()
        await administrator.close()


@pytest.mark.postgres
async def test_a_log_outlives_its_server(postgres_dsn: str, postgres_server: PostgresServer) -> None:
    log = await InPostgres(postgres_dsn).open()
    async with asyncio.timeout(BOUND_S):
        first = await log.append(commit("stream-a"))
        await asyncio.to_thread(postgres_server.crash)
        try:
            with pytest.raises(Transient, match="away"):
                await log.append(commit("stream-b"))
            with pytest.raises(Transient, match="away"):
                await log.head()
        finally:
            await asyncio.to_thread(postgres_server.start)
        assert await log.receipt(first.command_id) == first
        assert (await _until_told(log, commit("stream-b"))).position == 2
        assert len(await check_sound(log)) == 2
        await log.close()


@pytest.mark.postgres
async def test_a_server_that_crashes_amid_appends_loses_nothing_acknowledged(
    postgres_dsn: str, postgres_server: PostgresServer
) -> None:
    log = await InPostgres(postgres_dsn).open()
    async with asyncio.timeout(BOUND_S):
        told: list[Receipt] = []
        async with aclosing(_streams_of(log, streams=50, events=20)) as receipts:
            async for receipt in receipts:
                told.append(receipt)
                if len(told) in {20, 400}:
                    await asyncio.to_thread(postgres_server.crash)
                    await asyncio.to_thread(postgres_server.start)
        rows = await check_sound(log)
        assert len(rows) == 1000
        assert {(receipt.position, receipt.digest) for receipt in told} == {
            (row.position, row.digest.hex()) for row in rows
        }
        await log.close()


async def test_a_reopened_file_finds_what_a_killed_process_left_in_the_write_ahead_log(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    async with asyncio.timeout(BOUND_S):
        told = await _killed_writer(f"sqlite:///{path}", "only", 20)
        assert (tmp_path / "log.db-wal").stat().st_size > 0
        logs = await asyncio.gather(*(InSqlite(path).open() for _ in range(4)))
        for log in logs:
            assert [await log.receipt(receipt.command_id) for receipt in told] == told
        assert len({(await log.head()).digest for log in logs}) == 1
        await check_sound(logs[0])
        for log in logs:
            await log.close()

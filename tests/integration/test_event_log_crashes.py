"""Processes that append are killed, and so is the database: no gap, no torn command, no acknowledged one lost."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
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


class Progress:
    """Receipts as they come, of commands that are each asked for until they are answered."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._grown = asyncio.Condition()
        self.told: list[Receipt] = []

    async def write(self, *, streams: int, events: int) -> None:
        """Append to `streams` streams at once, each `events` times, one after the other."""
        await asyncio.gather(*(self._write_one(new_id("stream"), events) for _ in range(streams)))

    async def reaches(self, receipts: int) -> None:
        """Wait until so many were told; others go on meanwhile."""
        async with self._grown:
            await self._grown.wait_for(lambda: len(self.told) >= receipts)

    async def _write_one(self, stream: str, events: int) -> None:
        for version in range(events):
            receipt = await _until_told(self._log, commit(stream, expected={stream: version}))
            async with self._grown:
                self.told.append(receipt)
                self._grown.notify_all()


@pytest.fixture
async def postgres_log(postgres_dsn: str) -> AsyncIterator[EventLog]:
    async with asyncio.timeout(BOUND_S):
        log = await InPostgres(postgres_dsn).open()
        yield log
        await log.close()


@pytest.fixture
async def administrator(postgres_server: PostgresServer) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(postgres_server.dsn("postgres"))
    yield connection
    await connection.close()


@pytest.mark.postgres
async def test_connections_cut_at_any_moment_neither_lose_nor_repeat_a_command(
    postgres_log: EventLog, postgres_dsn: str, administrator: asyncpg.Connection
) -> None:
    progress = Progress(postgres_log)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(progress.write(streams=20, events=15))
        for receipts in range(5, 290, 15):
            await progress.reaches(receipts)
            await administrator.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1",
                urlsplit(postgres_dsn).path[1:],
            )
    rows = await check_sound(postgres_log)
    assert sorted(receipt.position for receipt in progress.told) == [row.position for row in rows]
    assert len(rows) == 300


@pytest.mark.postgres
async def test_a_log_outlives_its_server(postgres_log: EventLog, postgres_server: PostgresServer) -> None:
    first = await postgres_log.append(commit("stream-a"))
    await asyncio.to_thread(postgres_server.crash)
    try:
        with pytest.raises(Transient, match="away"):
            await postgres_log.append(commit("stream-b"))
        with pytest.raises(Transient, match="away"):
            await postgres_log.head()
    finally:
        await asyncio.to_thread(postgres_server.start)
    assert await postgres_log.receipt(first.command_id) == first
    assert (await _until_told(postgres_log, commit("stream-b"))).position == 2
    assert len(await check_sound(postgres_log)) == 2


@pytest.mark.postgres
async def test_a_server_that_crashes_amid_appends_loses_nothing_acknowledged(
    postgres_log: EventLog, postgres_server: PostgresServer
) -> None:
    progress = Progress(postgres_log)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(progress.write(streams=50, events=10))
        for receipts in (20, 300):
            await progress.reaches(receipts)
            await asyncio.to_thread(postgres_server.crash)
            await asyncio.to_thread(postgres_server.start)
    rows = await check_sound(postgres_log)
    assert len(rows) == 500
    assert {(receipt.position, receipt.digest) for receipt in progress.told} == {
        (row.position, row.digest.hex()) for row in rows
    }


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

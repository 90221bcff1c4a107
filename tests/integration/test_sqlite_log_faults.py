"""What the log in SQLite says when its file, its disk or its neighbours will not let it, and that it goes on then."""

import asyncio
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from tests.support.event_logs import check_sound, commit, new_id
from torpor_contracts.errors import InvariantViolation, Transient
from torpor_contracts.replies import Receipt
from torpor_eventlog.failures import LogUnusable
from torpor_eventlog.opening import open_log
from torpor_eventlog.sqlite import SqliteLog

pytestmark = pytest.mark.anyio

NOBODY: Final = 65534
FILLING_MAX: Final = 10_000
TEXT_BYTES: Final = 3600


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@pytest.fixture
async def log(path: Path) -> AsyncIterator[SqliteLog]:
    async with asyncio.timeout(60):
        log = await SqliteLog.open(path, busy_wait_s=0.05)
        yield log
        await log.close()


async def write_with(log: SqliteLog, statement: str) -> None:
    """Run a statement on the log's writing connection, in its thread."""

    def run() -> None:
        log._writer._connected().execute(statement)

    await asyncio.get_running_loop().run_in_executor(log._writer_thread, run)


def move(path: Path, where: Path) -> None:
    path.rename(where)


def size_bytes(path: Path) -> int:
    return path.stat().st_size


async def fill(log: SqliteLog) -> Transient:
    """Append until the log takes no more; what it says then."""
    for _ in range(FILLING_MAX):
        try:
            await log.append(commit(new_id("stream"), data=b"x" * 2000))
        except Transient as error:
            return error
    raise AssertionError("the disk did not fill")


# --- while it runs -----------------------------------------------------------------------------------------------


async def test_a_locked_log_says_so_and_goes_on(log: SqliteLog, path: Path) -> None:
    first = await log.append(commit("stream-a"))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        answers = await asyncio.gather(
            *(log.append(commit(new_id("stream"))) for _ in range(5)), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [Transient] * 5
        assert "locked" in str(answers[0])
        assert await log.receipt(first.command_id) == first  # whoever only reads is not held up
        other.execute("ROLLBACK")
    assert (await log.append(commit("stream-b"))).position == 2
    await check_sound(log)


async def test_a_lock_that_is_given_back_in_time_goes_unnoticed(path: Path) -> None:
    log = await SqliteLog.open(path, busy_wait_s=30)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.ensure_future(log.append(commit("stream-a")))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        other.execute("ROLLBACK")
        assert (await waiting).position == 1
    await log.close()


async def test_a_full_file_says_so_and_goes_on_once_there_is_room(log: SqliteLog) -> None:
    await log.append(commit("stream-a"))
    await write_with(log, "PRAGMA max_page_count = 60")
    assert "full" in str(await fill(log))
    rows = await check_sound(log)
    await log.append(commit("stream-after"))  # a new connection, without the limit
    assert len(await check_sound(log)) == len(rows) + 1


@pytest.fixture
def small_disk() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="torpor-disk-"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        directory.rmdir()
        pytest.skip("no right to mount a small disk here")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)
    directory.rmdir()


async def test_a_full_disk_says_so_and_goes_on_once_there_is_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 400_000)
    log = await SqliteLog.open(small_disk / "log.db")
    acknowledged = await log.append(commit("stream-first"))
    error = await fill(log)
    assert "full" in str(error) or "fails" in str(error)
    rows = await check_sound(log)
    assert await log.receipt(acknowledged.command_id) == acknowledged
    ballast.unlink()
    assert (await log.append(commit("stream-after"))).position == len(rows) + 1
    await log.close()
    reopened = await SqliteLog.open(small_disk / "log.db")
    assert len(await check_sound(reopened)) == len(rows) + 1
    await reopened.close()


async def test_a_log_that_became_read_only_says_so_and_goes_on(log: SqliteLog) -> None:
    await log.append(commit("stream-a"))
    await write_with(log, "PRAGMA query_only = ON")
    with pytest.raises(Transient, match="read-only"):
        await log.append(commit("stream-b"))
    assert (await log.append(commit("stream-b"))).position == 2


async def test_a_log_whose_file_is_gone_says_so_and_goes_on_when_it_is_back(log: SqliteLog, path: Path) -> None:
    await log.append(commit("stream-a"))
    hidden = path.with_suffix(".hidden")
    move(path, hidden)
    with pytest.raises(Transient, match="put it back"):
        await log.append(commit("stream-b"))
    move(hidden, path)
    assert (await log.append(commit("stream-b"))).position == 2


async def test_a_log_never_writes_to_a_file_that_took_its_place(log: SqliteLog, path: Path) -> None:
    await log.append(commit("stream-a"))
    move(path, path.with_suffix(".old"))
    a_text(path)
    with pytest.raises(Transient, match="another file"):
        await log.append(commit("stream-b"))
    assert size_bytes(path) == TEXT_BYTES


async def test_rows_beyond_the_head_are_a_broken_invariant_and_nothing_is_written_over(
    log: SqliteLog, path: Path
) -> None:
    await log.append(commit("stream-a"))
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("INSERT INTO events SELECT 2, 'x', 1, 'x', data, 0, 'x', 'x', 'x', 'x', digest, NULL FROM events")
    with pytest.raises(InvariantViolation, match="audit verify"):
        await log.append(commit("stream-b"))
    assert [row.stream for row in await log.read(0, 10)] == ["stream-a", "x"]


@pytest.mark.parametrize("statement", ["UPDATE events SET data = x''", "DELETE FROM events"])
async def test_the_file_itself_refuses_to_edit_or_forget(log: SqliteLog, path: Path, statement: str) -> None:
    await log.append(commit("stream-a"))
    with closing(sqlite3.connect(path)) as other, pytest.raises(sqlite3.IntegrityError, match="the log never"):
        other.execute(statement)
    await check_sound(log)


# --- when it is opened -------------------------------------------------------------------------------------------


def a_text(path: Path) -> None:
    path.write_text("no database, but long enough for one" * 100)


def a_foreign_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("CREATE TABLE users (name TEXT)")


def a_log_of_the_future(path: Path) -> None:
    asyncio.run(opened_once(path))
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("PRAGMA user_version = 2")


def a_log_without_its_tail(path: Path) -> None:
    asyncio.run(opened_once(path))
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("DROP TRIGGER events_are_never_deleted")
        other.execute("DELETE FROM events WHERE position = 2")


def a_torn_file(path: Path) -> None:
    asyncio.run(opened_once(path))
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 8000)


def a_directory(path: Path) -> None:
    path.mkdir()


async def opened_once(path: Path) -> None:
    log = await SqliteLog.open(path)
    await log.append(commit("stream-a", "stream-a"))
    await log.close()


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (a_text, "log-not-a-database"),
        (a_foreign_database, "log-foreign"),
        (a_log_of_the_future, "log-schema-unknown"),
        (a_log_without_its_tail, "log-damaged"),
        (a_torn_file, "log-damaged"),
        (a_directory, "log-unwritable"),
    ],
)
def test_what_is_no_log_is_refused_and_left_as_it_is(path: Path, make: Callable[[Path], None], code: str) -> None:
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(LogUnusable) as refused:
        asyncio.run(SqliteLog.open(path))
    assert refused.value.code == code
    assert str(path) in refused.value.message
    assert refused.value.advice
    assert (path.read_bytes() if path.is_file() else b"") == before


async def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogUnusable) as refused:
        await SqliteLog.open(tmp_path / "nowhere" / "log.db")
    assert refused.value.code == "log-without-directory"
    assert not (tmp_path / "nowhere").exists()


async def test_a_log_that_stays_locked_cannot_be_opened_now(path: Path) -> None:
    await opened_once(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(Transient, match="locked"):
            await SqliteLog.open(path, busy_wait_s=0.05)
    log = await SqliteLog.open(path)
    await log.close()


async def test_many_may_make_the_same_log_at_once(path: Path) -> None:
    logs = await asyncio.gather(*(SqliteLog.open(path) for _ in range(8)))
    receipts = await asyncio.gather(*(log.append(commit(new_id("stream"))) for log in logs))
    assert sorted(receipt.position for receipt in receipts) == list(range(1, 9))
    await check_sound(logs[0])
    for log in logs:
        await log.close()


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that a user without rights can reach, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="torpor-log-"))
    yield directory
    directory.chmod(0o700)
    shutil.rmtree(directory)


@contextmanager
def without_rights() -> Iterator[None]:
    """Root may write everywhere: be nobody for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    ("exists", "mode_of_file", "mode_of_directory"), [(True, 0o444, 0o777), (True, 0o666, 0o555), (False, 0, 0o555)]
)
def test_a_log_that_may_not_be_written_is_refused(
    open_directory: Path, exists: bool, mode_of_file: int, mode_of_directory: int
) -> None:
    path = open_directory / "log.db"
    if exists:
        asyncio.run(opened_once(path))
        path.chmod(mode_of_file)
    open_directory.chmod(mode_of_directory)
    with without_rights(), pytest.raises(LogUnusable) as refused:
        asyncio.run(SqliteLog.open(path))
    assert refused.value.code == "log-unwritable"


# --- one among many ----------------------------------------------------------------------------------------------


async def test_trouble_in_one_batch_does_not_reach_the_next(log: SqliteLog, path: Path) -> None:
    """Appends go on coming while the lock is held and given back, over and over; each is answered, and none is lost."""

    async def ask(stream: str) -> Receipt:
        one = commit(stream)
        for _ in range(1000):
            with suppress(Transient):
                return await log.append(one)
        raise AssertionError("never answered")

    asking = [asyncio.ensure_future(ask(new_id("stream"))) for _ in range(40)]
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        for _ in range(5):
            with suppress(sqlite3.OperationalError):
                other.execute("BEGIN IMMEDIATE")
                await asyncio.wait(asking, timeout=0.06)
                other.execute("ROLLBACK")
    receipts = await asyncio.gather(*asking)
    assert sorted(receipt.position for receipt in receipts) == list(range(1, 41))
    await check_sound(log)


async def test_the_same_file_by_its_dsn(tmp_path: Path) -> None:
    absolute = tmp_path / "with space" / "lög.db"
    os.mkdir(absolute.parent)  # noqa: PTH102  (a path's own methods are refused in coroutines)
    log = await open_log(f"sqlite:///{absolute}".replace(" ", "%20"))
    await log.append(commit("stream-a"))
    await log.close()
    assert size_bytes(absolute) > 0

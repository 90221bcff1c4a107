import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torpor.embedded import runfile
from torpor.embedded.console import Console
from torpor.embedded.layout import DataDir
from torpor.embedded.lock import DataDirLock
from torpor.embedded.log_files import last_lines, open_log, trim
from torpor.embedded.process_table import age_s, end, is_running, started_ticks, wait_gone
from torpor.embedded.runfile import Run, RunningProcess
from torpor.embedded.server import choose_port
from torpor.embedded.settings import sqlite_dsn
from torpor.embedded.starting import _end_stale
from torpor.errors import CannotStart
from torpor_eventlog.opening import sqlite_path


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    (tmp_path / "nats").mkdir()
    return DataDir(tmp_path)


def identity(pid: int) -> RunningProcess:
    return RunningProcess("some", pid, started_ticks(pid) or 0)


def test_a_run_file_is_read_as_it_was_written(data: DataDir) -> None:
    run = Run(supervisor=identity(os.getpid()), nats_url="nats://x", processes=[RunningProcess("a", 1, 2, 3)])
    runfile.write(data, run)
    assert runfile.read(data) == run
    assert run.supervisor_runs()
    assert data.run_file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', '{"format": 1}', "\x00\x01"])
def test_what_is_no_run_file_is_none(data: DataDir, content: str) -> None:
    data.run_file.write_text(content)
    assert runfile.read(data) is None


def test_a_run_file_of_another_process_with_the_same_pid_is_not_a_running_whole(data: DataDir) -> None:
    run = Run(supervisor=RunningProcess("supervisor", os.getpid(), 12345))
    assert not run.supervisor_runs()
    run = Run(supervisor=identity(os.getpid()), boot_id="of another boot")
    assert not run.supervisor_runs()


def test_the_lock_is_held_once_and_names_its_holder(data: DataDir) -> None:
    with DataDirLock(data):
        code = (
            "import sys; from pathlib import Path; from torpor.embedded.layout import DataDir\n"
            "from torpor.embedded.lock import DataDirLock\n"
            "from torpor.errors import CannotStart\n"
            "try:\n    DataDirLock(DataDir(Path(sys.argv[1]))).__enter__()\n"
            "except CannotStart as error: print(error.code, error.message)"
        )
        other = subprocess.run([sys.executable, "-c", code, data.root], capture_output=True, text=True, check=True)
    assert other.stdout.startswith("already-running")
    assert f"pid {os.getpid()}" in other.stdout
    with DataDirLock(data):
        pass


def test_a_process_is_known_by_pid_and_start_and_can_be_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    known = identity(child.pid)
    assert is_running(known.pid, known.started_ticks)
    assert not is_running(known.pid, known.started_ticks + 1)
    assert not wait_gone(known.pid, known.started_ticks, 0.05)
    assert end(known.pid, known.started_ticks + 1, 1.0), "another process than the one meant is left alone"
    assert is_running(known.pid, known.started_ticks)
    assert end(known.pid, known.started_ticks, 10.0)
    child.wait(10)
    assert 0 <= age_s(os.getpid()) < 100_000


def test_what_a_killed_start_has_left_is_ended_and_nothing_else(data: DataDir) -> None:
    ours, other = (subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) for _ in range(2))
    left = identity(ours.pid)
    stranger = RunningProcess("scheduler", other.pid, (started_ticks(other.pid) or 0) + 1)
    runfile.write(data, Run(supervisor=RunningProcess("supervisor", 1, 1), processes=[left, stranger]))
    _end_stale(data, Console(as_json=True))
    assert ours.wait(10) == -signal.SIGTERM
    assert other.poll() is None, "its pid was given to another process since"
    other.kill()
    other.wait(10)


def test_a_full_log_moves_aside_while_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "some.log"
    handle = open_log(log)
    os.write(handle, b"old\n" * 100)
    assert not trim(log, 1000)
    assert trim(log, 100)
    os.write(handle, b"one\ntwo\n")
    os.close(handle)
    assert log.read_bytes() == b"one\ntwo\n"
    assert (tmp_path / "some.log.1").read_bytes() == b"old\n" * 100
    assert last_lines(log, 1) == ["two"]
    assert last_lines(tmp_path / "none.log") == []


def test_a_whole_keeps_its_port_unless_it_is_taken(data: DataDir) -> None:
    import socket  # noqa: PLC0415

    first = choose_port(data, 0)
    assert choose_port(data, 0) == first
    with socket.create_server(("127.0.0.1", first)):
        assert choose_port(data, 0) != first
        with pytest.raises(CannotStart, match=f"port {first}"):
            choose_port(data, first)


@pytest.mark.parametrize("name", ["plain", "with space", "ha#sh", "per%cent", "quest?ion", "ünrein"])
def test_any_path_can_be_named_by_a_dsn(tmp_path: Path, name: str) -> None:
    assert sqlite_path(sqlite_dsn(tmp_path / name)) == tmp_path / name

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torpor.embedded import runfile
from torpor.embedded.layout import DataDir
from torpor.embedded.process_table import is_running, wait_gone
from torpor.embedded.runfile import Run, RunningProcess

HARNESS = Path(__file__).with_name("whole_of_scripts.py")
FOR_EVER = "import signal; print('up', flush=True); signal.pause()"
PREPARE = """
import json, sys
for step in ("configured", "streams", "ready"):
    print(json.dumps({"step": step, "ready_s": 0.1}), flush=True)
"""
STARTING = """
import json, signal
for step in ("configured", "streams"):
    print(json.dumps({"step": step}), flush=True)
signal.pause()
"""
DYING = "import sys; sys.exit('beta: out of ink')"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
)


class Whole:
    def __init__(self, root: Path, **scripts: str) -> None:
        self.data = DataDir(root)
        wanted = {"prepare": PREPARE, "server": FOR_EVER, **scripts}
        self.process = subprocess.Popen(
            [sys.executable, str(HARNESS), str(root), json.dumps(wanted)], stdout=subprocess.PIPE, text=True
        )

    def until(self, event: str) -> dict[str, Any]:
        """Read what it says up to an event; the whole test run's time limit bounds it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said: dict[str, Any] = json.loads(line)
            if said["event"] == event:
                return said
        raise AssertionError(f"it ended without saying {event}")

    def run(self) -> Run:
        run = runfile.read(self.data)
        assert run is not None
        return run

    def process_named(self, name: str) -> RunningProcess:
        return next(p for p in self.run().processes if p.name == name)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Whole]]:
    started: list[Whole] = []

    def begin(**scripts: str) -> Whole:
        started.append(Whole(tmp_path / "data", **scripts))
        return started[-1]

    yield begin
    for whole in started:
        whole.process.kill()
        whole.process.communicate(timeout=20)


def test_everything_runs_once_it_is_ready_and_nothing_after_a_stop(start: Callable[..., Whole]) -> None:
    whole = start(alpha=FOR_EVER, beta=FOR_EVER)
    whole.until("ready")
    run = whole.run()
    assert run.ready
    assert [p.name for p in run.processes] == ["server", "alpha", "beta"]
    assert all(is_running(p.pid, p.started_ticks) for p in run.processes)
    whole.process.send_signal(signal.SIGINT)
    assert whole.process.wait(20) == 0
    assert not any(is_running(p.pid, p.started_ticks) for p in run.processes)
    assert runfile.read(whole.data) is None


def test_a_killed_service_is_started_again_and_its_end_is_on_record(start: Callable[..., Whole]) -> None:
    whole = start(alpha=FOR_EVER)
    whole.until("ready")
    before = whole.process_named("alpha")
    os.kill(before.pid, signal.SIGKILL)
    said = whole.until("ended")
    assert (said["process"], said["exit_code"]) == ("alpha", -signal.SIGKILL)
    whole.until("started")
    after = whole.process_named("alpha")
    assert after.pid != before.pid
    assert after.restarts == 1
    recorded = [json.loads(line) for line in whole.data.restarts.read_text().splitlines()]
    assert [entry["process"] for entry in recorded] == ["alpha"]


def test_a_service_that_never_stays_up_fails_the_start_with_its_last_words(start: Callable[..., Whole]) -> None:
    whole = start(prepare=STARTING, alpha=FOR_EVER, beta=DYING)
    said = whole.until("error")
    assert said["code"] == "service-ended"
    assert "out of ink" in said["message"]
    assert whole.process.wait(20) == 1


def test_a_service_that_ends_again_and_again_is_given_up_with_everything(start: Callable[..., Whole]) -> None:
    whole = start(alpha=FOR_EVER, beta=FOR_EVER.replace("signal.pause()", "signal.sigtimedwait([signal.SIGUSR1], 0.3)"))
    whole.until("ready")
    alpha = whole.process_named("alpha")
    ends = [whole.until("ended") for _ in range(5)]
    assert [end["ends_in_a_row"] for end in ends] == [1, 2, 3, 4, 5]
    assert ends[-1]["again_in_s"] is None
    assert whole.process.wait(20) == 1
    assert not is_running(alpha.pid, alpha.started_ticks)


def test_killing_the_supervisor_takes_everything_along(start: Callable[..., Whole]) -> None:
    whole = start(alpha=FOR_EVER, beta=STUBBORN)
    whole.until("ready")
    processes = whole.run().processes
    whole.process.kill()
    assert all(wait_gone(p.pid, p.started_ticks, 10) for p in processes)
    assert runfile.read(whole.data) is not None, "the run file of a killed whole tells the next one about it"


def test_a_process_that_ignores_the_stop_is_killed_at_the_second_request(start: Callable[..., Whole]) -> None:
    whole = start(alpha=STUBBORN)
    whole.until("ready")
    alpha = whole.process_named("alpha")
    whole.process.send_signal(signal.SIGTERM)
    whole.process.send_signal(signal.SIGINT)
    assert whole.process.wait(20) == 0
    assert not is_running(alpha.pid, alpha.started_ticks)


def test_a_second_supervisor_is_refused_and_names_the_first(start: Callable[..., Whole]) -> None:
    first = start(alpha=FOR_EVER)
    first.until("ready")
    second = start(alpha=FOR_EVER)
    said = second.until("error")
    assert said["code"] == "already-running"
    assert str(first.process.pid) in said["message"]
    assert second.process.wait(20) == 1
    assert is_running(first.process_named("alpha").pid, first.process_named("alpha").started_ticks)


def test_what_the_preparation_refuses_is_said_and_nothing_is_left(start: Callable[..., Whole]) -> None:
    refusal = {"step": "refused", "code": "no-driver", "message": "no driver", "advice": "buy one"}
    whole = start(prepare=f"print({json.dumps(json.dumps(refusal))})", alpha=FOR_EVER)
    said = whole.until("error")
    assert (said["code"], said["advice"]) == ("no-driver", "buy one")
    assert whole.process.wait(20) == 1


def test_a_preparation_that_dies_is_told_with_its_last_words(start: Callable[..., Whole]) -> None:
    whole = start(prepare="import sys; sys.exit('prepare: no ink')", alpha=FOR_EVER)
    said = whole.until("error")
    assert "no ink" in said["message"]
    assert whole.process.wait(20) == 1


def test_a_server_that_stores_nothing_any_more_is_started_again(start: Callable[..., Whole]) -> None:
    stuck = "[7] 2026/11/30 20:34:34.159737 [ERR] JetStream failed to store a msg on stream 'A > B': no space left"
    whole = start(server=f"print({stuck!r}, flush=True)\n{FOR_EVER}", alpha=FOR_EVER)
    whole.until("ready")
    before = whole.process_named("server")
    assert whole.until("stuck")["process"] == "server"
    assert whole.until("ended")["exit_code"] == -signal.SIGKILL
    whole.until("started")
    assert whole.process_named("server").pid != before.pid
    assert whole.process_named("alpha").restarts == 0


def test_a_lost_run_file_is_written_again(start: Callable[..., Whole]) -> None:
    whole = start(alpha=FOR_EVER)
    whole.until("ready")
    before = whole.run()
    whole.data.run_file.unlink()
    give_up_at = time.monotonic() + 20
    while not whole.data.run_file.exists():
        assert time.monotonic() < give_up_at
        select.select([], [], [], 0.05)
    assert whole.run() == before


def test_sessions_are_put_to_sleep_while_everything_still_runs(start: Callable[..., Whole]) -> None:
    leaving = """
import json, pathlib
there = json.loads(pathlib.Path("run.json").read_text())["processes"]
assert all(pathlib.Path(f"/proc/{one['pid']}").exists() for one in there)
print(json.dumps({"asleep": 2, "left": ["ses-1"]}))
"""
    whole = start(alpha=FOR_EVER, leave=leaving)
    whole.until("ready")
    whole.process.send_signal(signal.SIGTERM)
    assert whole.until("not-asleep")["sessions"] == ["ses-1"]
    assert whole.until("asleep")["asleep"] == 2
    whole.until("stopped")
    assert whole.process.wait(20) == 0


def test_a_second_request_to_stop_waits_for_no_session(start: Callable[..., Whole]) -> None:
    whole = start(alpha=FOR_EVER, leave=FOR_EVER)
    whole.until("ready")
    run = whole.run()
    whole.process.send_signal(signal.SIGTERM)
    whole.until("leaving")
    whole.process.send_signal(signal.SIGINT)
    whole.until("not-asleep")
    assert whole.process.wait(20) == 0
    assert not any(is_running(p.pid, p.started_ticks) for p in run.processes)

"""kill -9 of any process at any time loses nothing: every receipt stays, every session goes on."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.support.embedded import READY_S_MAX, EmbeddedWhole, RefusedError, torpor
from torpor.embedded.process_table import is_running

pytestmark = pytest.mark.e2e
PROCESSES = ("scheduler", "vm-host", "snapshot-store", "billing", "reaper", "log-relay", "nats-server")


class Workload:
    """Clients that create, exec, suspend and terminate, each step under an id of its own until it is answered."""

    def __init__(self, whole: EmbeddedWhole) -> None:
        self.whole = whole
        self.receipts: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {}
        self.failures: list[str] = []
        self.there = threading.Event()
        self.there.set()
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def client(self, number: int) -> None:
        round_ = 0
        while not self._stop.is_set() and round_ < 50:
            name = f"{number}-{round_}"
            made = self._step(name, "session", "create", f"ses-{name}")
            if made is None:
                return
            self._step(name, "session", "exec", f"ses-{name}", "--", "echo", name)
            self._step(name, "session", "suspend", f"ses-{name}")
            round_ += 1

    def _step(self, name: str, *arguments: str) -> dict[str, Any] | None:
        command_id = f"{arguments[1]}-{name}"
        at = arguments.index("--") if "--" in arguments else len(arguments)
        line = (*arguments[:at], "--command-id", command_id, *arguments[at:])
        last = ""
        for _ in range(6):
            try:
                answer: dict[str, Any] = self.whole.call(*line)
            except RefusedError as refusal:
                last = str(refusal)
                self.there.wait(READY_S_MAX)
                continue
            with self._lock:
                self.receipts[command_id] = (line, answer["receipt"])
            if arguments[1] == "exec" and answer["outcome"] == "exited" and answer["stdout"] != f"{name}\n":
                self.failures.append(f"{command_id}: {answer}")
            return answer
        self.failures.append(f"{command_id}: {last}")
        return None

    @contextmanager
    def running(self, clients: int) -> Iterator[None]:
        with ThreadPoolExecutor(clients) as pool:
            futures = [pool.submit(self.client, number) for number in range(clients)]
            try:
                yield
            finally:
                self._stop.set()
            for future in futures:
                future.result(180)


def check(whole: EmbeddedWhole, workload: Workload) -> None:
    """Each acknowledged receipt is in the log still, answered again, and the log and its copies verify."""
    assert not workload.failures
    verified = whole.call("audit", "verify")
    assert verified["ok"], verified
    logged = {(event["stream"], event["version"]): event for event in whole.call("events")}
    for _, receipt in workload.receipts.values():
        event = logged[receipt["stream"], receipt["version"]]
        assert (event["position"], event["digest"]) == (receipt["position"], receipt["digest"])
    for line, receipt in list(workload.receipts.values())[-3:]:
        assert whole.call(*line)["receipt"] == receipt


def test_any_process_may_be_killed_while_clients_work(whole: EmbeddedWhole) -> None:
    keeper = whole.call("session", "create", "ses-keeper")["session_id"]
    whole.call("session", "exec", keeper, "--", "write", "/note", "kept")
    workload = Workload(whole)
    with workload.running(clients=2):
        for name in PROCESSES:
            done_before = len(workload.receipts)
            victim = whole.process_named(name)
            os.kill(victim.pid, signal.SIGKILL)
            whole.until("started", process=name)
            whole.forget()
            again = whole.process_named(name)
            assert again.pid != victim.pid
            # The next one falls only once clients got on: that it goes on is what is shown.
            waiting = threading.Event()
            for _ in range(1200):
                if len(workload.receipts) > done_before or workload.failures:
                    break
                waiting.wait(0.1)
            assert len(workload.receipts) > done_before, f"nothing went on after {name} was killed"
    check(whole, workload)
    assert whole.call("session", "exec", keeper, "--", "cat", "/note")["stdout"].strip() == "kept"


def test_up_again_goes_on_with_every_session_after_everything_was_killed(
    start: Callable[..., EmbeddedWhole],
) -> None:
    first = start()
    first.until("ready")
    asleep = first.call("session", "create")["session_id"]
    first.call("session", "suspend", asleep)
    awake = first.call("session", "create", "--never-idle")["session_id"]
    first.call("session", "exec", awake, "--", "write", "/note", "kept")
    workload = Workload(first)
    with workload.running(clients=1):
        for _ in range(600):
            if len(workload.receipts) >= 2:
                break
            threading.Event().wait(0.1)
        processes = first.run.processes
        workload.there.clear()
        first.kill()
        assert not any(is_running(process.pid, process.started_ticks) for process in processes)
        second = start()
        second.until("ready")
        workload.whole = second
        workload.there.set()
    check(second, workload)
    assert second.call("session", "show", asleep)["state"] == "suspended"
    assert second.call("session", "resume", asleep)["state"] == "running"
    assert second.call("session", "exec", awake, "--", "cat", "/note")["stdout"].strip() == "kept"


def test_ctrl_c_leaves_no_process_and_the_sessions_stay(start: Callable[..., EmbeddedWhole]) -> None:
    first = start()
    first.until("ready")
    session = first.call("session", "create")["session_id"]
    processes = first.run.processes
    assert first.stop(signal.SIGINT) == 0
    assert not any(is_running(process.pid, process.started_ticks) for process in processes)
    left = [p.info for p in psutil.process_iter(["pid", "cmdline", "cwd"]) if p.info["cwd"] == str(first.data.root)]
    assert not left
    nobody = torpor(first.data.root, "session", "list", "--json")
    assert (nobody.returncode, json.loads(nobody.stdout)["error"]["code"]) == (3, "unavailable")
    second = start()
    second.until("ready")
    assert second.run.nats_url == first.said[0].get("nats_url", second.run.nats_url)
    assert second.call("session", "exec", session, "--", "echo", "on")["stdout"] == "on\n"
    down = torpor(second.data.root, "down")
    assert down.returncode == 0, down.stderr
    assert second.process.wait(30) == 0


def test_what_is_derived_may_be_deleted_while_nothing_runs(start: Callable[..., EmbeddedWhole]) -> None:
    first = start()
    first.until("ready")
    asleep = first.call("session", "create")["session_id"]
    first.call("session", "exec", asleep, "--", "write", "/note", "kept")
    first.call("session", "suspend", asleep)
    before = (first.call("session", "show", asleep), first.call("events", "--session", asleep))
    assert first.stop() == 0
    shutil.rmtree(first.data.nats)
    shutil.rmtree(first.data.views)
    second = start()
    second.until("ready")
    events = second.call("events", "--session", asleep)
    shown = second.call("session", "show", asleep)
    assert (shown, events) == before
    assert second.call("session", "exec", asleep, "--", "cat", "/note")["stdout"].strip() == "kept"
    assert second.call("audit", "verify")["ok"]

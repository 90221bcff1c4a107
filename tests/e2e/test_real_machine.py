"""A session on a real virtual machine, as a user has it: its life, and what becomes of it when something is killed."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.embedded import TORPOR, clean_environment
from tests.support.real_machines import RealWhole, eventually, gone

pytestmark = pytest.mark.e2e

AGENT = """
import os, random
from time import sleep
state = {"pid": os.getpid(), "token": random.random()}
file = open("/root/journal", "a", buffering=1)
number = 0
while True:
    number += 1
    state[number] = number * number
    line = f"{number} {state['pid']} {state['token']} {len(state)}"
    print(line, file=file)
    print(line, flush=True)
    sleep(0.05)
"""
"""A program with state in memory and an open file, which it would notice to have lost."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real") / "data"


@pytest.fixture(scope="module")
def whole(root: Path) -> Iterator[RealWhole]:
    running = RealWhole(root)
    try:
        running.until("ready")
        yield running
    finally:
        running.close()


@pytest.fixture
def session(whole: RealWhole, request: pytest.FixtureRequest) -> Iterator[str]:
    """A session of the test's own, the only one that has a machine."""
    made = whole.call("session", "create", request.node.name.replace("_", "-")[:40])["session_id"]
    yield made
    whole.call("session", "terminate", made)
    eventually(lambda: not whole.machines(), "the machine is gone")


class Agent:
    """The program above, run by a client that stays connected."""

    def __init__(self, whole: RealWhole, session: str) -> None:
        self.whole, self._session = whole, session
        self.client = subprocess.Popen(
            [TORPOR, "session", "exec", "--data-dir", whole.data.root, session, "--", "python3", "-c", AGENT],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        self.lines: list[list[str]] = []
        self.read(3)

    def read(self, count: int) -> list[list[str]]:
        """The next lines that reach the client."""
        assert self.client.stdout is not None
        new = [self.client.stdout.readline().split() for _ in range(count)]
        self.lines += new
        return new

    def journal(self) -> list[list[str]]:
        """All lines in its file."""
        return [line.split() for line in self.whole.run_in(self._session, "cat", "/root/journal").splitlines()]

    def check(self, lines: list[list[str]]) -> None:
        """One process wrote all of them, and remembers all it had counted."""
        assert [int(line[0]) for line in lines] == list(range(1, len(lines) + 1))
        assert len({(line[1], line[2]) for line in lines}) == 1
        assert all(int(line[3]) == int(line[0]) + 2 for line in lines)

    def close(self) -> None:
        self.client.kill()
        self.client.communicate()


def test_a_session_has_a_kernel_of_its_own_and_no_network(whole: RealWhole, session: str) -> None:
    assert whole.run_in(session, "cat", "/proc/sys/kernel/hostname").strip() == session
    assert whole.run_in(session, "uname", "-r").strip() != os.uname().release
    assert whole.run_in(session, "ls", "/sys/class/net").split() == ["lo"]
    assert whole.run_in(session, "python3", "-c", "print(6 * 7)") == "42\n"
    before = time.time()
    theirs = float(whole.run_in(session, "date", "+%s.%N"))
    assert before - 0.5 < theirs < time.time() + 0.5


def test_its_process_has_no_rights_and_limits_of_its_own(whole: RealWhole, session: str) -> None:
    assert session
    ((pid, claim),) = whole.machines().items()
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert (status["Seccomp"], status["NoNewPrivs"], int(status["CapBnd"], 16)) == ("2", "1", 0)
    if os.geteuid() == 0:
        assert claim.uid is not None
        assert set(status["Uid"].split()) == {str(claim.uid)}
        assert not status["Groups"].split()
    for group in claim.directories:
        assert str(pid) in (group / "cgroup.procs").read_text().split()


def test_a_session_too_large_for_the_host_is_refused(whole: RealWhole) -> None:
    refused = whole.refused("session", "create", "ses-large", "--memory-mib", "100000", "--timeout-s", "2")
    assert refused["advice"]
    assert "memory" in refused["message"]
    whole.call("session", "terminate", "ses-large")


def test_a_python_process_goes_on_over_suspend_and_wake(whole: RealWhole, session: str) -> None:
    agent = Agent(whole, session)
    for _ in range(2):
        asleep = whole.call("session", "suspend", session)
        assert asleep["state"] == "suspended"
        assert whole.machines() == {}
        agent.check(agent.journal())  # it wakes for that
        agent.read(len(agent.journal()) - len(agent.lines))
        agent.check(agent.lines)
    before = time.time()
    theirs = float(whole.run_in(session, "date", "+%s.%N"))
    assert before - 0.5 < theirs < time.time() + 0.5
    assert json.loads(whole.run_in(session, "cat", "/run/torpor/epoch"))["incarnation"] == 3
    agent.close()


def test_a_killed_vm_host_adopts_the_machine(whole: RealWhole, session: str) -> None:
    agent, machine = Agent(whole, session), whole.the_machine()
    whole.forget()
    os.kill(whole.process_named("vm-host").pid, signal.SIGKILL)
    whole.until("started", process="vm-host")
    agent.check(agent.journal())
    agent.read(len(agent.journal()) - len(agent.lines))
    agent.check(agent.lines)
    assert whole.the_machine() == machine
    shown = whole.call("session", "show", session)
    assert (shown["state"], shown["incarnation"]) == ("running", 1)
    agent.close()


def test_a_killed_machine_is_lost_and_resumed_from_its_newest_checkpoint(whole: RealWhole, session: str) -> None:
    whole.run_in(session, "sh", "-c", "echo before > /root/file; echo 41 > /dev/shm/n")
    whole.call("session", "suspend", session)
    whole.run_in(session, "sh", "-c", "echo after > /root/file")
    os.kill(whole.the_machine(), signal.SIGKILL)
    lost = eventually(
        lambda: (shown := whole.call("session", "show", session))["state"] == "lost" and shown, "it is known as lost"
    )
    assert "ended" in lost["problem"]["detail"]
    assert lost["lost_since"] in lost["problem"]["way_out"] or lost["lost_since"][:19] in lost["problem"]["way_out"]
    assert whole.run_in(session, "cat", "/root/file", "/dev/shm/n") == "before\n41\n"
    shown = whole.call("session", "show", session)
    assert (shown["state"], shown["incarnation"], shown["lost_since"]) == ("running", 3, None)


def test_a_stop_puts_sessions_to_sleep_and_the_next_start_wakes_their_programs(whole: RealWhole, root: Path) -> None:
    """The last of this module: it ends the whole."""
    session = whole.call("session", "create", "ses-night")["session_id"]
    agent, machine, slots = Agent(whole, session), whole.the_machine(), list(whole.slots())
    whole.forget()
    assert whole.stop() == 0
    assert whole.until("asleep")["asleep"] == 1
    assert all(gone(pid) for pid in (machine, *slots))
    assert whole.machines() == whole.slots() == {}
    assert not list(whole.host.glob("*/*/qmp.sock")), "nothing is left of a machine"
    again = RealWhole(root)
    try:
        again.until("ready")
        eventually(lambda: again.call("session", "show", session)["state"] == "running", "it is awake")
        agent.whole = again
        agent.check(agent.journal())
        assert again.call("session", "show", session)["incarnation"] == 2
    finally:
        agent.close()
        again.close()

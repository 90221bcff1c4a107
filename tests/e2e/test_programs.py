"""Programs that go on: their input, their terminals, who looks at them again; the installed command in a real pty."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.embedded import TORPOR, EmbeddedWhole, clean_environment, torpor

pytestmark = pytest.mark.e2e

WAIT_S = 30.0


class Sitting:
    """Somebody at a terminal, who runs the command there."""

    def __init__(self, whole: EmbeddedWhole, *arguments: str) -> None:
        self.ours, theirs = pty.openpty()
        self.resize(30, 100, None)
        self.theirs = theirs
        self.before = termios.tcgetattr(theirs)
        at = arguments.index("--") if "--" in arguments else len(arguments)
        line = [str(TORPOR), *arguments[:at], "--data-dir", str(whole.data.root), *arguments[at:]]
        self.process = subprocess.Popen(
            line, stdin=theirs, stdout=theirs, stderr=theirs, env=clean_environment(), start_new_session=True
        )
        self.seen = b""

    def resize(self, rows: int, columns: int, told: "subprocess.Popen[bytes] | None") -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if told is not None:
            told.send_signal(signal.SIGWINCH)

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def until(self, wanted: bytes) -> None:
        """Read until this was seen, then forget it and what came before."""
        give_up_at = time.monotonic() + WAIT_S
        while wanted not in self.seen:
            assert time.monotonic() < give_up_at, f"{wanted!r} was not seen, but {self.seen!r}"
            if select.select([self.ours], [], [], 0.5)[0]:
                self.seen += os.read(self.ours, 65536)
        self.seen = self.seen.partition(wanted)[2]

    def wait(self) -> int:
        return self.process.wait(WAIT_S)

    def is_put_back(self) -> bool:
        return termios.tcgetattr(self.theirs) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        os.close(self.ours)
        os.close(self.theirs)


@contextmanager
def sitting(whole: EmbeddedWhole, *arguments: str) -> Iterator[Sitting]:
    somebody = Sitting(whole, *arguments)
    try:
        yield somebody
    finally:
        somebody.close()


@pytest.fixture
def session_id(whole: EmbeddedWhole) -> str:
    return str(whole.call("session", "create")["session_id"])


def started(whole: EmbeddedWhole, session_id: str, *arguments: str) -> str:
    return str(whole.call("session", "exec", "-d", session_id, *arguments)["exec_id"])


def test_input_is_given_as_it_is_read(whole: EmbeddedWhole, session_id: str, tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(100_000))
    done = torpor(whole.data.root, "session", "exec", "-i", session_id, "--", "cat", stdin=text)
    assert (done.returncode, done.stdout == text, done.stderr) == (0, True, "")
    assert whole.call("session", "exec", "-i", session_id, "--", "cat", stdin="few")["stdout"] == "few"
    assert torpor(whole.data.root, "session", "exec", "-i", session_id, "--", "true").returncode == 0


def test_a_terminal_takes_keys_sizes_and_interrupts(whole: EmbeddedWhole, session_id: str) -> None:
    with sitting(whole, "session", "exec", "-it", session_id, "--", "sh") as somebody:
        somebody.until(b"$ ")
        somebody.type(b"stty size\r")
        somebody.until(b"30 100\r\n")
        somebody.resize(40, 132, somebody.process)
        for _ in range(20):
            somebody.until(b"$ ")
            somebody.type(b"stty size\r")
            somebody.until(b"stty size\r\n")
            somebody.until(b"\r\n")
            if "40 132" in whole_output(whole, session_id):
                break
        else:
            raise AssertionError("the size never came")
        somebody.type(b"\x03")
        somebody.until(b"^C")
        somebody.type(b"exit 7\r")
        assert somebody.wait() == 7
        assert somebody.is_put_back()


def whole_output(whole: EmbeddedWhole, session_id: str) -> str:
    (running,) = whole.call("session", "ps", session_id)
    return str(torpor(whole.data.root, "session", "logs", session_id, running["exec_id"]).stdout)


def test_who_lets_go_of_a_program_comes_back_to_it(whole: EmbeddedWhole, session_id: str) -> None:
    with sitting(whole, "session", "exec", "-it", session_id, "--", "sh") as somebody:
        somebody.until(b"$ ")
        somebody.type(b"echo first\r")
        somebody.until(b"first\r\n")
        somebody.until(b"first\r\n")
        somebody.type(b"\x10\x11")
        somebody.until(b"goes on")
        assert somebody.wait() == 0
        assert somebody.is_put_back()
    (running,) = whole.call("session", "ps", session_id)
    assert running["state"] == "running"
    with sitting(whole, "session", "attach", session_id, running["exec_id"]) as somebody:
        somebody.until(b"first")
        somebody.type(b"echo second\r")
        somebody.until(b"second\r\n")
        somebody.type(b"exit 3\r")
        assert somebody.wait() == 3
        assert somebody.is_put_back()
    assert whole.call("session", "ps", session_id) == []
    assert whole.refused("session", "attach", session_id, running["exec_id"])["code"] == "exec-ended"


def test_a_terminal_is_put_back_when_the_command_is_told_to_end(whole: EmbeddedWhole, session_id: str) -> None:
    with sitting(whole, "session", "exec", "-it", session_id, "--", "sh") as somebody:
        somebody.until(b"$ ")
        assert not somebody.is_put_back(), "it was raw"
        somebody.process.terminate()
        assert somebody.wait() == 143
        assert somebody.is_put_back()
    (running,) = whole.call("session", "ps", session_id)
    whole.call("session", "signal", session_id, running["exec_id"], "KILL")
    assert torpor(whole.data.root, "session", "attach", session_id, running["exec_id"]).returncode in {1, 137}


def test_output_is_read_from_any_byte_after_whoever_began_it_is_gone(whole: EmbeddedWhole, session_id: str) -> None:
    exec_id = started(whole, session_id, "--", "sh", "-c", "echo one; sleep 1; echo two; sleep 1; echo three; exit 5")
    assert torpor(whole.data.root, "session", "attach", session_id, exec_id).returncode == 5
    logs = ("session", "logs", session_id, exec_id)
    assert torpor(whole.data.root, *logs, "-f").stdout == "one\ntwo\nthree\n"
    assert torpor(whole.data.root, *logs, "--from", "4").stdout == "two\nthree\n"
    assert torpor(whole.data.root, "session", "output", session_id, exec_id, "--from", "9").stdout == "hree\n"
    assert whole.refused("session", "logs", session_id, "exec-nobody")["code"] == "exec-not-found"


def test_a_program_is_signalled(whole: EmbeddedWhole, session_id: str) -> None:
    exec_id = started(whole, session_id, "--", "sleep", "300")
    whole.call("session", "signal", session_id, exec_id, "INT")
    done = torpor(whole.data.root, "session", "logs", session_id, exec_id, "-f")
    assert done.returncode == 0
    assert whole.refused("session", "signal", session_id, exec_id)["code"] == "exec-ended"
    assert whole.refused("session", "signal", session_id, exec_id, "LOUD")["code"] == "illegal-signal"


def test_programs_of_a_sleeping_session_are_listed_without_waking_it(whole: EmbeddedWhole) -> None:
    session_id = str(whole.call("session", "create")["session_id"])
    exec_id = started(whole, session_id, "--", "sh", "-c", "echo before; sleep 300")
    assert whole.call("session", "exec", session_id, "--", "true")["exit_code"] == 0
    whole.call("session", "suspend", session_id)
    (asleep,) = whole.call("session", "ps", session_id)
    assert (asleep["exec_id"], asleep["state"]) == (exec_id, "asleep")
    assert "asleep" in torpor(whole.data.root, "session", "ps", session_id).stdout
    assert whole.call("session", "show", session_id)["state"] == "suspended"
    whole.call("session", "resume", session_id)
    (awake,) = whole.call("session", "ps", session_id)
    assert awake["state"] == "running"
    assert 0 < awake["remaining_s"] <= 3600
    whole.call("session", "signal", session_id, exec_id)
    assert torpor(whole.data.root, "session", "logs", session_id, exec_id, "-f").stdout == "before\n"


def test_a_terminal_is_not_made_up(whole: EmbeddedWhole, session_id: str) -> None:
    assert whole.refused("session", "exec", "-it", session_id, "--", "sh")["code"] == "no-terminal"
    exec_id = started(whole, session_id, "--", "sh", "-c", "echo ready; sleep 60")
    with sitting(whole, "session", "attach", session_id, exec_id) as somebody:
        somebody.until(b"ready")
        somebody.process.send_signal(signal.SIGINT)
        assert somebody.wait() == 130
    whole.call("session", "signal", session_id, exec_id, "9")

"""The guest's agent as a process of this machine, spoken to over a socket pair as the host would over its port."""

import contextlib
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from torpor_guest_agent.frames import Frame, Frames, encode

ANSWER_S_MAX: Final = 20.0
SCRIPT: Final = """
import ctypes, json, sys
from torpor_guest_agent.identity import Self
from torpor_guest_agent.main import Agent

class Somebody(Self):
    # The clock, the generator and the name of the test's machine are not the agent's to change.
    def step_clock(self, clock_ns): self.noted(f"clock {clock_ns}")
    def reseed(self, entropy): self.noted(f"entropy {entropy.hex()}")
    def set_hostname(self, hostname): self.noted(f"hostname {hostname}")
    def noted(self, what):
        with open(f"{self._folder}/noted", "a") as notes: print(what, file=notes)

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come to it, as to a first process
Agent(int(sys.argv[1]), Somebody(sys.argv[2])).run()
"""


class AgentRefused(Exception):  # noqa: N818  (an answer)
    """The agent's answer to a request that cannot be."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class AgentProcess:
    """A running agent, and the host's end of its channel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Frame] = []
        self._ids = itertools.count(1)
        self._frames = Frames()
        ours, theirs = socket.socketpair()
        self.channel = ours
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(theirs.fileno()), str(folder)],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def request(self, op: str, body: bytes = b"", /, **header: Any) -> Frame:
        """Ask, and wait for the answer; events that come before it are kept."""
        number = next(self._ids)
        self.channel.sendall(encode(Frame({"op": op, "id": number, **header}, body)))
        answers: list[Frame] = []
        while not answers:
            arrived = self.receive()
            answers = [frame for frame in arrived if frame.header.get("re") == number]
            self.events += [frame for frame in arrived if frame.header.get("re") != number]
        (answer,) = answers
        if not answer.header["ok"]:
            raise AgentRefused(answer.header["code"], answer.header["message"])
        return answer

    def receive(self) -> list[Frame]:
        """What arrives next; an error when nothing does."""
        self.channel.settimeout(ANSWER_S_MAX)
        data = self.channel.recv(256 * 1024)
        assert data, "the agent is gone"
        return self._frames.feed(data)

    def wait(self, holds: Callable[[], bool]) -> None:
        """Take events until it is so."""
        deadline = time.monotonic() + ANSWER_S_MAX
        while not holds():
            assert time.monotonic() < deadline, f"not so within {ANSWER_S_MAX} s; events: {self.events[-3:]}"
            self.events.extend(self.receive())

    def hello(self, **changes: Any) -> dict[str, Any]:
        """Say who it is."""
        identity = {
            "session_id": "s-1",
            "incarnation": 1,
            "epoch": "epoch-1",
            "hostname": "s-1",
            "machine_id": "0" * 32,
            "clock_ns": 1,
        }
        return self.request("hello", b"entropy", **(identity | changes)).header

    def start(self, exec_id: str, *argv: str, stdin: bytes = b"", **header: Any) -> Frame:
        """Start a program."""
        return self.request("exec", stdin, exec_id=exec_id, argv=list(argv), **({"cwd": "/"} | header))

    def end_of(self, exec_id: str) -> dict[str, Any]:
        """How a program ended, once it has."""
        found: list[dict[str, Any]] = []

        def has_ended() -> bool:
            found[:] = [
                frame.header
                for frame in self.events
                if frame.header.get("event") == "end" and frame.header["exec_id"] == exec_id
            ]
            return bool(found)

        self.wait(has_ended)
        return found[0]

    def output_of(self, exec_id: str, stream: str = "stdout") -> bytes:
        """All output of a program that has arrived."""
        return b"".join(
            frame.body
            for frame in self.events
            if frame.header.get("event") == "output"
            and (frame.header["exec_id"], frame.header["stream"]) == (exec_id, stream)
        )

    def run(self, *argv: str, **header: Any) -> tuple[dict[str, Any], bytes]:
        """Run a program to its end; how it ended, and its standard output."""
        exec_id = f"x-{next(self._ids)}"
        self.start(exec_id, *argv, **header)
        return self.end_of(exec_id), self.output_of(exec_id)

    def close(self) -> None:
        """End the agent and all it has started."""
        self.channel.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait(ANSWER_S_MAX)


@contextmanager
def running_agent(folder: Path) -> Iterator[AgentProcess]:
    """An agent that has been told who it is."""
    agent = AgentProcess(folder)
    try:
        agent.hello()
        yield agent
    finally:
        agent.close()

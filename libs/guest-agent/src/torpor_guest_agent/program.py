"""One program in the guest: its process, its streams, and the output the host has not confirmed yet."""

import os
import time
from collections import deque
from typing import Any, Final, NamedTuple

UNCONFIRMED_BYTES_MAX: Final = 1024 * 1024
"""Output of one program that the host has not confirmed; above it the program's pipe is left full."""


class Streams(NamedTuple):
    """The agent's ends: `stdin` when there is input to come, `outputs` by descriptor, `terminal` when there is one."""

    stdin: int | None
    outputs: dict[int, str]
    terminal: int | None


class Program:
    """What the agent knows of one program. `pid` is also its process group and session."""

    def __init__(self, exec_id: str, pid: int, streams: Streams) -> None:
        self.exec_id = exec_id
        self.pid = pid
        self.stdin, self.streams, self.terminal = streams
        self.started_at = time.time()
        self.deadline: float | None = None
        self.timed_out = False
        self.paused: set[int] = set()
        self.stdin_waiting: deque[bytes] = deque()
        self.stdin_waiting_bytes = 0
        self.stdin_ends = False
        self.fed = 0
        self.offset = 0
        self.unconfirmed: deque[tuple[int, str, bytes]] = deque()
        self.unconfirmed_bytes = 0
        self.status: int | None = None
        self.end: dict[str, Any] | None = None

    @property
    def held_up(self) -> bool:
        """Whether it must wait until the host has taken some of its output."""
        return self.unconfirmed_bytes > UNCONFIRMED_BYTES_MAX

    def description(self) -> dict[str, Any]:
        """What a listing says of it."""
        return {
            "exec_id": self.exec_id,
            "pid": self.pid,
            "started_at": self.started_at,
            "running": self.end is None,
            "remaining_s": None if self.deadline is None else max(0.0, self.deadline - time.monotonic()),
            "first_offset": self.unconfirmed[0][0] if self.unconfirmed else self.offset,
            "offset": self.offset,
            "end": self.end,
        }

    def wrote(self, stream: str, data: bytes) -> int:
        """Keep output until it is confirmed; its offset."""
        offset = self.offset
        self.unconfirmed.append((offset, stream, data))
        self.unconfirmed_bytes += len(data)
        self.offset += len(data)
        return offset

    def confirm(self, offset: int) -> None:
        """The host has all output up to `offset`: forget that."""
        while self.unconfirmed and self.unconfirmed[0][0] + len(self.unconfirmed[0][2]) <= offset:
            self.unconfirmed_bytes -= len(self.unconfirmed.popleft()[2])

    def ended(self, status: int) -> dict[str, Any]:
        """The event that says how it ended, given what `waitpid` said."""
        signalled = os.WIFSIGNALED(status)
        self.end = {
            "event": "end",
            "exec_id": self.exec_id,
            "outcome": "timed-out" if self.timed_out else "signaled" if signalled else "exited",
            "exit_code": None if signalled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signalled else None,
            "offset": self.offset,
        }
        return self.end

"""Programs in the guest: started, fed, signalled, their output kept until the host has it, listed and found again."""

import contextlib
import os
import signal
import time
from collections import deque
from typing import Any, Final

from torpor_guest_agent.frames import Frame
from torpor_guest_agent.loop import Loop
from torpor_guest_agent.program import Program
from torpor_guest_agent.refusal import Refused
from torpor_guest_agent.spawning import Spawning, set_size

CHUNK_BYTES: Final = 64 * 1024
STDIN_BYTES_MAX: Final = 4 * 1024 * 1024
"""Input that a program has not read yet; more is refused until it reads."""
RUNNING_MAX: Final = 1024
ENDED_KEPT_MAX: Final = 256
"""Ended programs that the host has not forgotten; the oldest goes first."""
KILL_GRACE_S: Final = 2.0
TERMINAL_PAUSE_S: Final = 0.02


class Programs:
    """All programs the host started; also the reaper of every orphan, since the agent is the first process."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._spawning = Spawning()
        self._programs: dict[str, Program] = {}
        self._by_pid: dict[int, Program] = {}
        self._ended: deque[str] = deque()
        loop.on_signal(signal.SIGCHLD, self.reap)

    @property
    def environment(self) -> dict[str, str]:
        """Added to every program's environment (identity, proxies)."""
        return self._spawning.environment

    # --- what the host asks for ---

    def start(self, request: dict[str, Any], stdin: bytes) -> dict[str, Any]:
        """Start a program, once per `exec_id`: refused with `exec-exists` when there is one of this id."""
        exec_id = str(request["exec_id"])
        if exec_id in self._programs:
            raise Refused("exec-exists", f"there is a program {exec_id} already")
        if len(self._by_pid) >= RUNNING_MAX:
            raise Refused("too-many-programs", f"{RUNNING_MAX} programs run already")
        stays_open = bool(request.get("stdin_open", False))
        pid, streams = self._spawning.start(request, input_follows=bool(stdin) or stays_open)
        program = Program(exec_id, pid, streams)
        timeout_s = request.get("timeout_s")
        if timeout_s is not None:
            program.deadline = time.monotonic() + float(timeout_s)
            self._loop.at(program.deadline, self._expire)
        self._programs[exec_id] = self._by_pid[pid] = program
        for descriptor in program.streams:
            self._watch(program, descriptor)
        if stdin or program.stdin is not None:
            self._feed(program, stdin, ends=not stays_open)
        return {"pid": pid}

    def feed(self, exec_id: str, data: bytes, *, ends: bool, offset: int | None = None) -> dict[str, Any]:
        """Give a program input; `ends` closes it after that. Answers how much it has not read yet.

        `offset` counts the bytes fed before: what was fed already is not fed again.
        """
        program = self._get(exec_id)
        known = 0 if offset is None else program.fed - offset
        if known < 0:
            raise Refused("stdin-gap", f"{exec_id} was given {program.fed} bytes, not {offset}")
        data = data[known:]
        if data and program.stdin is None:
            raise Refused("stdin-closed", f"{exec_id} takes no more input")
        if program.stdin_waiting_bytes + len(data) > STDIN_BYTES_MAX:
            raise Refused("stdin-full", f"{exec_id} has {program.stdin_waiting_bytes} bytes to read still")
        self._feed(program, data, ends=ends)
        program.fed += len(data)
        return {"waiting_bytes": program.stdin_waiting_bytes, "offset": program.fed}

    def kill(self, exec_id: str, number: int, *, group: bool = True) -> None:
        """Send a signal to the program and, by default, to all of its process group."""
        program = self._get(exec_id)
        self._signal(program, number, group=group)

    def resize(self, exec_id: str, rows: int, columns: int) -> None:
        """Set the size of a program's terminal."""
        terminal = self._get(exec_id).terminal
        if terminal is None:
            raise Refused("no-terminal", f"{exec_id} has no terminal, or has closed it")
        set_size(terminal, rows, columns)

    def confirm(self, exec_id: str, offset: int) -> None:
        """The host has all output up to `offset`; forget it, and read on if the program was held up."""
        program = self._programs.get(exec_id)
        if program is not None:
            program.confirm(offset)
            self._unpause(program)

    def forget(self, exec_id: str) -> None:
        """The host has the program's end on record; nothing happens to one that runs."""
        program = self._programs.get(exec_id)
        if program is not None and program.end is not None:
            del self._programs[exec_id]
            with contextlib.suppress(ValueError):
                self._ended.remove(exec_id)

    def listing(self) -> list[dict[str, Any]]:
        """Every program that runs, or whose end the host has not forgotten."""
        return [program.description() for program in self._programs.values()]

    def attach(self, exec_id: str, offset: int | None) -> dict[str, Any]:
        """Send again all output that is still here (from `offset` on, when given), then go on as before."""
        program = self._get(exec_id)
        if offset is not None:
            program.confirm(offset)
        for start, stream, data in program.unconfirmed:
            self._loop.send(_output(exec_id, start, stream, data))
        if program.end is not None:
            self._loop.send(Frame(program.end))
        self._unpause(program)
        return program.description()

    def resume_all(self) -> None:
        """Read on wherever output was held up because the channel was crowded."""
        for program in self._by_pid.values():
            if program.paused:
                self._unpause(program)

    # --- children ---

    def reap(self) -> None:
        """Take every child that ended, ours or an orphan left to the first process."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            program = self._by_pid.get(pid)
            if program is not None:
                program.status = status
                self._finish(program)
                if program.end is None:  # somebody it has started may hold its pipes open
                    self._abandon_later(program)

    def _signal(self, program: Program, number: int, *, group: bool) -> None:
        # A pid whose end was taken may be somebody else's by now; its group's number is not while it has a member.
        if program.end is not None or (program.status is not None and not group):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if group else os.kill)(program.pid, number)

    # --- output ---

    def _watch(self, program: Program, descriptor: int) -> None:
        self._loop.watch(descriptor, lambda: self._read(program, descriptor))

    def _read(self, program: Program, descriptor: int) -> None:
        if program.held_up or self._loop.crowded:
            program.paused.add(descriptor)
            self._loop.unwatch(descriptor)
            return
        try:
            data = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:  # a terminal whose last user is gone
            data = b""
        if not data:
            self._close(program, descriptor)
            self._finish(program)
            return
        stream = program.streams[descriptor]
        self._loop.send(_output(program.exec_id, program.wrote(stream, data), stream, data))

    def _unpause(self, program: Program) -> None:
        if program.held_up:
            return
        for descriptor in program.paused:
            self._watch(program, descriptor)
        program.paused.clear()

    def _close(self, program: Program, descriptor: int) -> None:
        self._loop.unwatch(descriptor)
        program.paused.discard(descriptor)
        del program.streams[descriptor]
        if descriptor == program.terminal:
            program.stdin = program.terminal = None
        os.close(descriptor)

    def _abandon_later(self, program: Program) -> None:
        self._loop.at(time.monotonic() + KILL_GRACE_S, lambda: self._abandon(program))

    def _abandon(self, program: Program) -> None:
        """The process is gone, and its pipes are held open by others: they are not waited for."""
        if program.end is not None:
            return
        if program.paused:  # what it has written is still to be read; the host takes its time
            self._abandon_later(program)
            return
        for descriptor in list(program.streams):
            self._close(program, descriptor)
        self._finish(program)

    def _finish(self, program: Program) -> None:
        if program.status is None or program.streams or program.end is not None:
            return
        self._close_stdin(program)
        self._loop.send(Frame(program.ended(program.status)))
        self._by_pid.pop(program.pid, None)
        self._ended.append(program.exec_id)
        while len(self._ended) > ENDED_KEPT_MAX:
            self._programs.pop(self._ended.popleft(), None)

    # --- input ---

    def _feed(self, program: Program, data: bytes, *, ends: bool) -> None:
        if data and program.stdin is not None:
            program.stdin_waiting.append(data)
            program.stdin_waiting_bytes += len(data)
        program.stdin_ends = program.stdin_ends or ends
        self._write(program)

    def _write(self, program: Program) -> None:
        while program.stdin is not None and program.stdin_waiting:
            data = program.stdin_waiting[0]
            try:
                written = os.write(program.stdin, data)
            except BlockingIOError:
                self._write_later(program)
                return
            except OSError:  # it does not read any more
                program.stdin_waiting.clear()
                program.stdin_waiting_bytes, program.stdin_ends = 0, True
                break
            program.stdin_waiting_bytes -= written
            if written == len(data):
                program.stdin_waiting.popleft()
            else:
                program.stdin_waiting[0] = data[written:]
        if program.stdin_ends:
            self._close_stdin(program)
        elif program.stdin is not None and program.terminal is None:
            self._loop.unwatch(program.stdin)

    def _write_later(self, program: Program) -> None:
        if program.terminal is not None:  # its descriptor is watched for reading already
            self._loop.at(time.monotonic() + TERMINAL_PAUSE_S, lambda: self._write(program))
            return
        assert program.stdin is not None
        self._loop.unwatch(program.stdin)
        self._loop.watch(program.stdin, lambda: self._write(program), write=True)

    def _close_stdin(self, program: Program) -> None:
        """A terminal stays: it is output too, and its end of input is a character."""
        if program.stdin is not None and program.terminal is None:
            self._loop.unwatch(program.stdin)
            os.close(program.stdin)
            program.stdin = None

    # --- time ---

    def _expire(self) -> None:
        now = time.monotonic()
        for program in self._by_pid.values():
            if program.deadline is None or program.deadline > now:
                continue
            program.timed_out = program.timed_out or program.status is None
            late = program.deadline <= now - KILL_GRACE_S
            self._signal(program, signal.SIGKILL if late else signal.SIGTERM, group=True)
            if not late:
                self._loop.at(program.deadline + KILL_GRACE_S, self._expire)

    def _get(self, exec_id: str) -> Program:
        try:
            return self._programs[exec_id]
        except KeyError:
            raise Refused("no-such-program", f"there is no program {exec_id}") from None


def _output(exec_id: str, offset: int, stream: str, data: bytes) -> Frame:
    return Frame({"event": "output", "exec_id": exec_id, "stream": stream, "offset": offset}, data)

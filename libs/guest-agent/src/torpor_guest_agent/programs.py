"""Programs in the guest: started, fed, signalled, their output kept until the host has it, listed and found again."""

import contextlib
import fcntl
import os
import pty
import pwd
import signal
import struct
import subprocess
import termios
import time
from collections import deque
from typing import Any, Final

from torpor_guest_agent.frames import Frame
from torpor_guest_agent.loop import Loop

CHUNK_BYTES: Final = 64 * 1024
UNCONFIRMED_BYTES_MAX: Final = 1024 * 1024
"""Output of one program that the host has not confirmed; above it the program's pipe is left full."""
ENDED_KEPT_MAX: Final = 256
"""Ended programs whose end the host has not confirmed; the oldest is forgotten first."""
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KILL_GRACE_S: Final = 2.0


class Refused(Exception):  # noqa: N818  (an answer to the host, not a failure of ours)
    """The host asked for something that cannot be; `code` is for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Program:
    """One program: its process, its pipes, and the output the host has not confirmed yet."""

    def __init__(self, exec_id: str, process: "subprocess.Popen[bytes]", deadline: float | None) -> None:
        self.exec_id = exec_id
        self.process = process
        self.deadline = deadline
        self.started_at = time.time()
        self.terminal: int | None = None
        self.streams: dict[int, str] = {}
        self.paused: set[int] = set()
        self.stdin: int | None = None
        self.stdin_waiting: deque[bytes] = deque()
        self.stdin_ends = False
        self.offset = 0
        self.unconfirmed: deque[tuple[int, str, bytes]] = deque()
        self.unconfirmed_bytes = 0
        self.end: dict[str, Any] | None = None
        self.timed_out = False
        self.status: int | None = None

    def description(self) -> dict[str, Any]:
        """What a listing says of it."""
        return {
            "exec_id": self.exec_id,
            "pid": self.process.pid,
            "started_at": self.started_at,
            "running": self.end is None,
            "remaining_s": None if self.deadline is None else max(0.0, self.deadline - time.monotonic()),
            "first_offset": self.unconfirmed[0][0] if self.unconfirmed else self.offset,
            "offset": self.offset,
            "end": self.end,
        }


class Programs:
    """All programs the host started; also the reaper of every orphan, since the agent is the first process."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._programs: dict[str, Program] = {}
        self._by_pid: dict[int, Program] = {}
        self._ended: deque[str] = deque()
        self.environment: dict[str, str] = {}
        """Added to every program's environment (identity, proxies)."""

    # --- what the host asks for ---

    def start(self, request: dict[str, Any], stdin: bytes) -> dict[str, Any]:
        """Start a program once per `exec_id`; asked again, the one that is there is described."""
        exec_id = str(request["exec_id"])
        if exec_id in self._programs:
            return self._programs[exec_id].description()
        user = _user(request.get("user"))
        cwd = request.get("cwd") or user.pw_dir
        environment = {
            "PATH": PATH,
            "HOME": user.pw_dir,
            "USER": user.pw_name,
            "LOGNAME": user.pw_name,
            "SHELL": user.pw_shell,
            "LANG": "C.UTF-8",
            **self.environment,
            **request.get("env", {}),
        }
        timeout_s = request.get("timeout_s")
        program = self._spawn(exec_id, list(request["argv"]), environment, (cwd, user), request.get("pty"))
        if timeout_s is not None:
            program.deadline = time.monotonic() + float(timeout_s)
            self._loop.at(program.deadline, self._expire)
        self._programs[exec_id] = self._by_pid[program.process.pid] = program
        for descriptor in program.streams:
            self._loop.watch(descriptor, lambda d=descriptor: self._read(program, d))  # type: ignore[misc]
        self.feed(exec_id, stdin, ends=not request.get("stdin_open", False))
        return program.description()

    def feed(self, exec_id: str, data: bytes, *, ends: bool) -> None:
        """Give a program input; `ends` closes it after that."""
        program = self._get(exec_id)
        if data:
            program.stdin_waiting.append(data)
        program.stdin_ends = program.stdin_ends or ends
        self._write(program)

    def kill(self, exec_id: str, number: int, *, group: bool = True) -> None:
        """Send a signal to the program and, by default, to all it started in its session."""
        program = self._get(exec_id)
        with contextlib.suppress(ProcessLookupError):
            if group:
                os.killpg(program.process.pid, number)
            else:
                os.kill(program.process.pid, number)

    def resize(self, exec_id: str, rows: int, columns: int) -> None:
        """Set the size of a program's terminal."""
        terminal = self._get(exec_id).terminal
        if terminal is None:
            raise Refused("no-terminal", f"{exec_id} was not started with a terminal")
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def confirm(self, exec_id: str, offset: int) -> None:
        """The host has all output up to `offset`; forget it, and read on if the program was held up."""
        program = self._programs.get(exec_id)
        if program is None:
            return
        while program.unconfirmed and program.unconfirmed[0][0] + len(program.unconfirmed[0][2]) <= offset:
            program.unconfirmed_bytes -= len(program.unconfirmed.popleft()[2])
        self._unpause(program)

    def forget(self, exec_id: str) -> None:
        """The host has the program's end on record."""
        program = self._programs.get(exec_id)
        if program is not None and program.end is not None:
            del self._programs[exec_id]
            with contextlib.suppress(ValueError):
                self._ended.remove(exec_id)

    def listing(self) -> list[dict[str, Any]]:
        """Every program that runs, or whose end the host has not confirmed."""
        return [program.description() for program in self._programs.values()]

    def attach(self, exec_id: str, offset: int | None) -> dict[str, Any]:
        """Send again all output that is still here (from `offset` on, when given), then go on as before."""
        program = self._get(exec_id)
        if offset is not None:
            self.confirm(exec_id, offset)
        for start, stream, data in program.unconfirmed:
            self._loop.send(_output(exec_id, start, stream, data))
        if program.end is not None:
            self._loop.send(Frame(program.end))
        self._unpause(program)
        return program.description()

    def resume_all(self) -> None:
        """Read on wherever output was held up because the host was away."""
        for program in self._programs.values():
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
            program = self._by_pid.pop(pid, None)
            if program is not None:
                program.process.returncode = status  # subprocess need not wait for it again
                program.status = status
                self._drain(program)

    def _spawn(
        self,
        exec_id: str,
        argv: list[str],
        environment: dict[str, str],
        place: tuple[str, pwd.struct_passwd],
        terminal_size: dict[str, int] | None,
    ) -> Program:
        cwd, user = place
        options: dict[str, Any] = {"cwd": cwd, "env": environment, "start_new_session": True, "bufsize": 0}
        if user.pw_uid != os.getuid():
            groups = os.getgrouplist(user.pw_name, user.pw_gid)
            options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups}
        if terminal_size is not None:
            ours, theirs, streams = _terminal(terminal_size, user.pw_uid)
            options["preexec_fn"] = _take_terminal
        else:
            ours, theirs, streams = _pipes()
        try:
            process = subprocess.Popen(  # noqa: S603  (running what the host asks for is the agent's purpose)
                argv, stdin=theirs[0], stdout=theirs[1], stderr=theirs[2], **options
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            for descriptor in {ours, *streams}:
                os.close(descriptor)
            raise Refused(_cause(error), str(error)) from error
        finally:
            for descriptor in set(theirs):
                os.close(descriptor)
        program = Program(exec_id, process, None)
        program.stdin, program.streams = ours, streams
        program.terminal = ours if terminal_size is not None else None
        for descriptor in {ours, *streams}:
            os.set_blocking(descriptor, False)
        return program

    # --- output ---

    def _read(self, program: Program, descriptor: int) -> None:
        if program.unconfirmed_bytes > UNCONFIRMED_BYTES_MAX or self._loop.crowded:
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
            return
        stream = program.streams[descriptor]
        program.unconfirmed.append((program.offset, stream, data))
        program.unconfirmed_bytes += len(data)
        self._loop.send(_output(program.exec_id, program.offset, stream, data))
        program.offset += len(data)

    def _unpause(self, program: Program) -> None:
        if program.unconfirmed_bytes > UNCONFIRMED_BYTES_MAX:
            return
        for descriptor in list(program.paused):
            program.paused.discard(descriptor)
            self._loop.watch(descriptor, lambda d=descriptor: self._read(program, d))  # type: ignore[misc]

    def _close(self, program: Program, descriptor: int) -> None:
        self._loop.unwatch(descriptor)
        program.paused.discard(descriptor)
        del program.streams[descriptor]
        if descriptor == program.terminal:
            program.stdin = None
        os.close(descriptor)
        self._finish(program)

    def _drain(self, program: Program) -> None:
        """The process is gone: its pipes are read to the end unless somebody it started still holds them open."""
        self._finish(program)
        if program.end is None:
            self._loop.at(time.monotonic() + KILL_GRACE_S, lambda: self._abandon(program))

    def _abandon(self, program: Program) -> None:
        if program.end is None and not program.paused:
            for descriptor in list(program.streams):
                self._close(program, descriptor)

    def _finish(self, program: Program) -> None:
        if program.status is None or program.streams or program.end is not None:
            return
        self._close_stdin(program)
        status = program.status
        signalled = os.WIFSIGNALED(status)
        outcome = "timed-out" if program.timed_out else "signaled" if signalled else "exited"
        program.end = {
            "event": "end",
            "exec_id": program.exec_id,
            "outcome": outcome,
            "exit_code": None if signalled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signalled else None,
            "offset": program.offset,
        }
        self._ended.append(program.exec_id)
        while len(self._ended) > ENDED_KEPT_MAX:
            self._programs.pop(self._ended.popleft(), None)
        self._loop.send(Frame(program.end))

    # --- input ---

    def _write(self, program: Program) -> None:
        if program.stdin is None:
            program.stdin_waiting.clear()
            return
        self._loop.unwatch(program.stdin) if program.terminal is None else None
        while program.stdin_waiting:
            data = program.stdin_waiting[0]
            try:
                written = os.write(program.stdin, data)
            except BlockingIOError:
                if program.terminal is None:
                    self._loop.watch(program.stdin, lambda: self._write(program), write=True)
                else:
                    self._loop.at(time.monotonic() + 0.05, lambda: self._write(program))
                return
            except OSError:  # it does not read any more
                program.stdin_waiting.clear()
                self._close_stdin(program)
                return
            if written == len(data):
                program.stdin_waiting.popleft()
            else:
                program.stdin_waiting[0] = data[written:]
        if program.stdin_ends and program.terminal is None:
            self._close_stdin(program)

    def _close_stdin(self, program: Program) -> None:
        if program.stdin is None or program.terminal is not None:
            return
        self._loop.unwatch(program.stdin)
        os.close(program.stdin)
        program.stdin = None

    # --- time ---

    def _expire(self) -> None:
        now = time.monotonic()
        for program in list(self._by_pid.values()):
            if program.deadline is not None and program.deadline <= now:
                program.timed_out = True
                number = signal.SIGKILL if program.deadline < now - KILL_GRACE_S else signal.SIGTERM
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.process.pid, number)
                self._loop.at(now + KILL_GRACE_S + 0.1, self._expire)

    def _get(self, exec_id: str) -> Program:
        try:
            return self._programs[exec_id]
        except KeyError:
            raise Refused("no-such-program", f"there is no program {exec_id}") from None


def _output(exec_id: str, offset: int, stream: str, data: bytes) -> Frame:
    return Frame({"event": "output", "exec_id": exec_id, "stream": stream, "offset": offset}, data)


def _pipes() -> tuple[int, tuple[int, int, int], dict[int, str]]:
    """Our end of the input, the program's three ends, and our ends of the outputs by stream."""
    input_end, ours = os.pipe()
    stdout, output_end = os.pipe()
    stderr, error_end = os.pipe()
    return ours, (input_end, output_end, error_end), {stdout: "stdout", stderr: "stderr"}


def _terminal(size: dict[str, int], owner: int) -> tuple[int, tuple[int, int, int], dict[int, str]]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", size["rows"], size["columns"], 0, 0))
    os.fchown(theirs, owner, -1)
    return ours, (theirs, theirs, theirs), {ours: "stdout"}


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _user(name: str | None) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name or "root")
    except KeyError:
        raise Refused("no-such-user", f"the guest has no user {name!r}") from None


def _cause(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "not-found"
    if isinstance(error, PermissionError):
        return "not-permitted"
    return "cannot-start"

"""The commands that a simulated guest knows, and how its programs go on in time: exactly, however seldom one looks."""

import posixpath
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple

from torpor_contracts.ids import ExecId
from torpor_contracts.session import ExecSpec, TerminalSize
from torpor_vm_host.adapters.simulated import tree
from torpor_vm_host.adapters.simulated.machine import End, Machine, Meta, Process, Step, Written
from torpor_vm_host.adapters.simulated.shell import NotUnderstood, steps_of
from torpor_vm_host.adapters.simulated.tree import key_of
from torpor_vm_host.guest_ports import STDIN_FULL
from torpor_vm_host.ports import DriverError

STDIN_BYTES_MAX: Final = 1024 * 1024
SHELLS_ALONE: Final = (["sh"], ["bash"], ["/bin/sh"], ["/bin/bash"])
"""Programs that take their input for commands."""
PROMPT: Final = b"$ "
INTERRUPT_KEY: Final = b"\x03"
END_KEY: Final = b"\x04"
SIGINT: Final = 2
HARMLESS: Final = frozenset({0, 17, 18, 23, 28})
"""Signals that end no program: nothing, SIGCHLD, SIGCONT, SIGURG, SIGWINCH."""

SEQ_MAX: Final = 200_000
SLEEP_S_MAX: Final = 10 * 366 * 86_400.0
US_PER_S: Final = 1_000_000
CHUNK_BYTES_MAX: Final = 64 * 1024

NOT_FOUND: Final = 127
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Done(NamedTuple):
    """What one command did."""

    status: int = 0
    out: bytes = b""
    err: bytes = b""
    sleeps_us: int = 0
    ends: bool = False
    reads: bool = False


Command = Callable[[Machine, Process, list[str]], Done]


def spawn(machine: Machine, exec_id: ExecId, program: ExecSpec, now_us: int) -> Process:
    """Put a program into the machine; it runs from `now_us` on."""
    process = Process(
        exec_id=exec_id,
        steps=[],
        env=dict(program.env),
        cwd=program.cwd or "/root",
        user=program.user or "root",
        stdin=program.stdin,
        at_us=now_us,
        times_out_us=now_us + _us(program.timeout_s),
        stdin_open=program.stdin_open or program.terminal is not None,
        terminal=program.terminal,
    )
    machine.processes[exec_id] = process
    if program.argv in SHELLS_ALONE:
        process.shell, process.given = True, program.stdin.encode()
        _prompt(process)
        return process
    try:
        process.steps = steps_of(program.argv)
    except NotUnderstood as error:
        _write(process, "stderr", _unknown(f"sh: {error}"))
        process.end = End(outcome="exited", exit_code=NOT_FOUND)
    return process


def advance(machine: Machine, now_us: int) -> None:
    """Let every program of a running machine come to where it is at `now_us`, in the order of their steps in time."""
    while machine.state == "running":
        due = [(at, process.exec_id) for process in machine.processes.values() if (at := process.due_us()) is not None]
        first = min(due, default=None)
        if first is None or first[0] > now_us:
            return
        _go_on(machine, machine.processes[first[1]], first[0])


def taken(process: Process, offset: int, now_us: int) -> None:
    """Somebody has taken the output at `offset`; a program that waited for that goes on from now."""
    was_held_up = process.held_up
    if process.written and process.written[0].offset == offset:
        del process.written[0]
    if was_held_up and not process.held_up:
        process.at_us = max(process.at_us, now_us)


def feed(process: Process, data: bytes, offset: int, *, ends: bool, now_us: int) -> int:
    """Give a program input; how much it has been given in all. Raises `DriverError`."""
    known = process.given_bytes - offset
    if known < 0:
        raise DriverError("stdin-gap", f"it was given {process.given_bytes} bytes, not {offset}", retryable=False)
    data = data[known:]
    if data and not process.stdin_open:
        raise DriverError("stdin-closed", f"{process.exec_id} takes no more input", retryable=False)
    if len(process.given) + len(data) > STDIN_BYTES_MAX:
        raise DriverError(STDIN_FULL, f"{process.exec_id} has {len(process.given)} bytes to read still", retryable=True)
    process.given_bytes += len(data)
    if process.terminal is not None:
        data, ends = _typed(process, data, ends=ends)
    process.given += data
    process.stdin_open = process.stdin_open and not ends
    if process.reads and process.end is None:
        process.at_us = max(process.at_us, now_us)
    return process.given_bytes


def _typed(process: Process, data: bytes, *, ends: bool) -> tuple[bytes, bool]:
    """What a terminal makes of keys: an echo, and what the program gets to read."""
    before, interrupt, after = data.rpartition(INTERRUPT_KEY)
    if interrupt:
        _write(process, "stdout", before + b"^C\n")
        process.given = b""
        if not process.shell:
            kill(process, SIGINT)
    line, end_key, _ = after.partition(END_KEY)
    line = line.replace(b"\r", b"\n")
    _write(process, "stdout", line)
    return line, ends or bool(end_key)


def resize(process: Process, size: TerminalSize) -> None:
    """Another size for a program's terminal; raises `DriverError`."""
    if process.terminal is None:
        raise DriverError("no-terminal", f"{process.exec_id} has no terminal", retryable=False)
    process.terminal = size


def kill(process: Process, signal: int) -> None:
    """End a program by a signal, but for those that end none."""
    if process.end is None and signal not in HARMLESS:
        process.end = End(outcome="signaled", exit_code=None, detail=f"signal {signal}")


def _go_on(machine: Machine, process: Process, at_us: int) -> None:
    process.at_us = max(process.at_us, at_us)
    if at_us >= process.times_out_us:
        process.end = End(outcome="timed-out", exit_code=None, detail="its time was over")
        return
    process.wakes_us = None
    if process.shell and process.next_step == len(process.steps) and not _next_line(process):
        return
    if process.next_step == len(process.steps):
        process.end = End(outcome="exited", exit_code=process.status)
        return
    step = process.steps[process.next_step]
    process.next_step += 1
    if step.only_after_success and process.status != 0:
        return
    done = _redirected(machine, process, step, _run(machine, process, step.argv))
    _write(process, "stdout", done.out)
    _write(process, "stderr", done.err)
    process.reads = done.reads
    if done.reads:
        process.next_step -= 1
        return
    process.status = done.status
    if process.shell:
        _prompt(process)
    if done.ends:
        process.shell = False
        process.next_step = len(process.steps)
    if done.sleeps_us:
        process.wakes_us = process.at_us + done.sleeps_us


def _prompt(process: Process) -> None:
    if process.terminal is not None:
        _write(process, "stdout", PROMPT)


def _next_line(process: Process) -> bool:
    """Take the next line of a shell's input for a command; whether the shell has anything to do, or has ended."""
    line, newline, rest = process.given.partition(b"\n")
    if not newline and process.stdin_open:
        process.reads = True
        return False
    process.given, process.reads = rest, False
    if not newline and not line:
        process.shell = False
        return True
    try:
        process.steps += steps_of(["sh", "-c", line.decode(errors="replace")])
    except NotUnderstood as error:
        _write(process, "stderr", _unknown(f"sh: {error}"))
        process.status = NOT_FOUND
    if process.next_step == len(process.steps):
        _prompt(process)
        return False
    return True


def _run(machine: Machine, process: Process, argv: list[str]) -> Done:
    command = COMMANDS.get(argv[0].rpartition("/")[2])
    if command is None:
        return Done(NOT_FOUND, err=_unknown(f"{argv[0]}: not found"))
    try:
        return command(machine, process, argv[1:])
    except (ValueError, IndexError, OverflowError):
        return Done(2, err=f"{argv[0]}: cannot make sense of its arguments\n".encode())


def _redirected(machine: Machine, process: Process, step: Step, done: Done) -> Done:
    if step.into is None:
        return done
    stored = _store(machine, process, step.into, done.out, appends=step.appends)
    return done._replace(out=b"", err=done.err + stored.err, status=stored.status or done.status)


def _us(seconds: float) -> int:
    return int(min(max(seconds, 0.0), SLEEP_S_MAX) * US_PER_S)


def _unknown(what: str) -> bytes:
    known = ", ".join(sorted(COMMANDS))
    return (
        f"{what}: this is a simulated machine (driver 'simulated'), which knows only {known}, and `sh -c` with "
        "; && > >>. Start with a driver that runs real machines for anything else.\n"
    ).encode()


def _write(process: Process, stream: Literal["stdout", "stderr"], data: bytes) -> None:
    if process.terminal is not None:
        stream, data = "stdout", data.replace(b"\n", b"\r\n")
    for start in range(0, len(data), CHUNK_BYTES_MAX):
        piece = data[start : start + CHUNK_BYTES_MAX]
        process.written.append(Written(stream=stream, offset=process.written_bytes, data=piece))
        process.written_bytes += len(piece)


def _path(process: Process, name: str) -> str:
    return key_of(posixpath.normpath(posixpath.join(process.cwd, name)).encode(errors="surrogateescape"))


def _store(machine: Machine, process: Process, name: str, data: bytes, *, appends: bool) -> Done:
    key = _path(process, name)
    content = machine.files.get(key, b"") + data if appends else data
    try:
        tree.put(machine, key, content, Meta(mode=0o644, user=process.user, modified_us=process.at_us))
    except DriverError as error:
        said = "No space left on device" if error.code == "disk-full" else error.detail
        return Done(1, err=f"{name}: {said}\n".encode())
    return Done()


def _echo(_machine: Machine, _process: Process, args: list[str]) -> Done:
    text, end = (args[1:], "") if args[:1] == ["-n"] else (args, "\n")
    return Done(out=(" ".join(text) + end).encode())


def _cat(machine: Machine, process: Process, args: list[str]) -> Done:
    if not args:
        return _copied(process)
    out, missing = [], []
    for name in args:
        content = machine.files.get(_path(process, name))
        if content is None:
            missing.append(f"cat: {name}: No such file or directory\n")
        else:
            out.append(content)
    return Done(1 if missing else 0, b"".join(out), "".join(missing).encode())


def _copied(process: Process) -> Done:
    """What came in goes out, until no more can come."""
    out, process.given, process.stdin = process.stdin.encode() + process.given, b"", ""
    return Done(out=out, reads=process.stdin_open)


def _put(machine: Machine, process: Process, args: list[str]) -> Done:
    return _store(machine, process, args[0], (" ".join(args[1:]) + "\n").encode(), appends=False)


def _append(machine: Machine, process: Process, args: list[str]) -> Done:
    return _store(machine, process, args[0], (" ".join(args[1:]) + "\n").encode(), appends=True)


def _ls(machine: Machine, process: Process, args: list[str]) -> Done:
    try:
        names = tree.names_in(machine, _path(process, args[0] if args else "."))
    except DriverError as error:
        return Done(2, err=f"ls: {args[0] if args else '.'}: {error.detail}\n".encode())
    return Done(out=b"".join(name + b"\n" for name in names))


def _tty(_machine: Machine, process: Process, _args: list[str]) -> Done:
    return Done(1, out=b"not a tty\n") if process.terminal is None else Done(out=b"/dev/pts/0\n")


def _stty(_machine: Machine, process: Process, args: list[str]) -> Done:
    size = process.terminal
    if size is None or args != ["size"]:
        return Done(1, err=b"stty: only the size of a terminal\n")
    return Done(out=f"{size.rows} {size.columns}\n".encode())


def _rm(machine: Machine, process: Process, args: list[str]) -> Done:
    missing = [name for name in args if name != "-f" and not tree.drop(machine, _path(process, name))]
    if not missing or "-f" in args:
        return Done()
    return Done(1, err="".join(f"rm: {name}: No such file or directory\n" for name in missing).encode())


def _sleep(_machine: Machine, _process: Process, args: list[str]) -> Done:
    return Done(sleeps_us=_us(float(args[0])))


def _fail_after(_machine: Machine, process: Process, args: list[str]) -> Done:
    process.steps.insert(process.next_step, Step(argv=["exit", "1"]))
    return Done(sleeps_us=_us(float(args[0])))


def _seq(_machine: Machine, _process: Process, args: list[str]) -> Done:
    last = int(args[0])
    if last > SEQ_MAX:
        return Done(2, err=f"seq: a simulated machine counts to {SEQ_MAX} at most\n".encode())
    return Done(out="".join(f"{number}\n" for number in range(1, last + 1)).encode())


def _count(machine: Machine, _process: Process, _args: list[str]) -> Done:
    machine.counter += 1
    return Done(out=f"{machine.counter}\n".encode())


def _set(machine: Machine, _process: Process, args: list[str]) -> Done:
    machine.variables[args[0]] = " ".join(args[1:])
    return Done()


def _get(machine: Machine, _process: Process, args: list[str]) -> Done:
    value = machine.variables.get(args[0])
    return Done(1) if value is None else Done(out=f"{value}\n".encode())


def _env(machine: Machine, process: Process, _args: list[str]) -> Done:
    variables = {
        "HOME": "/root",
        "HOSTNAME": machine.session_id,
        "TORPOR_SESSION_ID": machine.session_id,
        "TORPOR_INCARNATION": str(machine.incarnation),
        "USER": process.user,
    } | process.env
    return Done(out="".join(f"{name}={value}\n" for name, value in sorted(variables.items())).encode())


def _pwd(_machine: Machine, process: Process, _args: list[str]) -> Done:
    return Done(out=f"{process.cwd}\n".encode())


def _cd(_machine: Machine, process: Process, args: list[str]) -> Done:
    process.cwd = _path(process, args[0] if args else "/root")
    return Done()


def _whoami(_machine: Machine, process: Process, _args: list[str]) -> Done:
    return Done(out=f"{process.user}\n".encode())


def _hostname(machine: Machine, _process: Process, _args: list[str]) -> Done:
    return Done(out=f"{machine.session_id}\n".encode())


def _date(_machine: Machine, process: Process, _args: list[str]) -> Done:
    return Done(out=f"{(_EPOCH + timedelta(microseconds=process.at_us)).isoformat()}\n".encode())


def _exit(_machine: Machine, process: Process, args: list[str]) -> Done:
    return Done((int(args[0]) if args else process.status) & 0xFF, ends=True)


COMMANDS: Final[dict[str, Command]] = {
    "append": _append,
    "cat": _cat,
    "cd": _cd,
    "count": _count,
    "date": _date,
    "echo": _echo,
    "env": _env,
    "exit": _exit,
    "fail-after": _fail_after,
    "false": lambda *_: Done(1),
    "get": _get,
    "hostname": _hostname,
    "ls": _ls,
    "pwd": _pwd,
    "rm": _rm,
    "seq": _seq,
    "set": _set,
    "sleep": _sleep,
    "sync": lambda *_: Done(),
    "true": lambda *_: Done(),
    "stty": _stty,
    "tty": _tty,
    "whoami": _whoami,
    "write": _put,
}

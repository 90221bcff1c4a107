"""The commands that a simulated guest knows, and how its programs go on in time: exactly, however seldom one looks."""

import posixpath
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple

from torpor_contracts.ids import ExecId
from torpor_contracts.session import ExecSpec
from torpor_vm_host.adapters.simulated.machine import End, Machine, Process, Step, Written
from torpor_vm_host.adapters.simulated.shell import NotUnderstood, steps_of

FILE_BYTES_MAX: Final = 1024 * 1024
DISK_BYTES_MAX: Final = 4 * 1024 * 1024
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
    )
    machine.processes[exec_id] = process
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


def kill(process: Process, signal: int) -> None:
    """End a program by a signal."""
    if process.end is None:
        process.end = End(outcome="signaled", exit_code=None, detail=f"signal {signal}")


def _go_on(machine: Machine, process: Process, at_us: int) -> None:
    process.at_us = max(process.at_us, at_us)
    if at_us >= process.times_out_us:
        process.end = End(outcome="timed-out", exit_code=None, detail="its time was over")
        return
    process.wakes_us = None
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
    process.status = done.status
    if done.ends:
        process.next_step = len(process.steps)
    if done.sleeps_us:
        process.wakes_us = process.at_us + done.sleeps_us


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
    stored = _store(machine, _path(process, step.into), done.out, appends=step.appends)
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
    for start in range(0, len(data), CHUNK_BYTES_MAX):
        piece = data[start : start + CHUNK_BYTES_MAX]
        process.written.append(Written(stream=stream, offset=process.written_bytes, data=piece))
        process.written_bytes += len(piece)


def _path(process: Process, name: str) -> str:
    return posixpath.normpath(posixpath.join(process.cwd, name))


def _store(machine: Machine, path: str, data: bytes, *, appends: bool) -> Done:
    content = machine.files.get(path, b"") + data if appends else data
    others = sum(len(kept) for name, kept in machine.files.items() if name != path)
    if len(content) > FILE_BYTES_MAX or others + len(content) > min(DISK_BYTES_MAX, machine.spec.disk_mib << 20):
        return Done(1, err=f"{path}: No space left on device\n".encode())
    machine.files[path] = content
    return Done()


def _echo(_machine: Machine, _process: Process, args: list[str]) -> Done:
    text, end = (args[1:], "") if args[:1] == ["-n"] else (args, "\n")
    return Done(out=(" ".join(text) + end).encode())


def _cat(machine: Machine, process: Process, args: list[str]) -> Done:
    out, missing = [], []
    for name in args:
        content = machine.files.get(_path(process, name))
        if content is None:
            missing.append(f"cat: {name}: No such file or directory\n")
        else:
            out.append(content)
    return Done(1 if missing else 0, b"".join(out) if args else process.stdin.encode(), "".join(missing).encode())


def _put(machine: Machine, process: Process, args: list[str]) -> Done:
    return _store(machine, _path(process, args[0]), (" ".join(args[1:]) + "\n").encode(), appends=False)


def _append(machine: Machine, process: Process, args: list[str]) -> Done:
    return _store(machine, _path(process, args[0]), (" ".join(args[1:]) + "\n").encode(), appends=True)


def _ls(machine: Machine, process: Process, args: list[str]) -> Done:
    folder = _path(process, args[0] if args else ".").rstrip("/") + "/"
    names = {path.removeprefix(folder).partition("/")[0] for path in machine.files if path.startswith(folder)}
    return Done(out="".join(f"{name}\n" for name in sorted(names)).encode())


def _rm(machine: Machine, process: Process, args: list[str]) -> Done:
    missing = [name for name in args if name != "-f" and machine.files.pop(_path(process, name), None) is None]
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
    "whoami": _whoami,
    "write": _put,
}

"""Which operating-system process is which: a pid alone is not an identity, a pid with its start time is."""

import os
import select
import signal
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def started_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone or only a corpse is left."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command, in brackets, may hold anything, brackets too: fields count from the last one (proc(5)).
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def boot_id() -> str:
    """The kernel's name for the present boot: start times of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def is_running(pid: int, ticks: int) -> bool:
    """Whether the very process that started at `ticks` still runs."""
    return started_ticks(pid) == ticks


def age_s(pid: int) -> float:
    """Seconds since a process was started; an exec keeps the count."""
    ticks = started_ticks(pid)
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return uptime_s - (ticks or 0) / TICKS_PER_S


def wait_gone(pid: int, ticks: int, timeout_s: float) -> bool:
    """Wait until a process, ours or not, is gone; False when it is still there after `timeout_s`."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        # The pid may have been given to another since; its start time, read while we hold the handle, decides.
        if not is_running(pid, ticks):
            return True
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(handle)


def end(pid: int, ticks: int, patience_s: float) -> bool:
    """End a process that is not our child: ask, wait `patience_s`, kill, wait once more. True when it is gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not is_running(pid, ticks):
            return True
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return True
        if wait_gone(pid, ticks, patience_s):
            return True
    return False

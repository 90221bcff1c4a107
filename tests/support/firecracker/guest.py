"""The guest of a machine: our agent in a process of its own, with files in place of memory and disk.

`/dev/shm`, `/tmp` and `/run` of the guest are its memory, `/root` is its disk; both are packed into the machine's files
when it is snapshot, and unpacked when it is loaded. The process is the first of a pid namespace: its end ends all.
"""

import contextlib
import ctypes
import io
import os
import signal
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torpor_guest_agent.files
import torpor_guest_agent.watching  # noqa: F401  (all that the agent needs, before what it is loaded from is hidden)
from torpor_guest_agent.identity import Self
from torpor_guest_agent.main import Agent

MEMORY_FOLDERS: Final = {"shm": "/dev/shm", "tmp": "/tmp", "run": "/run"}
DISK_FOLDERS: Final = {"root": "/root"}
CLONE_NEWNS: Final = 0x00020000
CLONE_NEWPID: Final = 0x20000000
MS_BIND: Final = 4096
MS_REC_PRIVATE: Final = (1 << 14) | (1 << 18)
PR_SET_PDEATHSIG: Final = 1
LENGTH_BYTES: Final = 8
STILL_TRIES: Final = 100


class Somebody(Self):
    """The agent's self, without what is the test's machine's: clock, randomness, host name."""

    def step_clock(self, clock_ns: int) -> None:
        """Nothing."""

    def reseed(self, entropy: bytes) -> None:
        """Nothing."""

    def set_hostname(self, hostname: str) -> None:
        """Nothing."""


class Guest:
    """A running agent. Its folders are below `home`; hosts connect to the socket `agent` there."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.agent = home / "agent"
        for name in [*MEMORY_FOLDERS, *DISK_FOLDERS]:
            (home / name).mkdir(parents=True, exist_ok=True)
        (home / "tmp").chmod(0o1777)
        self.pid = 0
        self._namespace = "none"
        self.nearby = os.path.relpath(self.agent)
        """The socket's path from the working directory: a longer one than 107 bytes is too long."""

    def boot(self) -> None:
        """Start the agent in namespaces of its own."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(self.nearby)
        listening.listen(4)
        _call("unshare", CLONE_NEWPID)
        self.pid = os.fork()
        if self.pid:
            listening.close()
            self._namespace = _namespace(self.pid)
            if self._namespace in {"", _namespace(os.getpid())}:
                raise RuntimeError("the guest has no pid namespace of its own")
            return
        try:
            _become_machine(self.home)
            Agent(listening, Somebody("/run/torpor")).run()
        finally:
            os._exit(1)

    def stop(self) -> None:
        """Let nothing in the guest run."""
        for _ in range(STILL_TRIES):  # what is stopped starts nothing: soon no process is new
            fresh = [pid for pid in self._processes() if not _is_stopped(pid)]
            if not fresh:
                return
            for pid in fresh:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let everything in the guest run again."""
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the guest."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def memory(self) -> bytes:
        """What is in the guest's memory."""
        return _packed(self.home, MEMORY_FOLDERS)

    def disk(self) -> bytes:
        """What is on the guest's disk."""
        return _packed(self.home, DISK_FOLDERS)

    def unpack(self, data: bytes) -> None:
        """Put memory or disk back."""
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(self.home, filter="fully_trusted")

    def _processes(self) -> list[int]:
        """Those of the guest's pid namespace, and never another process of this machine."""
        there = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
        return [pid for pid in there if _namespace(pid) == self._namespace]


def framed(data: bytes, size: int) -> bytes:
    """Bytes as they lie in memory or on a disk of `size` bytes."""
    if len(data) + LENGTH_BYTES > size:
        raise OSError(28, f"{len(data)} bytes do not fit into {size}")
    return (len(data).to_bytes(LENGTH_BYTES, "big") + data).ljust(size, b"\0")


def unframed(whole: bytes) -> bytes:
    """The bytes in memory or on a disk; none when nothing was written there."""
    length = int.from_bytes(whole[:LENGTH_BYTES], "big")
    return whole[LENGTH_BYTES : LENGTH_BYTES + length]


def _become_machine(home: Path) -> None:
    """The first process: its own mounts, its own /proc, and the guest's folders where a guest has them."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _call("unshare", CLONE_NEWNS)
    _call("mount", b"none", b"/", None, MS_REC_PRIVATE, None)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)
    sources = {target: os.open(home / name, os.O_PATH) for name, target in (MEMORY_FOLDERS | DISK_FOLDERS).items()}
    for target, source in sources.items():
        _call("mount", f"/proc/self/fd/{source}".encode(), target.encode(), None, MS_BIND, None)
        os.close(source)
    os.chdir("/")
    Path("/run/torpor").mkdir(exist_ok=True)
    os.setsid()
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    function: Callable[..., int] = getattr(libc, name)
    if function(*(ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments)) != 0:
        raise OSError(ctypes.get_errno(), name)


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in {"T", "t", "Z", "X"}
    except OSError:
        return True


def _packed(home: Path, folders: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in folders:
            archive.add(home / name, arcname=name, filter=_without_sockets)
    return out.getvalue()


def _without_sockets(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return entry if entry.isfile() or entry.isdir() or entry.issym() else None

"""One QEMU process: started with its sockets open, controlled by QMP, found again by another process of ours."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from qemu.qmp import QMPClient, QMPError

from torpor_vm_host.ports import DriverError

QMP_SOCKET: Final = "qmp.sock"
AGENT_SOCKET: Final = "agent.sock"
RECORD: Final = "machine.json"
ERRORS: Final = "qemu.log"
QMP_TIMEOUT_S: Final = 20.0
KILL_WAIT_S: Final = 5.0


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is written beside a machine so that it can be found: `started` (clock ticks) tells a pid from its reuse."""

    pid: int
    started: int


def start_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot (field 22 of /proc/PID/stat); None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])


class QemuProcess:
    """A running QEMU and the QMP session to it."""

    def __init__(self, pid: int, directory: Path, child: "subprocess.Popen[bytes] | None") -> None:
        self.pid = pid
        self.directory = directory
        self._child = child
        self._qmp = QMPClient("torpor")
        self._socket: socket.socket | None = None

    @classmethod
    async def spawn(
        cls, directory: Path, argv: Sequence[str], sockets: "Sockets", keep: Sequence[int]
    ) -> "QemuProcess":
        """Start QEMU with its listening sockets and the descriptors in `keep`; raises `DriverError("qemu-failed")`."""
        with (directory / ERRORS).open("wb") as errors:
            try:
                child = subprocess.Popen(  # noqa: ASYNC220, S603  (vfork: a few ms)
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    pass_fds=(*sockets.descriptors(), *keep),
                    start_new_session=True,
                )
            except OSError as error:
                raise DriverError("qemu-failed", f"QEMU could not be started: {error}", retryable=True) from error
        process = cls(child.pid, directory, child)
        started = start_ticks(child.pid)
        record = ProcessRecord(pid=child.pid, started=started or 0)
        (directory / RECORD).write_bytes(msgspec.json.encode(record))
        try:
            await process.connect()
        except DriverError:
            await process.kill()
            raise
        return process

    @classmethod
    def find(cls, directory: Path) -> "QemuProcess | None":
        """The QEMU an earlier process of ours started in this directory, if it is still the same one."""
        try:
            record = msgspec.json.decode((directory / RECORD).read_bytes(), type=ProcessRecord)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        if start_ticks(record.pid) != record.started:
            return None
        return cls(record.pid, directory, None)

    async def connect(self) -> None:
        """Open the QMP session."""
        try:
            async with asyncio.timeout(QMP_TIMEOUT_S):
                self._socket = connected(self.directory / QMP_SOCKET)
                await self._qmp.connect(self._socket)
        except (QMPError, OSError, TimeoutError) as error:
            raise DriverError("qemu-failed", self._last_words(str(error)), retryable=True) from error

    async def command(self, name: str, **arguments: Any) -> Any:
        """Run a QMP command; raises `DriverError("qemu-refused")`, or `vm-gone` when the process is no more."""
        try:
            async with asyncio.timeout(QMP_TIMEOUT_S):
                return await self._qmp.execute(name, {key.replace("_", "-"): value for key, value in arguments.items()})
        except (QMPError, OSError, TimeoutError) as error:
            code = "qemu-refused" if self.alive else "vm-gone"
            raise DriverError(code, self._last_words(f"{name}: {error}"), retryable=False) from error

    async def send_descriptor(self, name: str, descriptor: int) -> None:
        """Give QEMU an open file under a name, for a URI such as `fd:<name>`."""
        self._qmp.send_fd_scm(descriptor)
        await self.command("getfd", fdname=name)

    @property
    def alive(self) -> bool:
        """Whether the process exists and runs."""
        if self._child is not None:
            return self._child.poll() is None
        return QemuProcess.find(self.directory) is not None

    def abort(self) -> None:
        """Cut the QMP session without a word."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    async def disconnect(self) -> None:
        """Let go of the process; it goes on."""
        with contextlib.suppress(QMPError, OSError, TimeoutError):
            async with asyncio.timeout(QMP_TIMEOUT_S):
                await self._qmp.disconnect()

    async def kill(self) -> None:
        """End the process at once and wait until it is gone."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        await self.disconnect()
        deadline = asyncio.get_running_loop().time() + KILL_WAIT_S
        while self.alive:
            if asyncio.get_running_loop().time() > deadline:
                raise DriverError("qemu-unkillable", f"process {self.pid} does not end", retryable=True)
            await asyncio.sleep(0.002)

    def _last_words(self, otherwise: str) -> str:
        with contextlib.suppress(OSError):
            words = (self.directory / ERRORS).read_text(errors="replace").strip().splitlines()
            if words:
                return f"{otherwise}; QEMU said: {words[-1]}"
        return otherwise


class Sockets:
    """The listening sockets a QEMU is started with: they can be connected to before it has come up."""

    def __init__(self, directory: Path) -> None:
        self.qmp = listening_at(directory / QMP_SOCKET)
        self.agent = listening_at(directory / AGENT_SOCKET)

    def descriptors(self) -> tuple[int, int]:
        """QMP's and the agent's."""
        return self.qmp.fileno(), self.agent.fileno()

    def close(self) -> None:
        """QEMU has its own copies."""
        self.qmp.close()
        self.agent.close()


def listening_at(path: Path) -> socket.socket:
    """A Unix socket that listens at `path`."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(path) as name:
        listening.bind(name)
    listening.listen(4)
    return listening


def connected(path: Path) -> socket.socket:
    """A socket connected to the one that listens at `path`; raises `OSError` when nobody does."""
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as name:
            connecting.connect(name)
    except OSError:
        connecting.close()
        raise
    connecting.setblocking(False)
    return connecting


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """The path by its folder's descriptor: a Unix socket's own may not be longer than 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)

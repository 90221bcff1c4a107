"""One QEMU process: started confined and recorded, controlled by QMP, found again by another process of ours."""

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from torpor_vm_host.adapters.qemu.confining import LAUNCH_FAILED, PROCESS, read_claim
from torpor_vm_host.adapters.qemu.qmp import QmpRefused, QmpSession
from torpor_vm_host.adapters.qemu.wire import listening_at
from torpor_vm_host.ports import VM_GONE, DriverError

QMP_SOCKET: Final = "qmp.sock"
AGENT_SOCKET: Final = "agent.sock"
ERRORS: Final = "qemu.log"
QMP_S: Final = 20.0
KILL_S: Final = 5.0
FULL: Final = os.strerror(errno.ENOSPC)
"""How QEMU says that a disk is full, amid words of its own."""
START_TICKS: Final = 19
"""Where in /proc/PID/stat, behind the name, the start of the process is (field 22)."""


def start_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None when there is none that has not ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[START_TICKS])


class QemuProcess:
    """A QEMU that was started here, by this process or an earlier one of ours, and the QMP session to it."""

    def __init__(self, pid: int, directory: Path) -> None:
        self.pid = pid
        self.directory = directory
        self.ended = asyncio.Event()
        self.exit_status: int | None = None
        self.on_event: Callable[[str, dict[str, Any]], None] = lambda _, __: None
        self._qmp: QmpSession | None = None
        self._loop = asyncio.get_running_loop()
        self._watched: int | None = os.pidfd_open(pid)
        self._loop.add_reader(self._watched, self._has_ended)

    @classmethod
    async def spawn(
        cls, directory: Path, argv: list[str], sockets: "Sockets", inherited: Sequence[int]
    ) -> "QemuProcess":
        """Start QEMU by its launcher, which records it in the directory; raises `DriverError("qemu-failed")`.

        `sockets` are its own from then on: when it ends, nobody listens on them.
        """
        (directory / PROCESS).unlink(missing_ok=True)
        errors = os.open(directory / ERRORS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, errors, 1),
            (os.POSIX_SPAWN_DUP2, errors, 2),
            # Onto itself: the descriptor stays open in the child.
            *((os.POSIX_SPAWN_DUP2, one, one) for one in inherited),
        ]
        try:
            pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=actions, setsid=True)  # noqa: ASYNC221  (1 ms)
        except OSError as error:
            raise DriverError("qemu-failed", f"QEMU could not be started: {error}", retryable=True) from error
        finally:
            os.close(errors)
            sockets.close()
        process = cls(pid, directory)
        try:
            await process.connect()
        except BaseException:
            await process.kill()
            raise
        return process

    @classmethod
    def find(cls, directory: Path) -> "QemuProcess | None":
        """The QEMU that an earlier process of ours started in this directory, if it is there still."""
        pid = recorded_pid(directory)
        if pid is None:
            return None
        try:
            return cls(pid, directory)
        except ProcessLookupError:
            return None

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return not self.ended.is_set()

    @property
    def connected(self) -> bool:
        """Whether there is a QMP session."""
        return self._qmp is not None and self._qmp.is_open

    async def connect(self) -> None:
        """Open the QMP session; raises `DriverError`."""
        try:
            self._qmp = QmpSession(self.directory / QMP_SOCKET)
            self._qmp.on_event = self._tell
            async with asyncio.timeout(QMP_S):
                await self._qmp.greet()
        except (QmpRefused, OSError, TimeoutError) as error:
            self.disconnect()
            code = "qemu-failed" if self.alive else VM_GONE
            detail = await self._last_words(f"QEMU cannot be reached: {error}")
            raise DriverError(code, detail, retryable=True) from error

    def send(self, command: str, arguments: dict[str, Any] | None = None, *, descriptor: int | None = None) -> Any:
        """Give a command without waiting; what it answers is for `answer`. Raises `DriverError("vm-gone")`."""
        try:
            if self._qmp is None:
                raise ConnectionResetError("there is no QMP session")
            return self._qmp.send(command, arguments, descriptor=descriptor)
        except OSError as error:
            raise DriverError(VM_GONE, f"{command}: {error}", retryable=False) from error

    async def answer(self, sent: Any, what: str) -> Any:
        """What a command answered; raises `DriverError` `qemu-refused`, `qemu-silent`, or `vm-gone`."""
        try:
            async with asyncio.timeout(QMP_S):
                return await sent
        except QmpRefused as error:
            if FULL in str(error):
                raise DriverError("no-space", f"{what}: {error}", retryable=True) from error
            raise DriverError("qemu-refused", f"{what}: {error}", retryable=False) from error
        except ConnectionError as error:
            raise DriverError(VM_GONE, await self._last_words(f"{what}: {error}"), retryable=False) from error
        except TimeoutError as error:
            raise DriverError("qemu-silent", f"{what}: QEMU has not answered for {QMP_S} s", retryable=True) from error

    async def command(
        self, name: str, arguments: dict[str, Any] | None = None, *, descriptor: int | None = None
    ) -> Any:
        """Run a QMP command and wait for its answer."""
        return await self.answer(self.send(name, arguments, descriptor=descriptor), name)

    def disconnect(self) -> None:
        """Let go of the process; it goes on."""
        if self._qmp is not None:
            self._qmp.close()
            self._qmp = None

    def let_go(self) -> None:
        """Disconnect, and watch the process no more."""
        self.disconnect()
        watched, self._watched = self._watched, None
        if watched is not None:
            self._loop.remove_reader(watched)
            os.close(watched)

    async def kill(self) -> None:
        """End the process at once and wait until it is gone; idempotent."""
        if self._watched is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watched, signal.SIGKILL)
        try:
            async with asyncio.timeout(KILL_S):
                await self.ended.wait()
        except TimeoutError as error:
            raise DriverError("qemu-unkillable", f"process {self.pid} does not end", retryable=True) from error
        self.let_go()

    def how_it_ended(self) -> str:
        """In words, as far as is known."""
        words = self._errors()
        said = f"; QEMU said: {words}" if words else ""
        status = self.exit_status
        if status is None:
            return f"its process is gone{said}"
        if os.WIFSIGNALED(status):
            return f"its process was ended by signal {os.WTERMSIG(status)}{said}"
        code = os.WEXITSTATUS(status)
        return f"its process ended with {code}{f': {LAUNCH_FAILED[code]}' if code in LAUNCH_FAILED else said}"

    def _tell(self, event: str, data: dict[str, Any]) -> None:
        self.on_event(event, data)

    def _has_ended(self) -> None:
        # A child of this process is reaped here; one of an earlier process is somebody else's to reap.
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.exit_status = status if pid == self.pid else None
        if self._watched is not None:
            self._loop.remove_reader(self._watched)
        self.ended.set()

    async def _last_words(self, otherwise: str) -> str:
        """The connection mostly breaks a moment before the process has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self.ended.wait()
        return f"{otherwise}; {self.how_it_ended()}" if not self.alive else otherwise

    def _errors(self) -> str:
        with contextlib.suppress(OSError):
            words = (self.directory / ERRORS).read_text(errors="replace").strip().splitlines()
            if words:
                return words[-1][:300]
        return ""


class Sockets:
    """The sockets a QEMU is started with: they can be connected to before it has come up."""

    def __init__(self, directory: Path) -> None:
        self._qmp = listening_at(directory / QMP_SOCKET)
        self._agent = listening_at(directory / AGENT_SOCKET)
        self.qmp = self._qmp.fileno()
        self.agent = self._agent.fileno()

    def close(self) -> None:
        """Let go of them; idempotent."""
        self._qmp.close()
        self._agent.close()


def recorded_pid(directory: Path) -> int | None:
    """The process recorded in this directory, if it is the same one still and has not ended."""
    if read_claim(directory) is None:
        return None
    try:
        pid, _, rest = (directory / PROCESS).read_text().partition(" ")
        began = int(rest.rpartition(")")[2].split()[START_TICKS])
        return int(pid) if start_ticks(int(pid)) == began else None
    except (FileNotFoundError, ValueError, IndexError):
        return None

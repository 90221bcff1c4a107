"""The processes of a machine: recorded on disk by pid and start, found again, watched, ended."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from torpor_vm_host.adapters.firecracker.jail import API_SOCKET, Jail
from torpor_vm_host.adapters.qemu.process import start_ticks
from torpor_vm_host.adapters.qemu.wire import connected
from torpor_vm_host.ports import DriverError

RECORD: Final = "machine.json"
OUTPUT: Final = "firecracker.out"
JAILER_S_MAX: Final = 10.0
SOCKET_S_MAX: Final = 10.0
SOCKET_POLL_S: Final = 0.002
KILL_WAIT_S: Final = 5.0


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is written beside a machine so that its process can be found."""

    pid: int
    started: int


class Recorded:
    """A process that outlives us: `started` (clock ticks since boot) tells its pid from the pid's reuse."""

    def __init__(self, pid: int, started: int) -> None:
        self.pid = pid
        self.started = started
        self._watching: tuple[int, asyncio.AbstractEventLoop] | None = None

    @classmethod
    def note(cls, pid: int, record: Path) -> "Recorded":
        """Write down a process that has just been started; one that has ended already is noted as such."""
        started = start_ticks(pid) or 0
        record.write_bytes(msgspec.json.encode(ProcessRecord(pid=pid, started=started)))
        return cls(pid, started)

    @classmethod
    def find(cls, record: Path) -> "Recorded | None":
        """The process that was written down, if it still is the same one and has not ended."""
        try:
            noted = msgspec.json.decode(record.read_bytes(), type=ProcessRecord)
        except (OSError, msgspec.DecodeError):
            return None
        found = cls(noted.pid, noted.started)
        return found if found.alive else None

    @property
    def alive(self) -> bool:
        """Whether the process exists and has not ended."""
        return self.started != 0 and start_ticks(self.pid) == self.started

    def watch(self, ended: Callable[[], None]) -> None:
        """Call `ended` once, in this event loop, when the process has ended (also when it has already)."""
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            loop.call_soon(ended)
            return
        self._watching = descriptor, loop

        def tell() -> None:
            self.unwatch()
            ended()

        loop.add_reader(descriptor, tell)
        if not self.alive:  # another process has its pid by now, or it is a zombie that nobody reads
            loop.call_soon(lambda: tell() if self._watching else None)

    def unwatch(self) -> None:
        """Watch no more; idempotent."""
        if self._watching is not None:
            descriptor, loop = self._watching
            self._watching = None
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def signal(self, number: int) -> None:
        """Send a signal; one to a process that has ended is fine."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def kill(self) -> None:
        """End the process at once and wait until it is gone."""
        self.unwatch()
        self.signal(signal.SIGKILL)
        deadline = asyncio.get_running_loop().time() + KILL_WAIT_S
        while self.alive:
            if asyncio.get_running_loop().time() > deadline:
                raise DriverError("firecracker-unkillable", f"process {self.pid} does not end", retryable=True)
            await asyncio.sleep(SOCKET_POLL_S)


async def spawn(directory: Path, jail: Jail, command: Sequence[str]) -> Recorded:
    """Jail a new Firecracker and wait until its API can be reached; raises `DriverError("jailer-failed")`."""
    process = await asyncio.to_thread(_start, directory, jail, command)
    try:
        await _listening(process, jail.root / API_SOCKET, directory / OUTPUT)
    except BaseException:
        await process.kill()
        raise
    return process


def _start(directory: Path, jail: Jail, command: Sequence[str]) -> Recorded:
    """Start and write down in one go: who waits for this may give up between the two."""
    # The jailer ends when it has cloned Firecracker into a new pid namespace and written down its pid.
    code = _run(command, directory / OUTPUT)
    try:
        return Recorded.note(int(jail.pid_file.read_text()), directory / RECORD)
    except (OSError, ValueError) as error:
        detail = f"the jailer ended with {code}: {last_words(directory / OUTPUT)}"
        raise DriverError("jailer-failed", detail, retryable=True) from error


def last_words(output: Path) -> str:
    """The last line that a process wrote to its output file."""
    with contextlib.suppress(OSError):
        lines = output.read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return "it said nothing"


def _run(command: Sequence[str], output: Path) -> int:
    with output.open("wb") as file:
        try:
            done = subprocess.run(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                timeout=JAILER_S_MAX,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DriverError("jailer-failed", f"the jailer could not do its work: {error}", retryable=True) from error
    return done.returncode


async def _listening(process: Recorded, socket: Path, output: Path) -> None:
    deadline = asyncio.get_running_loop().time() + SOCKET_S_MAX
    while True:
        with contextlib.suppress(OSError):
            connected(socket).close()
            return
        if not process.alive:
            raise DriverError("firecracker-failed", f"Firecracker ended: {last_words(output)}", retryable=True)
        if asyncio.get_running_loop().time() > deadline:
            raise DriverError("firecracker-silent", f"Firecracker did not open {socket}", retryable=True)
        await asyncio.sleep(SOCKET_POLL_S)

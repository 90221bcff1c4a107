"""A driver whose every call ends: what takes too long is given up with a typed error."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from torpor_contracts.guest import DirectoryListed, FileEntry, WriteFile
from torpor_contracts.host import HostCapacity
from torpor_contracts.ids import ExecId, VmId
from torpor_contracts.session import ExecSpec, TerminalSize
from torpor_contracts.vm import ResourceRef
from torpor_vm_host.guest_ports import FilePiece, OnWatchEvent
from torpor_vm_host.ports import (
    Base,
    CheckpointFiles,
    Driver,
    DriverError,
    ExecOutcome,
    LiveCheckpoint,
    OnOutput,
    OnPause,
    PartFile,
    PresentExec,
    PresentVm,
    VmSpec,
)

TIMED_OUT = "driver-timed-out"


class DriverLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a driver may take, seconds: for a look, to end a machine, to start or checkpoint one, for a file.

    `exec_grace_s`: how long after a program's own time-out its end is waited for.
    """

    look_s: float = 10.0
    destroy_s: float = 20.0
    start_s: float = 120.0
    checkpoint_s: float = 120.0
    file_s: float = 60.0
    exec_grace_s: float = 30.0


class BoundedDriver:
    """See `torpor_vm_host.ports.Driver`; raises `DriverError("driver-timed-out")` in addition."""

    def __init__(self, driver: Driver, limits: DriverLimits) -> None:
        self._driver = driver
        self._limits = limits
        self.name = driver.name

    async def fingerprint(self) -> str:
        """See `Driver.fingerprint`."""
        async with _within(self._limits.look_s, "fingerprint"):
            return await self._driver.fingerprint()

    async def capacity(self) -> HostCapacity:
        """See `Driver.capacity`."""
        async with _within(self._limits.look_s, "capacity"):
            return await self._driver.capacity()

    def resources(self, spec: VmSpec) -> list[ResourceRef]:
        """See `Driver.resources`."""
        return self._driver.resources(spec)

    async def remaining(self, resources: Sequence[ResourceRef]) -> list[ResourceRef]:
        """See `Driver.remaining`."""
        async with _within(self._limits.look_s, "remaining"):
            return await self._driver.remaining(resources)

    async def start(self, spec: VmSpec, checkpoint: CheckpointFiles | None) -> None:
        """See `Driver.start`."""
        async with _within(self._limits.start_s, "start"):
            await self._driver.start(spec, checkpoint)

    async def bases(self) -> list[Base]:
        """See `Driver.bases`."""
        async with _within(self._limits.look_s, "bases"):
            return await self._driver.bases()

    async def base_of(self, vm_id: VmId) -> Base | None:
        """See `Driver.base_of`."""
        async with _within(self._limits.start_s, "base_of"):
            return await self._driver.base_of(vm_id)

    async def lacking(self, checkpoint: CheckpointFiles) -> str | None:
        """See `Driver.lacking`."""
        async with _within(self._limits.look_s, "lacking"):
            return await self._driver.lacking(checkpoint)

    async def receive(self, name: str, directory: Path) -> None:
        """See `Driver.receive`."""
        async with _within(self._limits.start_s, "receive"):
            await self._driver.receive(name, directory)

    async def adopt(self, vm_id: VmId) -> None:
        """See `Driver.adopt`."""
        async with _within(self._limits.look_s, "adopt"):
            await self._driver.adopt(vm_id)

    async def machines(self) -> list[PresentVm]:
        """See `Driver.machines`."""
        async with _within(self._limits.look_s, "machines"):
            return await self._driver.machines()

    async def freeze(self, vm_id: VmId) -> None:
        """See `Driver.freeze`."""
        async with _within(self._limits.look_s, "freeze"):
            await self._driver.freeze(vm_id)

    async def checkpoint(self, vm_id: VmId, directory: Path) -> list[PartFile]:
        """See `Driver.checkpoint`."""
        async with _within(self._limits.checkpoint_s, "checkpoint"):
            return await self._driver.checkpoint(vm_id, directory)

    async def checkpoint_live(self, vm_id: VmId, directory: Path, at_pause: OnPause) -> LiveCheckpoint:
        """See `Driver.checkpoint_live`."""
        async with _within(self._limits.checkpoint_s, "checkpoint_live"):
            return await self._driver.checkpoint_live(vm_id, directory, at_pause)

    async def resume(self, vm_id: VmId) -> None:
        """See `Driver.resume`."""
        async with _within(self._limits.look_s, "resume"):
            await self._driver.resume(vm_id)

    async def destroy(self, vm_id: VmId) -> None:
        """See `Driver.destroy`."""
        async with _within(self._limits.destroy_s, "destroy"):
            await self._driver.destroy(vm_id)

    async def exec(self, vm_id: VmId, exec_id: ExecId, program: ExecSpec, on_output: OnOutput) -> ExecOutcome:
        """See `Driver.exec`."""
        async with _within(program.timeout_s + self._limits.exec_grace_s, "exec"):
            return await self._driver.exec(vm_id, exec_id, program, on_output)

    async def attach(self, vm_id: VmId, exec_id: ExecId, on_output: OnOutput) -> ExecOutcome:
        """See `Driver.attach`."""
        known = [one for one in await self.execs(vm_id) if one.exec_id == exec_id]
        remaining_s = known[0].remaining_s if known else 0.0
        async with _within(remaining_s + self._limits.exec_grace_s, "attach"):
            return await self._driver.attach(vm_id, exec_id, on_output)

    async def execs(self, vm_id: VmId) -> list[PresentExec]:
        """See `Driver.execs`."""
        async with _within(self._limits.look_s, "execs"):
            return await self._driver.execs(vm_id)

    async def kill(self, vm_id: VmId, exec_id: ExecId, signal: int) -> None:
        """See `Driver.kill`."""
        async with _within(self._limits.look_s, "kill"):
            await self._driver.kill(vm_id, exec_id, signal)

    async def forget(self, vm_id: VmId, exec_id: ExecId) -> None:
        """See `Driver.forget`."""
        async with _within(self._limits.look_s, "forget"):
            await self._driver.forget(vm_id, exec_id)

    async def read_file(self, vm_id: VmId, path: bytes, offset: int, length: int) -> FilePiece:
        """See `Guest.read_file`."""
        async with _within(self._limits.file_s, "read_file"):
            return await self._driver.read_file(vm_id, path, offset, length)

    async def write_file(self, vm_id: VmId, piece: WriteFile, data: bytes) -> int:
        """See `Guest.write_file`."""
        async with _within(self._limits.file_s, "write_file"):
            return await self._driver.write_file(vm_id, piece, data)

    async def stat_file(self, vm_id: VmId, path: bytes) -> FileEntry:
        """See `Guest.stat_file`."""
        async with _within(self._limits.file_s, "stat_file"):
            return await self._driver.stat_file(vm_id, path)

    async def list_directory(self, vm_id: VmId, path: bytes, after: bytes, limit: int) -> DirectoryListed:
        """See `Guest.list_directory`."""
        async with _within(self._limits.file_s, "list_directory"):
            return await self._driver.list_directory(vm_id, path, after, limit)

    async def make_directory(self, vm_id: VmId, path: bytes, mode: int, user: str | None) -> None:
        """See `Guest.make_directory`."""
        async with _within(self._limits.file_s, "make_directory"):
            await self._driver.make_directory(vm_id, path, mode, user)

    async def move_file(self, vm_id: VmId, path: bytes, to: bytes) -> None:
        """See `Guest.move_file`."""
        async with _within(self._limits.file_s, "move_file"):
            await self._driver.move_file(vm_id, path, to)

    async def remove_file(self, vm_id: VmId, path: bytes, *, recursive: bool) -> None:
        """See `Guest.remove_file`."""
        async with _within(self._limits.file_s, "remove_file"):
            await self._driver.remove_file(vm_id, path, recursive=recursive)

    async def watch_directory(self, vm_id: VmId, path: bytes, on_event: OnWatchEvent) -> None:
        """See `Guest.watch_directory`; bounded by who watches."""
        await self._driver.watch_directory(vm_id, path, on_event)

    async def feed(self, vm_id: VmId, exec_id: ExecId, data: bytes, offset: int, *, ends: bool) -> int:
        """See `Guest.feed`."""
        async with _within(self._limits.file_s, "feed"):
            return await self._driver.feed(vm_id, exec_id, data, offset, ends=ends)

    async def resize(self, vm_id: VmId, exec_id: ExecId, size: TerminalSize) -> None:
        """See `Guest.resize`."""
        async with _within(self._limits.file_s, "resize"):
            await self._driver.resize(vm_id, exec_id, size)

    async def close(self) -> None:
        """See `Driver.close`."""
        async with _within(self._limits.destroy_s, "close"):
            await self._driver.close()


@asynccontextmanager
async def _within(seconds: float, call: str) -> AsyncIterator[None]:
    bound = asyncio.timeout(seconds)
    try:
        async with bound:
            yield
    except TimeoutError as error:
        if not bound.expired():
            raise
        raise DriverError(TIMED_OUT, f"{call} has not ended within {seconds:g} s", retryable=True) from error

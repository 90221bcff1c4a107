"""Where simulated machines are kept while they live: what is there exists, what is not there does not."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from torpor_chunks.offload import Offload, in_thread
from torpor_chunks.os_errors import typed
from torpor_contracts.ids import VmId
from torpor_vm_host.adapters.simulated.machine import Machine

SUFFIX: Final = ".json"


class MachineGone(Exception):  # noqa: N818  (what is so, not an error of a caller)
    """There is no such machine (any more)."""


class MachineUnreadable(Exception):  # noqa: N818
    """What is kept of the machine is no machine."""


class Machines(Protocol):
    """Machines by id. What is saved outlives the process that saved it; raises `ChunkError` for a full disk, say."""

    async def create(self, machine: Machine) -> None:
        """Keep a new machine."""
        ...

    async def save(self, machine: Machine) -> None:
        """Keep the machine's present state; raises `MachineGone` rather than bring back what was deleted."""
        ...

    async def load(self, vm_id: VmId) -> Machine:
        """The machine as last saved; raises `MachineGone` or `MachineUnreadable`."""
        ...

    async def delete(self, vm_id: VmId) -> None:
        """The machine is no more; idempotent."""
        ...

    async def exists(self, vm_id: VmId) -> bool:
        """Whether there is such a machine."""
        ...

    async def ids(self) -> set[VmId]:
        """All machines that exist."""
        ...


class MemoryMachines:
    """Machines of a simulated world: they outlive the vm-host that drives them, as real ones do."""

    def __init__(self) -> None:
        self.kept: dict[VmId, bytes] = {}

    async def create(self, machine: Machine) -> None:
        """See `Machines.create`."""
        self.kept[machine.vm_id] = msgspec.json.encode(machine)

    async def save(self, machine: Machine) -> None:
        """See `Machines.save`."""
        if machine.vm_id not in self.kept:
            raise MachineGone(machine.vm_id)
        self.kept[machine.vm_id] = msgspec.json.encode(machine)

    async def load(self, vm_id: VmId) -> Machine:
        """See `Machines.load`."""
        if vm_id not in self.kept:
            raise MachineGone(vm_id)
        return _decoded(vm_id, self.kept[vm_id])

    async def delete(self, vm_id: VmId) -> None:
        """See `Machines.delete`."""
        self.kept.pop(vm_id, None)

    async def exists(self, vm_id: VmId) -> bool:
        """See `Machines.exists`."""
        return vm_id in self.kept

    async def ids(self) -> set[VmId]:
        """See `Machines.ids`."""
        return set(self.kept)


class DirectoryMachines:
    """One file for each machine in a directory: the file is the machine, and removing it ends the machine."""

    def __init__(self, root: Path, *, offload: Offload = in_thread) -> None:
        self._root = root
        self._offload = offload

    async def create(self, machine: Machine) -> None:
        """See `Machines.create`."""
        await self._write(machine, lambda: self._root.mkdir(parents=True, exist_ok=True))

    async def save(self, machine: Machine) -> None:
        """See `Machines.save`."""

        def check() -> None:
            if not self._path(machine.vm_id).exists():
                raise MachineGone(machine.vm_id)

        await self._write(machine, check)

    async def load(self, vm_id: VmId) -> Machine:
        """See `Machines.load`."""

        def read() -> bytes:
            with typed(self._root):
                try:
                    return self._path(vm_id).read_bytes()
                except FileNotFoundError:
                    raise MachineGone(vm_id) from None

        return _decoded(vm_id, await self._offload(read))

    async def delete(self, vm_id: VmId) -> None:
        """See `Machines.delete`."""

        def unlink() -> None:
            with typed(self._root):
                self._path(vm_id).unlink(missing_ok=True)
                if self._root.exists():
                    _sync(self._root)

        await self._offload(unlink)

    async def exists(self, vm_id: VmId) -> bool:
        """See `Machines.exists`."""
        return await self._offload(self._path(vm_id).exists)

    async def ids(self) -> set[VmId]:
        """See `Machines.ids`."""

        def names() -> set[VmId]:
            with typed(self._root):
                if not self._root.exists():
                    return set()
                return {VmId(path.stem) for path in self._root.iterdir() if path.suffix == SUFFIX}

        return await self._offload(names)

    def _path(self, vm_id: VmId) -> Path:
        return self._root / f"{vm_id}{SUFFIX}"

    async def _write(self, machine: Machine, first: Callable[[], None]) -> None:
        content = msgspec.json.encode(machine)
        path = self._path(machine.vm_id)
        aside = path.with_suffix(".new")

        def write() -> None:
            with typed(path):
                first()
                try:
                    with aside.open("wb") as file:
                        file.write(content)
                        file.flush()
                        os.fsync(file.fileno())
                    aside.replace(path)
                except OSError:
                    aside.unlink(missing_ok=True)
                    raise
                _sync(self._root)

        await self._offload(write)


def _sync(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _decoded(vm_id: VmId, content: bytes) -> Machine:
    try:
        return msgspec.json.decode(content, type=Machine)
    except msgspec.MsgspecError as error:
        raise MachineUnreadable(f"{vm_id}: {error}") from error

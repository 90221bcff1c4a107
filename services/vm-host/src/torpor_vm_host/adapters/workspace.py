"""The machines' directories on this host's disk: `vms/<vm id>` below the vm-host's data directory."""

import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from torpor_chunks.offload import Offload, in_thread
from torpor_chunks.os_errors import typed
from torpor_contracts.checkpoint import CheckpointManifest
from torpor_contracts.errors import Rejected
from torpor_contracts.ids import CheckpointId, VmId
from torpor_contracts.vm import ResourceRef
from torpor_vm_host.ports import TakenCheckpoint

_VMS: Final = "vms"

Note = TypeVar("Note", CheckpointManifest, TakenCheckpoint)


class DirectoryWorkspace:
    """See `torpor_vm_host.ports.Workspace`. Names of resources are relative to `root`, so a moved root keeps them."""

    def __init__(self, root: Path, *, offload: Offload = in_thread) -> None:
        self._root = root
        self._offload = offload
        self._lock: int | None = None

    def resource(self, vm_id: VmId) -> ResourceRef:
        """See `Workspace.resource`."""
        return ResourceRef(kind="directory", name=f"{_VMS}/{vm_id}")

    def path(self, vm_id: VmId) -> Path:
        """See `Workspace.path`."""
        return self._root / _VMS / vm_id

    async def lock(self) -> None:
        """See `Workspace.lock`: a file lock, which the system takes back from a process that dies."""
        if self._lock is None:
            self._lock = await self._offload(self._acquire)

    async def unlock(self) -> None:
        """See `Workspace.unlock`."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def create(self, vm_id: VmId) -> Path:
        """See `Workspace.create`."""
        return await self._offload(lambda: _emptied(self.path(vm_id)))

    async def subdirectory(self, vm_id: VmId, name: str) -> Path:
        """See `Workspace.subdirectory`."""
        return await self._offload(lambda: _emptied(self.path(vm_id) / name))

    async def remove(self, vm_id: VmId) -> None:
        """See `Workspace.remove`."""
        await self._offload(lambda: _removed(self.path(vm_id)))

    async def remove_subdirectory(self, vm_id: VmId, name: str) -> None:
        """See `Workspace.remove_subdirectory`."""
        await self._offload(lambda: _removed(self.path(vm_id) / name))

    async def remaining(self, resources: Sequence[ResourceRef]) -> list[ResourceRef]:
        """See `Workspace.remaining`."""

        def look() -> list[ResourceRef]:
            with typed(self._root):
                return [
                    one
                    for one in resources
                    if one.kind == "directory" and one.name.startswith(f"{_VMS}/") and (self._root / one.name).exists()
                ]

        return await self._offload(look)

    async def forget_manifest(self, vm_id: VmId, checkpoint_id: CheckpointId) -> None:
        """See `Workspace.forget_manifest`."""
        path = self._manifest(vm_id, checkpoint_id)

        def unlink() -> None:
            with typed(path):
                path.unlink(missing_ok=True)

        await self._offload(unlink)

    async def write_manifest(self, vm_id: VmId, checkpoint_id: CheckpointId, manifest: CheckpointManifest) -> None:
        """See `Workspace.write_manifest`."""
        await self._offload(lambda: _note(self._manifest(vm_id, checkpoint_id), manifest))

    async def read_manifest(self, vm_id: VmId, checkpoint_id: CheckpointId) -> CheckpointManifest | None:
        """See `Workspace.read_manifest`. One that cannot be read was never noted: the checkpoint is made again."""
        return await self._offload(lambda: _noted(self._manifest(vm_id, checkpoint_id), CheckpointManifest))

    async def write_taken(self, vm_id: VmId, checkpoint_id: CheckpointId, taken: TakenCheckpoint) -> None:
        """See `Workspace.write_taken`."""
        await self._offload(lambda: _note(self._manifest(vm_id, checkpoint_id), taken))

    async def read_taken(self, vm_id: VmId, checkpoint_id: CheckpointId) -> TakenCheckpoint | None:
        """See `Workspace.read_taken`."""
        return await self._offload(lambda: _noted(self._manifest(vm_id, checkpoint_id), TakenCheckpoint))

    def _manifest(self, vm_id: VmId, checkpoint_id: CheckpointId) -> Path:
        return self.path(vm_id) / f"{checkpoint_id}.json"

    def _acquire(self) -> int:
        with typed(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            number = os.open(self._root / "vm-host.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(number)
            raise Rejected(
                "host-busy",
                f"another vm-host works in {self._root}",
                "stop it first, or give this one a data directory of its own",
            ) from None
        return number


def _note(path: Path, note: msgspec.Struct) -> None:
    aside = path.with_suffix(".new")
    with typed(path):
        with aside.open("wb") as file:
            file.write(msgspec.json.encode(note))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _noted(path: Path, kind: type[Note]) -> Note | None:
    with typed(path):
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None


def _emptied(path: Path) -> Path:
    _removed(path)
    with typed(path):
        path.mkdir(parents=True)
    return path


def _removed(path: Path) -> None:
    with typed(path):
        if path.exists():
            shutil.rmtree(path)

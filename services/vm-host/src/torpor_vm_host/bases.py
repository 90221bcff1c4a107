"""What checkpoints build on, such as templates: kept in the chunk store once, and had from it where it is lacking.

It holds no tenant's data, so it is the operator's. Nobody's checkpoint is registered before what it builds on is kept,
where a host was told so: else the store would hold what no other host can load.
"""

import asyncio
from typing import Final, Literal

from torpor_chunks.port import (
    BASE_PIECE_BYTES,
    ChunkError,
    ChunkStore,
    PackAddress,
    PartCorrupt,
    PartSource,
    WantedPart,
)
from torpor_contracts.errors import Transient
from torpor_contracts.ids import SYSTEM_TENANT, VmId
from torpor_vm_host.ports import Base, CheckpointFiles, Driver, DriverError, Workspace

Keeping = Literal["always", "background", "never"]
"""`always`: from the start, and before any checkpoint. `background`: later, and nothing waits. `never`: not at all."""

ARRIVING: Final = "template"
"""The subdirectory of a machine into which what its checkpoint builds on is written."""

DIGITS: Final = 16


class Bases:
    """Those of one host; each is put once by a process, and received once however many machines wait for it."""

    def __init__(self, driver: Driver, chunks: ChunkStore, workspace: Workspace, *, keeping: Keeping) -> None:
        self._driver = driver
        self._chunks = chunks
        self._workspace = workspace
        self._keeping = keeping
        self._kept: dict[str, PackAddress] = {}
        self._busy: dict[str, asyncio.Lock] = {}

    async def keep_all(self) -> None:
        """Keep all that this host's checkpoints will build on; raises `Transient` when that cannot be done now."""
        try:
            for base in await self._driver.bases():
                await self._keep(base)
        except (ChunkError, DriverError) as error:
            raise Transient(f"templates are not in the chunk store yet: {error}") from error

    async def promise(self, vm_id: VmId) -> None:
        """Return when what the machine's checkpoints build on is kept, if that must be.

        Raises `ChunkError` and `DriverError`.
        """
        if self._keeping == "always":
            base = await self._driver.base_of(vm_id)
            if base is not None:
                await self._keep(base)

    async def have(self, vm_id: VmId, checkpoint: CheckpointFiles) -> None:
        """Make sure that this host has what the machine's checkpoint builds on.

        Raises `ChunkError`, and `DriverError` such as `template-missing` when the store does not have it either.
        """
        name = await self._driver.lacking(checkpoint)
        if name is None:
            return
        async with self._busy.setdefault(name, asyncio.Lock()):
            if await self._driver.lacking(checkpoint) is not None:
                await self._receive(vm_id, name)

    async def _keep(self, base: Base) -> None:
        async with self._busy.setdefault(base.name, asyncio.Lock()):
            if base.name in self._kept:
                return
            label = label_of(base.name)
            address = await self._chunks.label(SYSTEM_TENANT, label)
            if address is None:
                # Templates of one image have its files in common. Only what is labelled may be built on: it stays.
                before = next(reversed(self._kept.values()), None)
                parts = [
                    PartSource(name=name, path=path, piece_bytes=BASE_PIECE_BYTES) for name, path in base.files.items()
                ]
                stored = await self._chunks.put(SYSTEM_TENANT, parts, onto=before)
                address = await self._chunks.set_label(SYSTEM_TENANT, label, stored.address)
            self._kept[base.name] = address

    async def _receive(self, vm_id: VmId, name: str) -> None:
        address = await self._chunks.label(SYSTEM_TENANT, label_of(name))
        if address is None:
            raise DriverError(
                "template-missing",
                f"it builds on the template {name[:DIGITS]}, which is neither on this host nor in the chunk store; "
                "resume it on the host that made it, which keeps its templates in the store when "
                "TORPOR_VM_HOST_KEEP_TEMPLATES is `always`",
                retryable=False,
            )
        stored = (await self._chunks.inspect(SYSTEM_TENANT, address)).stored
        directory = await self._workspace.subdirectory(vm_id, ARRIVING)
        try:
            wanted = []
            for part in stored.parts:
                if "/" in part.name or part.name.startswith("."):
                    raise PartCorrupt(f"{address} has a part {part.name!r}, which no template has")
                into = directory / part.name
                wanted.append(WantedPart(name=part.name, digest=part.digest, size_bytes=part.size_bytes, into=into))
            await self._chunks.fetch(SYSTEM_TENANT, address, wanted)
            await self._driver.receive(name, directory)
        finally:
            await self._workspace.remove_subdirectory(vm_id, ARRIVING)


def label_of(name: str) -> str:
    """The label of a base in the chunk store."""
    return f"template-{name}"

"""The Firecracker driver: starts, checkpoints, restores, adopts and ends jailed microVMs; see `ports.Driver`."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec

from torpor_contracts.host import HostCapacity
from torpor_contracts.ids import ExecId, VmId
from torpor_contracts.session import ExecSpec, MachineSpec
from torpor_contracts.vm import ResourceRef
from torpor_vm_host.adapters.firecracker import deltas, paging
from torpor_vm_host.adapters.firecracker import jail as names
from torpor_vm_host.adapters.firecracker.configuring import load
from torpor_vm_host.adapters.firecracker.copying import copy
from torpor_vm_host.adapters.firecracker.jail import Jail
from torpor_vm_host.adapters.firecracker.machine import (
    PAGES,
    READY,
    SPEC,
    UNSURE,
    KeptSpec,
    Machine,
    gone,
    keep,
    read_kept,
)
from torpor_vm_host.adapters.firecracker.parts import Parts, base_digest
from torpor_vm_host.adapters.firecracker.presence import ASK_S_MAX, present, stalled
from torpor_vm_host.adapters.firecracker.process import RECORD, Recorded, last_words, spawn
from torpor_vm_host.adapters.firecracker.requests import MemoryBackend
from torpor_vm_host.adapters.firecracker.template import Template, Workshop, base
from torpor_vm_host.adapters.firecracker.templates import Templates
from torpor_vm_host.adapters.guest_programs import GuestPrograms
from torpor_vm_host.adapters.qemu.following import Followers
from torpor_vm_host.adapters.qemu.guest import GuestChannel, Identity
from torpor_vm_host.images.builder import ImageLibrary
from torpor_vm_host.ports import (
    EXEC_UNKNOWN,
    VM_GONE,
    Base,
    CheckpointFiles,
    DriverError,
    ExecOutcome,
    LiveCheckpoint,
    OnOutput,
    OnPause,
    PartFile,
    PresentVm,
    VmSpec,
)

CUTS_MAX: Final = 1000
"""How many checkpoints of a machine that goes on a program is followed across."""
CGROUP_TRIES: Final = 50
CGROUP_PAUSE_S: Final = 0.01

Paging = Literal["file", "faults"]
"""How a checkpoint's memory reaches a machine: as a file made for it, or page by page from a handler's process."""


class FirecrackerDriver(GuestPrograms):
    """Runs machines below `root`, one directory each, from images and the workshop's templates. Needs root's rights."""

    name = "firecracker"

    def __init__(
        self, workshop: Workshop, images: ImageLibrary, root: Path, new_epoch: Callable[[], str], paging: Paging
    ) -> None:
        self._workshop = workshop
        self._root = root
        self._new_epoch = new_epoch
        self._paging = paging
        self._machines: dict[VmId, Machine] = {}
        self._templates = Templates(workshop, images)

    # --- what the host can do ---

    async def fingerprint(self) -> str:
        """See `ports.Driver`."""
        return self._workshop.engine.fingerprint

    async def capacity(self) -> HostCapacity:
        """Eight virtual processors for each real one (agents mostly wait), and nine tenths of what is free now."""
        memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
        disk = shutil.disk_usage(self._root).free // 2**20
        processors = os.cpu_count() or 1
        return HostCapacity(vcpus=processors * 8, memory_mib=memory * 9 // 10, disk_mib=disk * 9 // 10, vms_max=1000)

    async def prepare(self, machine: MachineSpec) -> Template:
        """The image and template for such machines, made if they are not there."""
        return await self._templates.ready(machine)

    # --- life ---

    def resources(self, spec: VmSpec) -> list[ResourceRef]:
        """See `ports.Driver`."""
        return [
            ResourceRef(kind="process", name=f"firecracker:{spec.vm_id}"),
            ResourceRef(kind="process", name=f"firecracker-faults:{spec.vm_id}"),
            ResourceRef(kind="cgroup", name=f"firecracker:{spec.vm_id}"),
        ]

    async def remaining(self, resources: Sequence[ResourceRef]) -> list[ResourceRef]:
        """See `ports.Driver`."""
        return [ref for ref in resources if self._remains(ref)]

    async def start(self, spec: VmSpec, checkpoint: CheckpointFiles | None) -> None:
        """See `ports.Driver`."""
        if Recorded.find(self._root / spec.vm_id / RECORD) is not None:
            raise DriverError("vm-exists", f"{spec.vm_id} runs already", retryable=False)
        template, parts = await self._templates.origin(spec.machine, checkpoint)
        kept = self._kept(spec, template)
        jail = self._jail(spec.vm_id)
        try:
            memory = await asyncio.to_thread(self._lay_out, jail, kept, template, parts)
            machine = await self._spawn(jail, kept, template, memory)
        except OSError as error:
            raise DriverError("start-failed", str(error), retryable=True) from error
        try:
            await load(machine.api, self._workshop.engine, memory, self._workshop.limits)
            await machine.api.resume()
            await machine.talk()
            await asyncio.to_thread(_settle, jail)
        except BaseException as error:
            await machine.end()
            (jail.directory / RECORD).unlink(missing_ok=True)
            if isinstance(error, DriverError):
                detail = f"{error.detail}; {last_words(jail.root / names.LOG)}"
                raise DriverError(error.code, detail, retryable=error.retryable) from error
            raise
        self._machines[spec.vm_id] = machine

    async def bases(self) -> list[Base]:
        """See `ports.Driver`: the templates."""
        return [base(template) for template in self._templates.ready_ones()]

    async def base_of(self, vm_id: VmId) -> Base | None:
        """See `ports.Driver`: the machine's template."""
        return base((await self._get(vm_id)).template)

    async def lacking(self, checkpoint: CheckpointFiles) -> str | None:
        """See `ports.Driver`."""
        digest = await asyncio.to_thread(base_digest, checkpoint)
        return None if digest is None or await self._templates.has(digest) else digest

    async def receive(self, name: str, directory: Path) -> None:
        """See `ports.Driver`."""
        await self._templates.receive(name, directory)

    async def adopt(self, vm_id: VmId) -> None:
        """See `ports.Driver`."""
        await (await self._get(vm_id)).talk()

    async def machines(self) -> list[PresentVm]:
        """See `ports.Driver`."""
        directories = await asyncio.to_thread(lambda: [path.parent for path in sorted(self._root.glob(f"*/{RECORD}"))])
        jails = [self._jail(VmId(directory.name)) for directory in directories]
        return list(await asyncio.gather(*(present(jail) for jail in jails)))

    async def freeze(self, vm_id: VmId) -> None:
        """See `ports.Driver`."""
        await (await self._get(vm_id)).pause()

    async def checkpoint(self, vm_id: VmId, directory: Path) -> list[PartFile]:
        """See `ports.Driver`."""
        return await (await self._get(vm_id)).checkpoint(directory)

    async def checkpoint_live(self, vm_id: VmId, directory: Path, at_pause: OnPause) -> LiveCheckpoint:
        """See `ports.Driver`."""
        return await (await self._get(vm_id)).checkpoint_live(directory, at_pause)

    async def resume(self, vm_id: VmId) -> None:
        """See `ports.Driver`."""
        await (await self._get(vm_id)).resume()

    async def destroy(self, vm_id: VmId) -> None:
        """See `ports.Driver`."""
        machine = self._machines.pop(vm_id, None)
        if machine is not None:
            await machine.end()
        directory = self._root / vm_id
        for record in (RECORD, paging.RECORD):
            process = Recorded.find(directory / record)
            if process is not None:
                await process.kill()
        jail = self._jail(vm_id)
        await asyncio.to_thread(jail.clear)
        await self._groups_gone(vm_id, jail)
        for record in (RECORD, paging.RECORD, READY):
            (directory / record).unlink(missing_ok=True)

    def abandon(self) -> None:
        """Cut every connection at once, as the death of this process would; for tests of exactly that."""
        for machine in self._machines.values():
            machine.let_go()
        self._machines.clear()

    async def close(self) -> None:
        """See `ports.Driver`."""
        for machine in self._machines.values():
            machine.let_go()
        self._machines.clear()

    # --- programs: every snapshot cuts the channel to the guest, also of a machine that goes on ---

    async def exec(self, vm_id: VmId, exec_id: ExecId, program: ExecSpec, on_output: OnOutput) -> ExecOutcome:
        """See `ports.Driver`."""
        for _ in range(CUTS_MAX):
            machine = await self._get(vm_id)
            try:
                return await super().exec(vm_id, exec_id, program, on_output)
            except DriverError as error:
                if error.code != VM_GONE or not self._goes_on(vm_id, machine):
                    raise
            try:
                return await self.attach(vm_id, exec_id, on_output)
            except DriverError as error:
                if error.code != EXEC_UNKNOWN:  # else the machine had not heard of it yet
                    raise
        raise _cut_too_often(exec_id)

    async def attach(self, vm_id: VmId, exec_id: ExecId, on_output: OnOutput) -> ExecOutcome:
        """See `ports.Driver`."""
        for _ in range(CUTS_MAX):
            machine = await self._get(vm_id)
            try:
                return await super().attach(vm_id, exec_id, on_output)
            except DriverError as error:
                if error.code != VM_GONE or not self._goes_on(vm_id, machine):
                    raise
        raise _cut_too_often(exec_id)

    # --- inside ---

    async def _talk(self, vm_id: VmId) -> tuple[GuestChannel, Followers]:
        async with self._reach(vm_id) as channel:
            return channel

    @asynccontextmanager
    async def _reach(self, vm_id: VmId) -> AsyncIterator[tuple[GuestChannel, Followers]]:
        machine = await self._get(vm_id)
        async with machine.speaking() as channel:
            if self._machines.get(vm_id) is not machine:  # ended while it stood still
                raise gone(vm_id)
            yield channel

    def _goes_on(self, vm_id: VmId, machine: Machine) -> bool:
        """Whether the machine is there still, so that only the way to its guest was cut."""
        return machine.alive and self._machines.get(vm_id) is machine

    def _jail(self, vm_id: VmId) -> Jail:
        return Jail(self._root / vm_id, vm_id, self._workshop.engine, self._workshop.jailing)

    def _kept(self, spec: VmSpec, template: Template) -> KeptSpec:
        identity = Identity(
            session_id=spec.session_id,
            incarnation=spec.incarnation,
            epoch=self._new_epoch(),
            hostname=spec.session_id[:63],
            machine_id=(spec.session_id + spec.vm_id).encode().hex()[-32:],
        )
        return KeptSpec(
            vm_id=spec.vm_id,
            session_id=spec.session_id,
            incarnation=spec.incarnation,
            machine=spec.machine,
            template_key=template.info.key,
            template_digest=template.info.digests["memory"],
            identity=identity,
        )

    def _lay_out(self, jail: Jail, kept: KeptSpec, template: Template, parts: Parts | None) -> MemoryBackend:
        """Fill the jail with what is loaded, and say where its memory will come from."""
        directory = jail.directory
        for name in (READY, PAGES, UNSURE, paging.RECORD):
            (directory / name).unlink(missing_ok=True)
        (directory / SPEC).write_bytes(msgspec.json.encode(kept))
        jail.lay_out()
        copy(template.disk, jail.root / names.DISK)
        for name in (names.DISK, names.LOG, names.METRICS):
            jail.own(name)
        if parts is None:
            jail.link(template.state, names.STATE)
            jail.link(template.memory, names.MEMORY)
            return MemoryBackend(backend_type="File", backend_path=names.MEMORY)
        deltas.apply(parts.disk, jail.root / names.DISK)
        (jail.root / names.STATE).write_bytes(parts.state)
        (jail.root / names.STATE).chmod(0o444)
        keep(parts.memory, directory / PAGES)
        if self._paging == "faults":
            return MemoryBackend(backend_type="Uffd", backend_path=names.FAULTS_SOCKET)
        copy(template.memory, jail.root / names.MEMORY)
        deltas.apply(parts.memory, jail.root / names.MEMORY)
        (jail.root / names.MEMORY).chmod(0o444)
        return MemoryBackend(backend_type="File", backend_path=names.MEMORY)

    async def _spawn(self, jail: Jail, kept: KeptSpec, template: Template, memory: MemoryBackend) -> Machine:
        """Start Firecracker, and beside it the handler if one is needed."""
        spawning = asyncio.ensure_future(spawn(jail.directory, jail, jail.command(kept.machine)))
        handler = None
        try:
            if memory.backend_type == "Uffd":
                handler = await asyncio.to_thread(_start_handler, jail, template)
            return Machine(kept, jail, template, await spawning, handler)
        except BaseException:
            spawning.cancel()
            (process,) = await asyncio.gather(spawning, return_exceptions=True)
            for started in (process, handler):
                if isinstance(started, Recorded):
                    await started.kill()
            raise

    async def _get(self, vm_id: VmId) -> Machine:
        """The machine, adopted when an earlier driver object started it."""
        machine = self._machines.get(vm_id)
        if machine is not None and machine.alive:
            return machine
        directory = self._root / vm_id
        process, kept = Recorded.find(directory / RECORD), read_kept(directory)
        if process is None or kept is None or stalled(directory):
            raise gone(vm_id)
        template = await self._templates.known(kept.builds_on)
        if vm_id in self._machines and self._machines[vm_id].alive:  # adopted by another call meanwhile
            return self._machines[vm_id]
        handler = Recorded.find(directory / paging.RECORD)
        machine = self._machines[vm_id] = Machine(kept, self._jail(vm_id), template, process, handler)
        try:
            await machine.find_out(ASK_S_MAX)
        except BaseException:
            machine.let_go()
            if self._machines.get(vm_id) is machine:
                del self._machines[vm_id]
            raise
        return machine

    def _remains(self, ref: ResourceRef) -> bool:
        prefix, _, vm_id = ref.name.partition(":")
        match ref.kind, prefix:
            case "process", "firecracker":
                return Recorded.find(self._root / vm_id / RECORD) is not None
            case "process", "firecracker-faults":
                return Recorded.find(self._root / vm_id / paging.RECORD) is not None
            case "cgroup", "firecracker":
                cgroups = self._workshop.jailing.cgroups
                return cgroups is not None and cgroups.exist(vm_id)
            case _:
                return False

    async def _groups_gone(self, vm_id: VmId, jail: Jail) -> None:
        """A group can be removed a moment after its last process has ended."""
        cgroups = self._workshop.jailing.cgroups
        for _ in range(CGROUP_TRIES):
            if cgroups is None or not await asyncio.to_thread(cgroups.exist, vm_id):
                return
            await asyncio.sleep(CGROUP_PAUSE_S)
            await asyncio.to_thread(jail.clear)


def _cut_too_often(exec_id: ExecId) -> DriverError:
    return DriverError("guest-cut-off", f"the way to {exec_id} was cut {CUTS_MAX} times", retryable=True)


def _start_handler(jail: Jail, template: Template) -> Recorded:
    with template.memory.open("rb") as base:
        memory = paging.Memory(base=base.fileno(), pages=jail.directory / PAGES)
        return paging.start_handler(jail.directory, jail, memory)


def _settle(jail: Jail) -> None:
    """The start has come to its end: drop what was only needed for it."""
    (jail.directory / READY).touch()
    jail.remove(names.STATE)

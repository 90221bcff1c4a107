"""The Firecracker driver: starts, checkpoints, restores, adopts and ends jailed microVMs; see `ports.Driver`."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec

from torpor_contracts.errors import Rejected
from torpor_contracts.host import HostCapacity
from torpor_contracts.ids import ExecId, VmId
from torpor_contracts.session import ExecSpec, MachineSpec
from torpor_contracts.vm import ResourceRef
from torpor_vm_host.adapters.firecracker import deltas, paging
from torpor_vm_host.adapters.firecracker import jail as names
from torpor_vm_host.adapters.firecracker.api import Api
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
from torpor_vm_host.adapters.firecracker.parts import Parts, check
from torpor_vm_host.adapters.firecracker.process import RECORD, Recorded, last_words, spawn
from torpor_vm_host.adapters.firecracker.requests import MemoryBackend
from torpor_vm_host.adapters.firecracker.template import (
    Template,
    Workshop,
    make_template,
    open_template,
    template_key,
)
from torpor_vm_host.adapters.guest_programs import GuestPrograms
from torpor_vm_host.adapters.qemu.following import Followers
from torpor_vm_host.adapters.qemu.guest import GuestChannel, Identity
from torpor_vm_host.images.builder import ImageLibrary
from torpor_vm_host.ports import (
    EXEC_UNKNOWN,
    VM_GONE,
    CheckpointFiles,
    DriverError,
    ExecOutcome,
    OnOutput,
    PartFile,
    PresentVm,
    VmSpec,
)

VCPUS_MAX: Final = 32
ASK_S_MAX: Final = 2.0
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
        self._images = images
        self._root = root
        self._new_epoch = new_epoch
        self._paging = paging
        self._machines: dict[VmId, Machine] = {}
        self._templates: dict[str, Template] = {}
        self._preparing: dict[str, asyncio.Lock] = {}

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
        if not 1 <= machine.vcpus <= VCPUS_MAX:
            raise DriverError("machine-refused", f"a guest has 1 to {VCPUS_MAX} virtual processors", retryable=False)
        try:
            image = await asyncio.to_thread(self._images.find, machine.image)
            if image is None:
                image = await asyncio.to_thread(self._images.build, machine.image, self._workshop.progress)
        except Rejected as error:
            code = "image-unknown" if error.code == "unknown-image" else error.code
            raise DriverError(code, f"{error.message} ({error.advice})", retryable=False) from error
        if machine.disk_mib < image.info.disk_mib:
            detail = f"the image {machine.image!r} needs a disk of {image.info.disk_mib} MiB or more"
            raise DriverError("machine-refused", detail, retryable=False)
        key = template_key(self._workshop.engine, image, machine)
        async with self._preparing.setdefault(key, asyncio.Lock()):
            template = self._templates.get(key)
            if template is None:
                folder = await make_template(self._workshop, image, machine)
                template = self._templates[key] = await asyncio.to_thread(open_template, folder)
        return template

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
        template = await self.prepare(spec.machine)
        kept = self._kept(spec, template)
        jail = self._jail(spec.vm_id)
        parts = None if checkpoint is None else await asyncio.to_thread(check, checkpoint, template)
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

    async def adopt(self, vm_id: VmId) -> None:
        """See `ports.Driver`."""
        await (await self._get(vm_id)).talk()

    async def machines(self) -> list[PresentVm]:
        """See `ports.Driver`."""
        directories = await asyncio.to_thread(lambda: [path.parent for path in sorted(self._root.glob(f"*/{RECORD}"))])
        return list(await asyncio.gather(*(self._present(directory) for directory in directories)))

    async def freeze(self, vm_id: VmId) -> None:
        """See `ports.Driver`."""
        await (await self._get(vm_id)).pause()

    async def checkpoint(self, vm_id: VmId, directory: Path) -> list[PartFile]:
        """See `ports.Driver`."""
        return await (await self._get(vm_id)).checkpoint(directory)

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

    # --- programs: the channel to the guest is cut by every snapshot, also of a machine that goes on ---

    async def exec(self, vm_id: VmId, exec_id: ExecId, program: ExecSpec, on_output: OnOutput) -> ExecOutcome:
        """See `ports.Driver`."""
        while True:  # once more for each checkpoint that came between
            machine = await self._get(vm_id)
            cuts = machine.cuts
            try:
                return await super().exec(vm_id, exec_id, program, on_output)
            except DriverError as error:
                if not _was_cut(error, machine, cuts):
                    raise
            try:
                return await self.attach(vm_id, exec_id, on_output)
            except DriverError as error:
                if error.code != EXEC_UNKNOWN:  # else the machine had not heard of it yet
                    raise

    async def attach(self, vm_id: VmId, exec_id: ExecId, on_output: OnOutput) -> ExecOutcome:
        """See `ports.Driver`."""
        while True:  # as above
            machine = await self._get(vm_id)
            cuts = machine.cuts
            try:
                return await super().attach(vm_id, exec_id, on_output)
            except DriverError as error:
                if not _was_cut(error, machine, cuts):
                    raise

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
        handler = None
        if memory.backend_type == "Uffd":
            handler = await asyncio.to_thread(_start_handler, jail, template)
        try:
            process = await spawn(jail.directory, jail, jail.command(kept.machine))
        except BaseException:
            if handler is not None:
                await handler.kill()
            raise
        return Machine(kept, jail, template, process, handler)

    async def _get(self, vm_id: VmId) -> Machine:
        """The machine, adopted when an earlier driver object started it."""
        machine = self._machines.get(vm_id)
        if machine is not None and machine.alive:
            return machine
        directory = self._root / vm_id
        process, kept = Recorded.find(directory / RECORD), read_kept(directory)
        if process is None or kept is None or self._stalled(directory):
            raise gone(vm_id)
        template = await self.prepare(kept.machine)
        if vm_id in self._machines and self._machines[vm_id].alive:  # adopted by another call meanwhile
            return self._machines[vm_id]
        handler = Recorded.find(directory / paging.RECORD)
        machine = self._machines[vm_id] = Machine(kept, self._jail(vm_id), template, process, handler)
        await machine.find_out(ASK_S_MAX)
        return machine

    async def _present(self, directory: Path) -> PresentVm:
        vm_id, kept = VmId(directory.name), read_kept(directory)
        state: Literal["starting", "running", "paused", "dead"] = "dead"
        detail = "nothing can be read about it" if kept is None else ""
        if Recorded.find(directory / RECORD) is not None and kept is not None:
            if self._stalled(directory):
                detail = "its page-fault handler is gone"
            elif (directory / READY).exists():
                state = await self._running_or_paused(vm_id)
            else:
                state = "starting"
        session_id, incarnation = (None, None) if kept is None else (kept.session_id, kept.incarnation)
        return PresentVm(vm_id=vm_id, session_id=session_id, incarnation=incarnation, state=state, detail=detail)

    async def _running_or_paused(self, vm_id: VmId) -> Literal["running", "paused", "dead"]:
        """What Firecracker itself says; one that is busy (with a snapshot, say) is taken to run."""
        machine = self._machines.get(vm_id)
        try:
            if machine is not None:
                found = await machine.api.describe(timeout_s=ASK_S_MAX)
            else:
                with contextlib.closing(Api(self._jail(vm_id).root / names.API_SOCKET)) as api:
                    found = await api.describe(timeout_s=ASK_S_MAX)
        except OSError:
            return "dead"
        except DriverError as error:
            return "running" if error.retryable else "dead"
        return "paused" if found.state == "Paused" else "running"

    @staticmethod
    def _stalled(directory: Path) -> bool:
        """Whether the machine needed a page-fault handler that is gone: it hangs, and is as good as dead."""
        return (directory / paging.RECORD).exists() and Recorded.find(directory / paging.RECORD) is None

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


def _was_cut(error: DriverError, machine: Machine, cuts: int) -> bool:
    """Whether a program was lost sight of because of a checkpoint, and is there still."""
    return error.code == VM_GONE and machine.cuts != cuts and machine.alive


def _start_handler(jail: Jail, template: Template) -> Recorded:
    with template.memory.open("rb") as base:
        memory = paging.Memory(base=base.fileno(), pages=jail.directory / PAGES)
        return paging.start_handler(jail.directory, jail, memory)


def _settle(jail: Jail) -> None:
    """The start has come to its end: drop what was only needed for it."""
    (jail.directory / READY).touch()
    jail.remove(names.STATE)

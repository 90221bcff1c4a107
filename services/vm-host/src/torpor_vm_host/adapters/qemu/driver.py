"""The QEMU driver: starts, checkpoints, restores, adopts and ends microVMs on this machine; see `ports.Driver`."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from torpor_contracts.host import HostCapacity
from torpor_contracts.ids import VmId
from torpor_contracts.session import MachineSpec
from torpor_contracts.vm import ResourceRef
from torpor_vm_host.adapters.guest_programs import GuestPrograms
from torpor_vm_host.adapters.qemu import cgroups as groups
from torpor_vm_host.adapters.qemu.booting import Booting
from torpor_vm_host.adapters.qemu.checkpointing import checkpoint_live, checkpoint_paused, drop_leftovers
from torpor_vm_host.adapters.qemu.confining import CLAIM, PROCESS, Confining, read_claim
from torpor_vm_host.adapters.qemu.disks import refused
from torpor_vm_host.adapters.qemu.engine import Engine
from torpor_vm_host.adapters.qemu.following import Followers
from torpor_vm_host.adapters.qemu.guest import GuestChannel, Identity, WallClock
from torpor_vm_host.adapters.qemu.loading import load_checkpoint, load_template
from torpor_vm_host.adapters.qemu.machine import Machine
from torpor_vm_host.adapters.qemu.options import SlotPolicy
from torpor_vm_host.adapters.qemu.parts import Parts, base_digest, check
from torpor_vm_host.adapters.qemu.process import QemuProcess, recorded_pid
from torpor_vm_host.adapters.qemu.records import KeptSpec, is_started, note_started, read_spec, write_spec
from torpor_vm_host.adapters.qemu.slots import Kind, Slots
from torpor_vm_host.adapters.qemu.template import Template, base
from torpor_vm_host.adapters.qemu.templates import Templates
from torpor_vm_host.adapters.qemu.waiting import Yard, clear
from torpor_vm_host.images.builder import ImageLibrary
from torpor_vm_host.ports import (
    VM_GONE,
    Base,
    CheckpointFiles,
    DriverError,
    LiveCheckpoint,
    OnPause,
    PartFile,
    PresentVm,
    VmSpec,
)

VMS: Final = "vms"
SLOTS: Final = "slots"
TEMPLATES: Final = "templates"
MEMORY_MIB_MIN: Final = 96
"""With less the guest's kernel and agent do not come up."""
CAPTURES_MAX: Final = 2
"""Checkpoints taken side by side: each holds the changed pages of its machine in memory."""


class QemuDriver(GuestPrograms):
    """Runs machines in directories of their own below `root / "vms"`; slots and templates lie beside them."""

    name = "qemu"

    def __init__(
        self,
        engine: Engine,
        images: ImageLibrary,
        root: Path,
        *,
        confining: Confining,
        slots: SlotPolicy,
        new_id: Callable[[str], str],
        wall_ns: WallClock,
        progress: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._root = root
        self._vms = root / VMS
        self._new_id = new_id
        self._wall_ns = wall_ns
        self._yard = Yard(engine, confining, self._vms, root / SLOTS)
        self._templates = Templates(
            engine,
            images,
            cache=images.cache.parent / TEMPLATES,
            kept=root / TEMPLATES,
            make=Booting(engine, confining, wall_ns),
            progress=progress,
        )
        self._slots = Slots(self._yard, root / SLOTS, slots, new_name=lambda: new_id("slot"), wall_ns=wall_ns)
        self._machines: dict[VmId, Machine] = {}
        self._adopting = asyncio.Lock()
        self._captures = asyncio.Semaphore(CAPTURES_MAX)
        self._cleared = False

    # --- what the host can do ---

    async def fingerprint(self) -> str:
        """See `ports.Driver`."""
        return self._engine.fingerprint

    async def capacity(self) -> HostCapacity:
        """Eight vCPUs a processor (agents mostly wait), and what memory and disk are free now, less a tenth."""
        memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
        disk = (await asyncio.to_thread(shutil.disk_usage, self._root)).free // 2**20
        processors = os.cpu_count() or 1
        return HostCapacity(vcpus=processors * 8, memory_mib=memory * 9 // 10, disk_mib=disk * 9 // 10, vms_max=1000)

    async def prepare(self, machine: MachineSpec) -> None:
        """Have the image and template for such machines, and soon slots; the first time may take minutes."""
        await self._clear_slots()
        self._slots.want(await self._templates.ready(machine))

    def free_slots(self, kind: Kind) -> int:
        """How many machines of this kind wait for somebody."""
        return self._slots.count(kind)

    # --- life ---

    def resources(self, spec: VmSpec) -> list[ResourceRef]:
        """See `ports.Driver`."""
        process = ResourceRef(kind="process", name=f"qemu:{spec.vm_id}")
        directories = self._yard.confining.directories(spec.vm_id)
        return [process, ResourceRef(kind="cgroup", name=f"torpor/{spec.vm_id}")] if directories else [process]

    async def remaining(self, resources: Sequence[ResourceRef]) -> list[ResourceRef]:
        """See `ports.Driver`."""
        return await asyncio.to_thread(lambda: [ref for ref in resources if self._remains(ref)])

    async def start(self, spec: VmSpec, checkpoint: CheckpointFiles | None) -> None:
        """See `ports.Driver`."""
        if read_claim(spec.directory) is not None:
            raise DriverError("vm-exists", f"there is a machine {spec.vm_id} already", retryable=False)
        _refuse_impossible(spec.machine)
        await self._clear_slots()
        parts = None if checkpoint is None else await asyncio.to_thread(check, checkpoint, self._engine.fingerprint)
        template = await self._template_for(spec.machine, parts)
        kept = self._kept(spec, template)
        with _writing():
            await asyncio.to_thread(write_spec, spec.directory, kept)
        process, guest = await self._process_for(spec, template, parts)
        machine = Machine(process, kept, self._wall_ns, paused=False, guest=guest)
        machine.template = template
        try:
            if parts is not None:
                await load_checkpoint(process, template, parts)
            elif guest is None:
                await load_template(process, template)
            await process.command("cont")
            machine.paused = False
            await machine.talk()
            self._machines[spec.vm_id] = machine
            with _writing():
                await asyncio.to_thread(note_started, spec.directory)
        except BaseException:
            self._machines.pop(spec.vm_id, None)
            machine.hang_up()
            await clear(spec.directory, process)
            raise
        self._slots.want(template)

    async def bases(self) -> list[Base]:
        """See `ports.Driver`: the templates."""
        return [base(template) for template in self._templates.ready_ones()]

    async def base_of(self, vm_id: VmId) -> Base | None:
        """See `ports.Driver`: the machine's template."""
        return base(await self._template_of(await self._get(vm_id)))

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
        paths = await asyncio.to_thread(lambda: sorted(self._vms.glob(f"*/{CLAIM}")))
        found = [await self._present(VmId(path.parent.name)) for path in paths]
        return [one for one in found if one is not None]

    async def freeze(self, vm_id: VmId) -> None:
        """See `ports.Driver`."""
        machine = await self._get(vm_id)
        await machine.process.command("stop")
        machine.paused = True

    async def checkpoint(self, vm_id: VmId, directory: Path) -> list[PartFile]:
        """See `ports.Driver`."""
        machine = await self._get(vm_id)
        template = await self._template_of(machine)
        async with machine.checkpointing, self._captures:
            return await checkpoint_paused(machine, template, directory)

    async def checkpoint_live(self, vm_id: VmId, directory: Path, at_pause: OnPause) -> LiveCheckpoint:
        """See `ports.Driver`."""
        machine = await self._get(vm_id)
        template = await self._template_of(machine)
        async with machine.checkpointing, self._captures:
            if machine.paused:
                raise DriverError("vm-not-running", f"{vm_id} is paused", retryable=True)
            parts, pause_ms = await checkpoint_live(machine, template, directory, at_pause)
        return LiveCheckpoint(parts=parts, pause_ms=pause_ms)

    async def resume(self, vm_id: VmId) -> None:
        """See `ports.Driver`."""
        machine = await self._get(vm_id)
        await machine.process.command("cont")
        machine.paused = False

    async def destroy(self, vm_id: VmId) -> None:
        """See `ports.Driver`."""
        machine = self._machines.pop(vm_id, None)
        if machine is not None:
            machine.hang_up()
        await clear(self._vms / vm_id, None if machine is None else machine.process)

    def process_of(self, vm_id: VmId) -> QemuProcess:
        """The process of a machine that this object has started, for who measures it."""
        return self._machines[vm_id].process

    def abandon(self) -> None:
        """Cut every connection at once, as the death of this process would; for tests of exactly that."""
        self._slots.abandon()
        for machine in self._machines.values():
            machine.let_go()
        self._machines.clear()
        self._templates.close()

    async def close(self) -> None:
        """See `ports.Driver`; slots are nobody's machines, and end."""
        await self._slots.stop()
        self.abandon()

    # --- inside ---

    async def _talk(self, vm_id: VmId) -> tuple[GuestChannel, Followers]:
        return await (await self._get(vm_id)).talk()

    async def _clear_slots(self) -> None:
        """Before the first machine: end the slots of an earlier process, whose connections nobody has."""
        async with self._adopting:
            if not self._cleared:
                await self._slots.clear_leftovers()
                self._cleared = True

    async def _template_for(self, machine: MachineSpec, parts: Parts | None) -> Template:
        if parts is None:
            return await self._templates.ready(machine)
        template = await self._templates.of_digest(parts.template_digest)
        made_for = template.info.machine
        if (made_for.vcpus, made_for.memory_mib, made_for.disk_mib) != (
            machine.vcpus,
            machine.memory_mib,
            machine.disk_mib,
        ):
            raise DriverError("checkpoint-mismatched", "it is of a machine of another size", retryable=False)
        return template

    async def _template_of(self, machine: Machine) -> Template:
        if machine.template is None:
            machine.template = await self._templates.of_digest(machine.kept.memory_digest)
        return machine.template

    async def _process_for(
        self, spec: VmSpec, template: Template, parts: Parts | None
    ) -> tuple[QemuProcess, GuestChannel | None]:
        """A slot if there is one, else a new process."""
        kinds: tuple[Kind, ...] = ("warm", "blank") if parts is None else ("blank",)
        for kind in kinds:
            taken = await self._slots.take(template, kind, spec.directory, spec.vm_id)
            if taken is not None:
                return taken
        return await self._yard.spawn(spec.directory, spec.vm_id, template, wanted=True), None

    def _kept(self, spec: VmSpec, template: Template) -> KeptSpec:
        identity = Identity(
            session_id=spec.session_id,
            incarnation=spec.incarnation,
            epoch=self._new_id("epoch"),
            hostname=spec.session_id[:63],
            machine_id=(spec.session_id + spec.vm_id).encode().hex()[-32:],
        )
        return KeptSpec(
            vm_id=spec.vm_id,
            session_id=spec.session_id,
            incarnation=spec.incarnation,
            machine=spec.machine,
            memory_digest=template.memory.digest,
            identity=identity,
        )

    def _remains(self, ref: ResourceRef) -> bool:
        directory = self._vms / ref.name.rpartition(":" if ref.kind == "process" else "/")[2]
        if ref.kind == "process":
            return recorded_pid(directory) is not None
        claim = read_claim(directory)
        held = claim.directories if claim is not None else self._yard.confining.directories(directory.name)
        return groups.are_there(held)

    async def _present(self, vm_id: VmId) -> PresentVm | None:
        """What is there of a machine that has claimed something; None when none of it exists."""
        directory = self._vms / vm_id
        kept = await asyncio.to_thread(read_spec, directory)
        state, detail = await self._state(vm_id, directory)
        if state is None:
            return None
        return PresentVm(
            vm_id=vm_id,
            session_id=None if kept is None else kept.session_id,
            incarnation=None if kept is None else kept.incarnation,
            state=state,
            detail=detail,
        )

    async def _state(
        self, vm_id: VmId, directory: Path
    ) -> tuple[Literal["starting", "running", "paused", "dead"] | None, str]:
        known = self._machines.get(vm_id)
        if known is not None and not known.process.alive:
            return "dead", _why(known.process, directory)
        if known is None:
            if await asyncio.to_thread(recorded_pid, directory) is None:
                return await asyncio.to_thread(_remnant, directory)
            if not is_started(directory):
                return "starting", "its start has not come to its end"
            try:
                known = await self._get(vm_id)
            except DriverError as error:
                # It exists, and whether it runs cannot be seen: whoever wants it to run is told why it does not.
                return "paused", str(error)
        return ("paused" if known.paused else "running"), ""

    async def _get(self, vm_id: VmId) -> Machine:
        """The machine, taken charge of when an earlier driver object started it."""
        async with self._adopting:
            machine = self._machines.get(vm_id)
            if machine is not None and machine.process.alive and machine.process.connected:
                return machine
            if machine is not None:
                machine.let_go()
                del self._machines[vm_id]
            directory = self._vms / vm_id
            process = QemuProcess.find(directory)
            if process is None:
                raise DriverError(VM_GONE, f"there is no machine {vm_id}", retryable=False)
            try:
                await process.connect()
                status = (await process.command("query-status"))["status"]
                await drop_leftovers(process)
            except BaseException:
                process.let_go()
                raise
            kept = await asyncio.to_thread(read_spec, directory)
            machine = Machine(process, kept, self._wall_ns, paused=status != "running")
            self._machines[vm_id] = machine
            return machine


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise refused(error, "start-failed") from error


def _refuse_impossible(machine: MachineSpec) -> None:
    """What no machine of this host can be."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    for what, asked, least, most in (
        ("vCPUs", machine.vcpus, 1, os.cpu_count() or 1),
        ("MiB of memory", machine.memory_mib, MEMORY_MIB_MIN, memory),
    ):
        if not least <= asked <= most:
            detail = f"a machine of this host has from {least} to {most} {what}, not {asked}"
            raise DriverError("machine-refused", detail, retryable=False)


def _why(process: QemuProcess, directory: Path) -> str:
    claim = read_claim(directory)
    if claim is not None and groups.killed_for_memory(claim.directories):
        return "it used more memory than it may"
    return process.how_it_ended()


def _remnant(directory: Path) -> tuple[Literal["starting", "dead"] | None, str]:
    """What is left of a machine without a process that is recorded and lives."""
    claim = read_claim(directory)
    held = [] if claim is None else claim.directories
    if groups.members(held):
        return "starting", "its process has not been recorded yet"
    if groups.are_there(held) or (directory / PROCESS).exists():
        return "dead", "its process is gone"
    return None, ""

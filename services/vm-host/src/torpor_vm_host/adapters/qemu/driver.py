"""The QEMU driver: starts, checkpoints, restores, adopts and ends microVMs on this machine; see `ports.Driver`."""

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from torpor_contracts.errors import Rejected
from torpor_contracts.host import HostCapacity
from torpor_contracts.ids import SessionId, VmId
from torpor_contracts.session import MachineSpec
from torpor_contracts.vm import ResourceRef
from torpor_vm_host.adapters.guest_programs import GuestPrograms
from torpor_vm_host.adapters.qemu import memory as pages
from torpor_vm_host.adapters.qemu.engine import Engine, MachineFiles, command_line
from torpor_vm_host.adapters.qemu.following import Followers
from torpor_vm_host.adapters.qemu.guest import GuestChannel, Identity
from torpor_vm_host.adapters.qemu.parts import Parts, check, write
from torpor_vm_host.adapters.qemu.process import AGENT_SOCKET, RECORD, QemuProcess, Sockets
from torpor_vm_host.adapters.qemu.template import Template, make_template, open_template, template_key
from torpor_vm_host.images.builder import ImageLibrary
from torpor_vm_host.ports import VM_GONE, CheckpointFiles, DriverError, PartFile, PresentVm, VmSpec

SPEC: Final = "spec.json"
DISK: Final = "disk.qcow2"
HELLO_TIMEOUT_S: Final = 30.0
LOAD_POLL_S: Final = 0.0005
LOAD_TIMEOUT_S: Final = 30.0


class KeptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is written beside a machine about what it was started for."""

    vm_id: VmId
    session_id: SessionId
    incarnation: int
    machine: MachineSpec
    template_key: str
    identity: Identity


class _Machine:
    """A machine this driver object is in charge of; the guest's channel is opened when it is first needed."""

    def __init__(self, kept: KeptSpec, process: QemuProcess, template: Template) -> None:
        self.kept = kept
        self.process = process
        self.template = template
        self.paused = False
        self.lock = asyncio.Lock()
        self._talking: tuple[GuestChannel, Followers] | None = None
        self._greeting = asyncio.Lock()

    async def talk(self) -> tuple[GuestChannel, Followers]:
        """The open channel to the guest; opens it, and greets the guest as who it is, the first time."""
        async with self._greeting:
            if self._talking is None:
                guest = await GuestChannel.connect(self.process.directory / AGENT_SOCKET)
                followers = Followers(guest)
                try:
                    await guest.hello(self.kept.identity, HELLO_TIMEOUT_S)
                except BaseException:
                    guest.abort()
                    raise
                self._talking = guest, followers
            return self._talking

    def hang_up(self) -> None:
        """Cut the channel to the guest without a word."""
        if self._talking is not None:
            self._talking[0].abort()
            self._talking = None


class QemuDriver(GuestPrograms):
    """Runs machines below `root`, one directory each, from images and templates kept in `cache`."""

    name = "qemu"

    def __init__(
        self,
        engine: Engine,
        images: ImageLibrary,
        root: Path,
        cache: Path,
        *,
        new_epoch: Callable[[], str],
        progress: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._images = images
        self._root = root
        self._cache = cache
        self._new_epoch = new_epoch
        self._progress = progress
        self._machines: dict[VmId, _Machine] = {}
        self._templates: dict[str, Template] = {}
        self._preparing: dict[str, asyncio.Lock] = {}

    # --- what the host can do ---

    async def fingerprint(self) -> str:
        """See `ports.Driver`."""
        return self._engine.fingerprint

    async def capacity(self) -> HostCapacity:
        """Twice the processors (agents mostly wait), and what memory and disk are free now, less a tenth."""
        memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
        disk = shutil.disk_usage(self._root).free // 2**20
        processors = os.cpu_count() or 1
        return HostCapacity(vcpus=processors * 8, memory_mib=memory * 9 // 10, disk_mib=disk * 9 // 10, vms_max=1000)

    async def prepare(self, machine: MachineSpec) -> Template:
        """The image and template for such machines, made if they are not there (a minute, or seconds)."""
        image = self._images.find(machine.image)
        if image is None:
            image = await asyncio.to_thread(self._images.build, machine.image, self._progress)
        if machine.disk_mib < image.info.disk_mib:
            raise DriverError(
                "machine-refused",
                f"the image {machine.image!r} needs a disk of {image.info.disk_mib} MiB or more",
                retryable=False,
            )
        key = template_key(self._engine, image, machine)
        async with self._preparing.setdefault(key, asyncio.Lock()):
            template = self._templates.get(key)
            if template is None:
                folder = await make_template(self._engine, image, machine, self._cache, self._progress)
                template = self._templates[key] = await asyncio.to_thread(open_template, folder, image)
        return template

    # --- life ---

    def resources(self, spec: VmSpec) -> list[ResourceRef]:
        """See `ports.Driver`."""
        return [ResourceRef(kind="process", name=f"qemu:{spec.vm_id}")]

    async def remaining(self, resources: Sequence[ResourceRef]) -> list[ResourceRef]:
        """See `ports.Driver`."""
        return [ref for ref in resources if ref.kind == "process" and self._find(ref.name.removeprefix("qemu:"))]

    async def start(self, spec: VmSpec, checkpoint: CheckpointFiles | None) -> None:
        """See `ports.Driver`."""
        if self._find(spec.vm_id) is not None:
            raise DriverError("vm-exists", f"{spec.vm_id} runs already", retryable=False)
        try:
            template = await self.prepare(spec.machine)
        except Rejected as error:
            code = "image-unknown" if error.code == "unknown-image" else error.code
            raise DriverError(code, f"{error.message} ({error.advice})", retryable=False) from error
        kept = self._kept(spec, template)
        (spec.directory / SPEC).write_bytes(msgspec.json.encode(kept))
        parts = await asyncio.to_thread(_lay_out, spec.directory, template, checkpoint)
        process = await self._spawn(spec.directory, kept, template)
        try:
            await self._load(process, spec.directory, template, parts)
            await process.command("cont")
            machine = _Machine(kept, process, template)
            await machine.talk()
        except BaseException:
            await process.kill()
            (spec.directory / RECORD).unlink(missing_ok=True)
            raise
        self._machines[spec.vm_id] = machine

    async def adopt(self, vm_id: VmId) -> None:
        """See `ports.Driver`."""
        await (await self._get(vm_id)).talk()

    async def machines(self) -> list[PresentVm]:
        """See `ports.Driver`."""
        return [self._present(path.parent) for path in sorted(self._root.glob(f"*/{RECORD}"))]

    async def freeze(self, vm_id: VmId) -> None:
        """See `ports.Driver`."""
        machine = await self._get(vm_id)
        await machine.process.command("stop")
        machine.paused = True

    async def checkpoint(self, vm_id: VmId, directory: Path) -> list[PartFile]:
        """See `ports.Driver`."""
        machine = await self._get(vm_id)
        async with machine.lock:
            await machine.process.command("stop")
            machine.paused = True
            raw = directory / "devices.raw"
            await machine.process.command("xen-save-devices-state", filename=str(raw), live=False)
            return await asyncio.to_thread(_write_parts, machine, self._root / vm_id, directory)

    async def resume(self, vm_id: VmId) -> None:
        """See `ports.Driver`."""
        machine = await self._get(vm_id)
        await machine.process.command("cont")
        machine.paused = False

    async def destroy(self, vm_id: VmId) -> None:
        """See `ports.Driver`."""
        machine = self._machines.pop(vm_id, None)
        process = machine.process if machine else QemuProcess.find(self._root / vm_id)
        if machine is not None:
            machine.hang_up()
        if process is not None:
            await process.kill()
        (self._root / vm_id / RECORD).unlink(missing_ok=True)

    def abandon(self) -> None:
        """Cut every connection at once, as the death of this process would; for tests of exactly that."""
        for machine in self._machines.values():
            machine.hang_up()
            machine.process.abort()
        self._machines.clear()

    async def close(self) -> None:
        """See `ports.Driver`."""
        for machine in self._machines.values():
            machine.hang_up()
            await machine.process.disconnect()
        self._machines.clear()
        for template in self._templates.values():
            template.close()
        self._templates.clear()

    # --- inside ---

    async def _talk(self, vm_id: VmId) -> tuple[GuestChannel, Followers]:
        return await (await self._get(vm_id)).talk()

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

    async def _spawn(self, directory: Path, kept: KeptSpec, template: Template) -> QemuProcess:
        files = MachineFiles(
            kernel=template.image.kernel,
            initrd=template.image.initrd,
            memory=f"/proc/self/fd/{template.memory}",
            memory_shared=False,
            disk=directory / DISK,
        )
        sockets = Sockets(directory)
        try:
            qmp_fd, agent_fd = sockets.descriptors()
            argv = command_line(self._engine, kept.machine, files, qmp_fd=qmp_fd, agent_fd=agent_fd, incoming=True)
            return await QemuProcess.spawn(directory, argv, sockets, (template.memory,))
        finally:
            sockets.close()

    async def _load(self, process: QemuProcess, directory: Path, template: Template, parts: Parts | None) -> None:
        state = template.devices
        if parts is None:
            ignore_shared: list[dict[str, object]] = [{"capability": "x-ignore-shared", "state": True}]
            await process.command("migrate-set-capabilities", capabilities=ignore_shared)
        else:
            ranges = pages.find_memory(process.pid, template.memory_inode)
            await asyncio.to_thread(pages.put_pages, parts.memory, process.pid, ranges)
            state = directory / "devices.in"
            state.write_bytes(parts.state)
        with state.open("rb") as file:
            await process.send_descriptor("state", file.fileno())
            await process.command("migrate-incoming", uri="fd:state")
            deadline = asyncio.get_running_loop().time() + LOAD_TIMEOUT_S
            while (await process.command("query-status"))["status"] == "inmigrate":
                if asyncio.get_running_loop().time() > deadline:
                    raise DriverError("restore-failed", f"QEMU did not load {state}", retryable=True)
                await asyncio.sleep(LOAD_POLL_S)
        if parts is not None:
            state.unlink()

    def _find(self, vm_id: str) -> QemuProcess | None:
        machine = self._machines.get(VmId(vm_id))
        if machine is not None:
            return machine.process if machine.process.alive else None
        return QemuProcess.find(self._root / vm_id)

    def _present(self, directory: Path) -> PresentVm:
        vm_id = VmId(directory.name)
        try:
            kept = msgspec.json.decode((directory / SPEC).read_bytes(), type=KeptSpec)
        except (OSError, msgspec.DecodeError) as error:
            return PresentVm(vm_id=vm_id, session_id=None, incarnation=None, state="dead", detail=str(error))
        state: Literal["running", "paused", "dead", "starting"] = "running"
        machine = self._machines.get(vm_id)
        if self._find(vm_id) is None:
            state = "dead"
        elif machine is not None and machine.paused:
            state = "paused"
        return PresentVm(vm_id=vm_id, session_id=kept.session_id, incarnation=kept.incarnation, state=state)

    async def _get(self, vm_id: VmId) -> _Machine:
        """The machine, adopted when an earlier driver object started it."""
        machine = self._machines.get(vm_id)
        if machine is not None and machine.process.alive:
            return machine
        directory = self._root / vm_id
        process = QemuProcess.find(directory)
        if process is None:
            raise DriverError(VM_GONE, f"there is no machine {vm_id}", retryable=False)
        kept = msgspec.json.decode((directory / SPEC).read_bytes(), type=KeptSpec)
        template = await self.prepare(kept.machine)
        await process.connect()
        status = await process.command("query-status")
        machine = _Machine(kept, process, template)
        machine.paused = status["status"] != "running"
        self._machines[vm_id] = machine
        return machine


def _lay_out(directory: Path, template: Template, checkpoint: CheckpointFiles | None) -> Parts | None:
    """Check the parts to start from, if any, and give the machine its disk."""
    parts = None if checkpoint is None else check(checkpoint, template)
    shutil.copyfile(template.empty_overlay if parts is None else parts.disk, directory / DISK)
    (directory / DISK).chmod(0o600)
    return parts


def _write_parts(machine: _Machine, own: Path, directory: Path) -> list[PartFile]:
    ranges = pages.find_memory(machine.process.pid, machine.template.memory_inode)
    captured = pages.capture(machine.process.pid, ranges)
    raw = directory / "devices.raw"
    try:
        return write(captured, raw.read_bytes(), own / DISK, machine.template, directory)
    finally:
        raw.unlink(missing_ok=True)

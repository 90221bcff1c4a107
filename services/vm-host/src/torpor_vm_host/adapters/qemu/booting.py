"""The one boot of a template: boot, let it do what sessions will do, stop, and lay its files out."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any, Final

import msgspec

from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.qemu.command_line import Opened, command_line
from torpor_vm_host.adapters.qemu.confining import Claim, Confining, release
from torpor_vm_host.adapters.qemu.digests import digest_of
from torpor_vm_host.adapters.qemu.disks import link_or_copy, overlay, refused
from torpor_vm_host.adapters.qemu.engine import Engine
from torpor_vm_host.adapters.qemu.guest import GuestChannel, Identity, WallClock
from torpor_vm_host.adapters.qemu.process import AGENT_SOCKET, QemuProcess, Sockets, start_ticks
from torpor_vm_host.adapters.qemu.sealed import copy_sparse
from torpor_vm_host.adapters.qemu.template import (
    DEVICES,
    DISK,
    EMPTY,
    FORMAT,
    INFO,
    INITRD,
    KERNEL,
    MEMORY,
    ROOTFS,
    TemplateInfo,
    template_key,
)
from torpor_vm_host.adapters.qemu.waiting import clear
from torpor_vm_host.adapters.qemu.warming import EXERCISES, exercise
from torpor_vm_host.images.builder import Image
from torpor_vm_host.ports import DriverError

BOOT_S: Final = 120.0
WRITTEN_S: Final = 60.0
POLL_S: Final = 0.005
BANDWIDTH_MAX: Final = 1 << 40
BOOT_FOLDER: Final = "-boot"
OWNER: Final = "owner"
CONSOLE: Final = "console.log"
NOBODY: Final = Identity(
    session_id="template", incarnation=0, epoch="template", hostname="template", machine_id="0" * 32
)


class Booting:
    """Makes templates; see `templates.Make`."""

    def __init__(self, engine: Engine, confining: Confining, wall_ns: WallClock) -> None:
        self._engine = engine
        self._confining = confining
        self._wall_ns = wall_ns

    async def __call__(
        self, image: Image, machine: MachineSpec, out: Path, *, within_s: float = BOOT_S
    ) -> TemplateInfo:
        """Boot the image once and lay the template's files out in the empty directory `out`.

        Raises `DriverError`: `boot-failed` when the guest's agent does not answer within that time.
        """
        await _clear_abandoned(out.parent)
        work = out.with_name(f"{out.name}{BOOT_FOLDER}")
        await asyncio.to_thread(_own, work)
        memory = os.memfd_create("torpor-boot", os.MFD_CLOEXEC)
        try:
            await asyncio.to_thread(_lay_out, image, machine, out)
            os.ftruncate(memory, machine.memory_mib * 2**20)
            await self._boot(machine, memory, work, out, within_s)
            return await asyncio.to_thread(_finish, self._engine, image, machine, memory, out)
        except OSError as error:
            raise refused(error, "template-failed", "a template could not be made") from error
        finally:
            os.close(memory)
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)

    async def _boot(self, machine: MachineSpec, memory: int, work: Path, out: Path, within_s: float) -> None:
        name = f"boot-{work.name.strip('.')}"
        claim = self._confining.claim(work, name, ())
        self._confining.limit(name, machine, wanted=True)
        try:
            process = await self._spawn(machine, memory, work, out, claim)
            try:
                await self._greet(process, work, within_s)
                await _written(process, out / DEVICES)
            finally:
                await process.kill()
        finally:
            await asyncio.to_thread(release, claim)

    async def _spawn(self, machine: MachineSpec, memory: int, work: Path, out: Path, claim: Claim) -> QemuProcess:
        flags = os.O_RDONLY | os.O_CLOEXEC
        sockets = Sockets(work)
        descriptors = [os.open(out / name, flags) for name in (KERNEL, INITRD, ROOTFS)]
        descriptors.append(os.open(out / DISK, os.O_RDWR | os.O_CLOEXEC))
        descriptors.append(os.open(work / CONSOLE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        kernel, initrd, rootfs, disk, console = descriptors
        opened = Opened(
            kernel=kernel,
            initrd=initrd,
            rootfs=rootfs,
            template_disk=None,
            disk=disk,
            memory=memory,
            memory_is_shared=True,
            qmp=sockets.qmp,
            agent=sockets.agent,
            console=console,
        )
        argv = command_line(self._engine, machine, opened, incoming=False)
        try:
            confined = self._confining.command(argv, work, claim, machine, self._engine.device)
            return await QemuProcess.spawn(work, confined, sockets, opened.inherited())
        finally:
            sockets.close()
            for descriptor in descriptors:
                os.close(descriptor)

    async def _greet(self, process: QemuProcess, work: Path, within_s: float) -> None:
        guest = GuestChannel.connect(work / AGENT_SOCKET)
        try:
            await guest.hello(NOBODY, self._wall_ns, within_s)
            await exercise(guest, EXERCISES)
            await guest.request("sync")
        except DriverError as error:
            said = await asyncio.to_thread(_last_line, work / CONSOLE)
            detail = f"{error.detail}; {process.how_it_ended() if not process.alive else 'the guest said: ' + said}"
            raise DriverError("boot-failed", detail, retryable=True) from error
        finally:
            guest.close()
        await process.command("stop")


async def _written(process: QemuProcess, target: Path) -> None:
    """The device state, written by a migration that leaves the memory where it is: in its file."""
    capabilities: list[dict[str, Any]] = [{"capability": "x-ignore-shared", "state": True}]
    await process.command("migrate-set-capabilities", {"capabilities": capabilities})
    await process.command("migrate-set-parameters", {"max-bandwidth": BANDWIDTH_MAX})
    state = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await process.command("getfd", {"fdname": "state"}, descriptor=state)
    finally:
        os.close(state)
    await process.command("migrate", {"uri": "fd:state"})
    deadline = asyncio.get_running_loop().time() + WRITTEN_S
    while (status := (await process.command("query-migrate")).get("status")) != "completed":
        if status == "failed" or asyncio.get_running_loop().time() > deadline:
            detail = f"QEMU could not write the machine's state ({status})"
            raise DriverError("template-failed", detail, retryable=True)
        await asyncio.sleep(POLL_S)


def _lay_out(image: Image, machine: MachineSpec, out: Path) -> None:
    for source, name in ((image.kernel, KERNEL), (image.initrd, INITRD), (image.rootfs, ROOTFS)):
        link_or_copy(source, out / name)
    overlay(ROOTFS, "raw", out / DISK, machine.disk_mib)
    overlay(DISK, "qcow2", out / EMPTY, machine.disk_mib)


def _finish(engine: Engine, image: Image, machine: MachineSpec, memory: int, out: Path) -> TemplateInfo:
    with (out / MEMORY).open("wb", buffering=0) as file:
        digests = {MEMORY: copy_sparse(memory, file.fileno())}
    digests |= {name: digest_of(out / name) for name in (KERNEL, INITRD, ROOTFS, DEVICES, DISK, EMPTY)}
    info = TemplateInfo(
        format=FORMAT,
        key=template_key(engine, image, machine),
        fingerprint=engine.fingerprint,
        image=image.info.name,
        image_key=image.key,
        machine=machine,
        digests=digests,
    )
    (out / INFO).write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=1))
    for name in (*digests, INFO):
        with (out / name).open("rb") as file:
            os.fsync(file.fileno())
    return info


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "nothing"


def _own(work: Path) -> None:
    """Make the folder of a boot, and say whose it is."""
    work.mkdir()
    (work / OWNER).write_text(f"{os.getpid()} {start_ticks(os.getpid())}")


async def _clear_abandoned(cache: Path) -> None:
    """End machines that were being booted when their process was killed, and remove what was being made."""
    for work in await asyncio.to_thread(lambda: list(cache.glob(f".*{BOOT_FOLDER}"))):
        if await asyncio.to_thread(_is_abandoned, work):
            await clear(work)
            for path in (work, work.with_name(work.name.removesuffix(BOOT_FOLDER))):
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def _is_abandoned(work: Path) -> bool:
    try:
        pid, began = map(int, (work / OWNER).read_text().split())
    except (OSError, ValueError):
        return False  # it is being made or removed at this moment
    return start_ticks(pid) != began

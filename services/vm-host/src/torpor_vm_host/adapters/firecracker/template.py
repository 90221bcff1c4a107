"""Templates: a machine booted once per image and size, and its full snapshot, from which every session starts."""

import asyncio
import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.firecracker import jail as names
from torpor_vm_host.adapters.firecracker.api import SNAPSHOT_S_MAX, Api
from torpor_vm_host.adapters.firecracker.configuring import Limits, boot
from torpor_vm_host.adapters.firecracker.copying import copy, copy_without_zeros
from torpor_vm_host.adapters.firecracker.engine import BZIMAGE_SINCE, Engine
from torpor_vm_host.adapters.firecracker.jail import Jail, Jailing
from torpor_vm_host.adapters.firecracker.kernel import place_kernel
from torpor_vm_host.adapters.firecracker.process import spawn
from torpor_vm_host.adapters.firecracker.requests import SnapshotCreate
from torpor_vm_host.adapters.firecracker.vsock import open_channel
from torpor_vm_host.adapters.qemu.digests import digest_of, verify
from torpor_vm_host.adapters.qemu.guest import Identity
from torpor_vm_host.adapters.qemu.templates import make_read_only, sync
from torpor_vm_host.images.builder import Image
from torpor_vm_host.ports import Base, DriverError

BOOT_S_MAX: Final = 120.0
FORMAT: Final = 1
FILES: Final = ("memory", "state", "disk")
INFO: Final = "template.json"
NOBODY: Final = Identity(
    session_id="template", incarnation=0, epoch="template", hostname="template", machine_id="0" * 32
)


class TemplateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `template.json` says; digests are SHA-256 in hex."""

    key: str
    fingerprint: str
    image_key: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    digests: dict[str, str]

    def fits(self, machine: MachineSpec) -> bool:
        """Whether its machine is of this size."""
        return (self.vcpus, self.memory_mib, self.disk_mib) == (machine.vcpus, machine.memory_mib, machine.disk_mib)


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """A template whose files were found to be what they were; they are only ever read."""

    folder: Path
    info: TemplateInfo

    @property
    def memory(self) -> Path:
        """All of the machine's memory; zeros are holes."""
        return self.folder / "memory"

    @property
    def state(self) -> Path:
        """What Firecracker loads beside memory."""
        return self.folder / "state"

    @property
    def disk(self) -> Path:
        """The raw disk; what was never written is holes."""
        return self.folder / "disk"


class Workshop(msgspec.Struct, frozen=True, kw_only=True):
    """What templates are made with, and where they are kept."""

    engine: Engine
    jailing: Jailing
    limits: Limits
    cache: Path
    progress: Callable[[str], None]


def template_key(engine: Engine, image: Image, machine: MachineSpec) -> str:
    """Which template a machine starts from (64 hex digits)."""
    parts = (FORMAT, engine.fingerprint, image.key, machine.vcpus, machine.memory_mib, machine.disk_mib)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def find_template(cache: Path, holds: Callable[[TemplateInfo], bool]) -> Path | None:
    """The folder of a template of which this holds; templates of earlier images stay, for the checkpoints on them."""
    for path in sorted(cache.glob(f"*/{INFO}")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if holds(msgspec.json.decode(path.read_bytes(), type=TemplateInfo)):
                return path.parent
    return None


def open_template(folder: Path) -> Template:
    """A template in its folder, every file verified; raises `DriverError("template-corrupt")`."""
    try:
        info = msgspec.json.decode((folder / INFO).read_bytes(), type=TemplateInfo)
        for name in FILES:
            verify(folder / name, info.digests[name])
    except (OSError, ValueError, msgspec.DecodeError, KeyError) as error:
        raise DriverError("template-corrupt", f"{error}; remove {folder}: it is made anew", retryable=False) from error
    return Template(folder=folder, info=info)


def base(template: Template) -> Base:
    """A template as what checkpoints build on."""
    return Base(name=template.info.digests["memory"], files={name: template.folder / name for name in (*FILES, INFO)})


def receive_template(name: str, directory: Path, cache: Path) -> Template:
    """Verify the template in `directory`, move it into the cache, and open it there; raises `DriverError`."""
    folder = cache / f"received-{name[:32]}"
    try:
        make_read_only(directory)
        if open_template(directory).info.digests["memory"] != name:
            raise DriverError("template-corrupt", f"what came as the template {name[:16]} is another", retryable=False)
        cache.mkdir(parents=True, exist_ok=True)
        sync(directory)
        try:
            directory.rename(folder)
        except OSError:  # it was received before
            if not (folder / INFO).is_file():
                raise
        sync(cache, files=False)
        return open_template(folder)
    except OSError as error:
        raise DriverError("template-failed", f"the template cannot be kept: {error}", retryable=True) from error


async def make_template(workshop: Workshop, image: Image, machine: MachineSpec) -> Path:
    """Boot the image once, stop it when its agent answers, and keep what is there; the folder appears when whole."""
    key = template_key(workshop.engine, image, machine)
    folder = workshop.cache / f"{image.info.name}-{key[:16]}"
    if await asyncio.to_thread((folder / INFO).is_file):
        return folder
    size = f"{machine.vcpus} vCPU, {machine.memory_mib} MiB"
    workshop.progress(f"template {image.info.name}: first boot under Firecracker ({size})")
    work = Path(await asyncio.to_thread(_scratch, workshop.cache))
    jail = Jail(work, f"template-{key[:12]}", workshop.engine, workshop.jailing)
    try:
        await _boot_and_stop(workshop, image, machine, work, jail)
        info = TemplateInfo(
            key=key,
            fingerprint=workshop.engine.fingerprint,
            image_key=image.key,
            vcpus=machine.vcpus,
            memory_mib=machine.memory_mib,
            disk_mib=machine.disk_mib,
            digests={},
        )
        await asyncio.to_thread(_keep, jail, work / "out", info, folder)
    finally:
        await asyncio.to_thread(_tidy, jail, work)
    workshop.progress(f"template {image.info.name}: ready")
    return folder


async def _boot_and_stop(workshop: Workshop, image: Image, machine: MachineSpec, work: Path, jail: Jail) -> None:
    await asyncio.to_thread(_lay_out, workshop.engine, image, machine, jail)
    process = await spawn(work, jail, jail.command(machine))
    try:
        api = Api(jail.root / names.API_SOCKET)
        try:
            await boot(api, machine, workshop.limits)
            guest = await open_channel(jail.root / names.VSOCK, BOOT_S_MAX)
            try:
                await guest.hello(NOBODY, time.time_ns, BOOT_S_MAX)
                await guest.request("sync")
            finally:
                guest.close()
            await api.pause()
            snapshot = SnapshotCreate(
                snapshot_path=names.STATE_OUT, mem_file_path=names.MEMORY_OUT, snapshot_type="Full"
            )
            await api.put("/snapshot/create", snapshot, timeout_s=SNAPSHOT_S_MAX)
        finally:
            api.close()
    finally:
        await process.kill()


def _scratch(cache: Path) -> str:
    cache.mkdir(parents=True, exist_ok=True)
    return tempfile.mkdtemp(prefix=".making-", dir=cache)


def _lay_out(engine: Engine, image: Image, machine: MachineSpec, jail: Jail) -> None:
    jail.lay_out()
    if engine.version >= BZIMAGE_SINCE:
        jail.link(image.kernel, names.KERNEL)
    else:
        place_kernel(image.kernel, jail.root / names.KERNEL)
    jail.link(image.initrd, names.INITRD)
    copy(image.rootfs, jail.root / names.DISK, machine.disk_mib * 2**20)
    for name in (names.DISK, names.LOG, names.METRICS):
        jail.own(name)


def _keep(jail: Jail, out: Path, info: TemplateInfo, folder: Path) -> None:
    """Give the files their final form and place."""
    out.mkdir()
    copy_without_zeros(jail.root / names.MEMORY_OUT, out / "memory")
    (jail.root / names.STATE_OUT).rename(out / "state")
    (jail.root / names.DISK).rename(out / "disk")
    for name in FILES:
        os.chown(out / name, 0, 0)
        (out / name).chmod(0o444)
    digests = {name: digest_of(out / name) for name in FILES}
    whole = msgspec.structs.replace(info, digests=digests)
    (out / INFO).write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1))
    out.chmod(0o755)
    try:
        out.rename(folder)
    except OSError:  # another process was faster; its template is as good
        if not (folder / INFO).is_file():
            raise


def _tidy(jail: Jail, work: Path) -> None:
    jail.clear()
    for left in sorted(work.rglob("*"), reverse=True):
        left.rmdir() if left.is_dir() else left.unlink()
    work.rmdir()

"""Templates: a machine booted once per image and size, stopped and kept, from which every session starts by restore."""

import asyncio
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.qemu.engine import Engine, MachineFiles, command_line
from torpor_vm_host.adapters.qemu.guest import GuestChannel, Identity
from torpor_vm_host.adapters.qemu.process import AGENT_SOCKET, QemuProcess, Sockets
from torpor_vm_host.adapters.qemu.sealed import seal
from torpor_vm_host.images.builder import Image
from torpor_vm_host.ports import DriverError

BOOT_TIMEOUT_S: Final = 120.0
MIGRATE_POLL_S: Final = 0.002
MIGRATE_TIMEOUT_S: Final = 60.0
BANDWIDTH_MAX: Final = 1 << 40
FORMAT: Final = 1


class TemplateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `template.json` says; digests are SHA-256 in hex."""

    key: str
    fingerprint: str
    image_key: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    digests: dict[str, str]


class Template:
    """A template ready to start machines from: its memory sealed, its other files verified."""

    def __init__(self, folder: Path, info: TemplateInfo, memory: int, image: Image) -> None:
        self.folder = folder
        self.image = image
        self.info = info
        self.memory = memory
        """Descriptor of the sealed memory."""
        self.memory_digest = bytes.fromhex(info.digests["memory"])
        self.memory_inode = os.fstat(memory).st_ino

    @property
    def devices(self) -> Path:
        """The device state."""
        return self.folder / "devices"

    @property
    def disk(self) -> Path:
        """The disk's overlay, backed by the image's root file system."""
        return self.folder / "disk.qcow2"

    @property
    def empty_overlay(self) -> Path:
        """An overlay on `disk` in which nothing is written yet, to be copied for each machine."""
        return self.folder / "empty.qcow2"

    def close(self) -> None:
        """Let go of the memory; machines that map it keep it."""
        os.close(self.memory)


def template_key(engine: Engine, image: Image, machine: MachineSpec) -> str:
    """Which template a machine starts from (64 hex digits)."""
    parts = (FORMAT, engine.fingerprint, image.info.key, machine.vcpus, machine.memory_mib, machine.disk_mib)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def open_template(folder: Path, image: Image) -> Template:
    """Verify a template's files and seal its memory; raises `DriverError("template-corrupt")`."""
    info = msgspec.json.decode((folder / "template.json").read_bytes(), type=TemplateInfo)
    try:
        for name in ("devices", "disk.qcow2", "empty.qcow2"):
            _must_be_what_it_was(folder / name, info.digests[name])
        memory = seal(folder / "memory", info.digests["memory"], f"torpor-{info.key[:12]}")
    except (OSError, ValueError, KeyError) as error:
        raise DriverError("template-corrupt", f"{error}; remove {folder}: it is made anew", retryable=False) from error
    return Template(folder, info, memory, image)


def _must_be_what_it_was(path: Path, digest: str) -> None:
    if digest_of(path) != digest:
        raise ValueError(f"{path} is not what it was")


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def make_template(
    engine: Engine, image: Image, machine: MachineSpec, cache: Path, progress: Callable[[str], None]
) -> Path:
    """Boot the image once, stop it when its agent answers, and keep what is there; the folder appears when whole."""
    key = template_key(engine, image, machine)
    folder = cache / f"{image.info.name}-{key[:16]}"
    if (folder / "template.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240  (microseconds, before a boot of seconds)
    progress(f"template {image.info.name}: first boot ({machine.vcpus} vCPU, {machine.memory_mib} MiB)")
    with tempfile.TemporaryDirectory(prefix=".making-", dir=cache) as scratch:
        work = Path(scratch)
        out = work / "out"
        out.mkdir()
        await _overlay(image.rootfs, "raw", out / "disk.qcow2", machine.disk_mib)
        await _boot_and_stop(engine, image, machine, work, out)
        # The folder's final name is part of the overlay: it says where its backing file is.
        await _overlay(folder / "disk.qcow2", "qcow2", out / "empty.qcow2", machine.disk_mib)
        info = TemplateInfo(
            key=key,
            fingerprint=engine.fingerprint,
            image_key=image.info.key,
            vcpus=machine.vcpus,
            memory_mib=machine.memory_mib,
            disk_mib=machine.disk_mib,
            digests={path.name: digest_of(path) for path in sorted(out.iterdir())},
        )
        (out / "template.json").write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=1))
        for path in out.iterdir():
            path.chmod(0o444)
        out.chmod(0o755)
        try:
            out.rename(folder)
        except OSError:  # another process was faster; its template is as good
            if not (folder / "template.json").is_file():
                raise
    progress(f"template {image.info.name}: ready")
    return folder


async def _boot_and_stop(engine: Engine, image: Image, machine: MachineSpec, work: Path, out: Path) -> None:
    memory = out / "memory"
    with memory.open("wb") as file:
        file.truncate(machine.memory_mib * 1024 * 1024)
    files = MachineFiles(
        kernel=image.kernel,
        initrd=image.initrd,
        memory=str(memory),
        memory_shared=True,
        disk=out / "disk.qcow2",
    )
    sockets = Sockets(work)
    qmp_fd, agent_fd = sockets.descriptors()
    argv = command_line(engine, machine, files, qmp_fd=qmp_fd, agent_fd=agent_fd, incoming=False)
    process = await QemuProcess.spawn(work, argv, sockets, ())
    sockets.close()
    try:
        guest = await GuestChannel.connect(work / AGENT_SOCKET)
        nobody = Identity(
            session_id="template", incarnation=0, epoch="template", hostname="template", machine_id="0" * 32
        )
        await guest.hello(nobody, BOOT_TIMEOUT_S)
        await guest.request("sync")
        await guest.close()
        await process.command("stop")
        await process.command(
            "migrate-set-capabilities", capabilities=[{"capability": "x-ignore-shared", "state": True}]
        )
        await process.command("migrate-set-parameters", max_bandwidth=BANDWIDTH_MAX)
        with (out / "devices").open("wb") as state:
            await process.send_descriptor("state", state.fileno())
            await process.command("migrate", uri="fd:state")
            await _migrated(process)
    finally:
        await process.kill()


async def _migrated(process: QemuProcess) -> None:
    deadline = asyncio.get_running_loop().time() + MIGRATE_TIMEOUT_S
    while (status := (await process.command("query-migrate")).get("status")) != "completed":
        if status == "failed" or asyncio.get_running_loop().time() > deadline:
            raise DriverError("template-failed", f"QEMU could not write the machine's state ({status})", retryable=True)
        await asyncio.sleep(MIGRATE_POLL_S)


async def _overlay(backing: Path, form: str, target: Path, disk_mib: int) -> None:
    """An empty qcow2 overlay of the given size on `backing` (which need not be there yet)."""
    tool = shutil.which("qemu-img")
    if tool is None:
        raise DriverError(
            "qemu-missing", "qemu-img is not installed (sudo apt-get install qemu-utils)", retryable=False
        )
    made = await asyncio.to_thread(
        subprocess.run,
        [tool, "create", "-q", "-f", "qcow2", "-u", "-b", str(backing), "-F", form, str(target), f"{disk_mib}M"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if made.returncode != 0:
        raise DriverError("disk-failed", f"qemu-img: {made.stderr.strip()}", retryable=True)

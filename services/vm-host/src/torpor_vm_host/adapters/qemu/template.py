"""A template: a machine booted once per image and size, stopped and kept, from which every session starts by restore.

Its folder holds all it is made of, so neither a new image nor an emptied cache takes anything from checkpoints that
build on it. Which template a checkpoint builds on is said by the digest of the template's memory.
"""

import hashlib
import os
import weakref
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.qemu.digests import digest_of, sparse_digest_of, verify
from torpor_vm_host.adapters.qemu.engine import Engine
from torpor_vm_host.adapters.qemu.sealed import Sealed, seal
from torpor_vm_host.images.builder import Image
from torpor_vm_host.ports import Base, DriverError

__all__ = [
    "FILES",
    "Template",
    "TemplateInfo",
    "base",
    "check_received",
    "digest_of",
    "open_template",
    "read_info",
    "template_key",
]

FORMAT: Final = 2
KERNEL: Final = "kernel"
INITRD: Final = "initrd"
ROOTFS: Final = "rootfs"
MEMORY: Final = "memory"
DEVICES: Final = "devices"
DISK: Final = "disk.qcow2"
EMPTY: Final = "empty.qcow2"
"""An overlay on `DISK` in which nothing is written yet, to be copied for each machine."""
INFO: Final = "template.json"
FILES: Final = (KERNEL, INITRD, ROOTFS, MEMORY, DEVICES, DISK, EMPTY)


class TemplateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `template.json` says. Digests are SHA-256 in hex, that of the memory a sparse one (`digests.py`)."""

    format: int
    key: str
    fingerprint: str
    image: str
    image_key: str
    machine: MachineSpec
    digests: dict[str, str]


class Template:
    """A template ready to start machines from: its memory sealed, its other files verified and open."""

    def __init__(self, folder: Path, info: TemplateInfo, memory: Sealed) -> None:
        self.folder = folder
        self.info = info
        self.memory = memory
        self.memory_digest = bytes.fromhex(info.digests[MEMORY])
        opened = {name: os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC) for name in (KERNEL, INITRD, ROOTFS, DISK)}
        self.kernel, self.initrd, self.rootfs, self.disk = opened.values()
        self.devices = (folder / DEVICES).read_bytes()
        self._close = weakref.finalize(self, _close_all, list(opened.values()))

    @property
    def empty_overlay(self) -> Path:
        """The overlay to be copied for each machine."""
        return self.folder / EMPTY

    def close(self) -> None:
        """Let go of it; machines that were started from it keep what they need."""
        self._close()


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def base(template: Template) -> Base:
    """A template as what checkpoints build on."""
    return Base(name=template.info.digests[MEMORY], files={name: template.folder / name for name in (*FILES, INFO)})


def template_key(engine: Engine, image: Image, machine: MachineSpec) -> str:
    """Which template a machine starts from (64 hex digits); machines of one key may have different templates."""
    size = machine.vcpus, machine.memory_mib, machine.disk_mib
    return hashlib.sha256(msgspec.json.encode((FORMAT, engine.fingerprint, image.key, *size))).hexdigest()


def read_info(folder: Path) -> TemplateInfo | None:
    """What a template's folder says of itself; None when it is none, or of another release."""
    try:
        info = msgspec.json.decode((folder / INFO).read_bytes(), type=TemplateInfo)
    except (OSError, msgspec.MsgspecError):
        return None
    return info if info.format == FORMAT else None


def check_received(folder: Path, memory_digest: str) -> Template:
    """A template that came from elsewhere, open; raises `DriverError("template-corrupt")` unless it is this one."""
    info = read_info(folder)
    try:
        if info is None or info.digests.get(MEMORY) != memory_digest:
            why = "it is another"
        # Sealing does not read what is sealed in this process already.
        elif sparse_digest_of(folder / MEMORY) != memory_digest:
            why = "its memory has another digest"
        else:
            return open_template(folder)
    except OSError as error:
        why = str(error)
    except DriverError as error:
        why = error.detail
    raise DriverError(
        "template-corrupt", f"what came as the template {memory_digest[:16]} is not it: {why}", retryable=False
    )


def open_template(folder: Path) -> Template:
    """Verify a template's files and seal its memory; raises `DriverError("template-corrupt")`."""
    info = read_info(folder)
    try:
        if info is None:
            raise ValueError(f"{folder / INFO} cannot be read")  # noqa: TRY301  (said with the others, below)
        for name in FILES:
            if name != MEMORY:
                verify(folder / name, info.digests[name])
        return Template(folder, info, seal(folder / MEMORY, info.digests[MEMORY]))
    except (OSError, ValueError, KeyError) as error:
        detail = f"{error}; without it, remove {folder}: it is made anew, but old checkpoints need this one"
        raise DriverError("template-corrupt", detail, retryable=False) from error

"""A checkpoint's three parts: written by a machine that stands still, checked together before one starts from them."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from torpor_vm_host.adapters.qemu.devices import Binding, bound, loadable, unbound
from torpor_vm_host.adapters.qemu.digests import digest_of
from torpor_vm_host.adapters.qemu.memory import read_header, write_page_file
from torpor_vm_host.adapters.qemu.template import Template
from torpor_vm_host.ports import CheckpointFiles, DriverError, PartFile

MEMORY: Final = "memory"
DEVICES: Final = "devices"
DISK: Final = "disk"


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Parts that belong together: `state` is loadable, `memory` and `disk` are files over a template."""

    memory: Path
    state: bytes
    disk: Path
    template_digest: str


def base_digest(checkpoint: CheckpointFiles) -> str | None:
    """The digest of the template's memory that a checkpoint builds on; None where it does not say."""
    try:
        return read_header(checkpoint.files["memory"]).base_digest.hex()
    except (KeyError, OSError, ValueError):
        return None


def check(checkpoint: CheckpointFiles, fingerprint: str) -> Parts:
    """The parts, once each is whole and all are of one generation and of this engine.

    Raises `DriverError` `checkpoint-corrupt` or `checkpoint-mismatched`; nothing has run by then.
    """
    try:
        files = {kind: checkpoint.files[kind] for kind in ("memory", "devices", "disk")}
        binding, state = unbound(files["devices"].read_bytes())
        header = read_header(files["memory"])
        digests = {"memory": digest_of(files["memory"]), "disk": digest_of(files["disk"])}
    except KeyError as error:
        raise DriverError("checkpoint-corrupt", f"the part {error} is missing", retryable=False) from error
    except (OSError, ValueError) as error:
        raise DriverError("checkpoint-corrupt", str(error), retryable=False) from error
    if hashlib.sha256(state).hexdigest() != binding.state_digest:
        raise DriverError("checkpoint-corrupt", "the device state is not what it was", retryable=False)
    if binding.fingerprint != fingerprint:
        raise _mismatched(f"it was made by {binding.fingerprint}, this host runs {fingerprint}")
    for kind, expected in (("memory", binding.memory_digest), ("disk", binding.disk_digest)):
        if digests[kind] != expected:
            raise _mismatched(
                f"the {kind} is not the one this device state belongs to: it is damaged, or of another generation"
            )
    return Parts(memory=files["memory"], state=state, disk=files["disk"], template_digest=header.base_digest.hex())


def write(captured: Iterable[tuple[int, bytes]], raw_state: bytes, template: Template, to: Path) -> list[PartFile]:
    """Write the memory and the devices durably into the directory `to`, where the disk is already."""
    memory, devices, disk = to / MEMORY, to / DEVICES, to / DISK
    write_page_file(captured, template.memory.descriptor, template.memory_digest, memory)
    state = loadable(raw_state)
    binding = Binding(
        fingerprint=template.info.fingerprint,
        template_key=template.info.key,
        memory_digest=digest_of(memory),
        disk_digest=digest_of(disk),
        state_digest=hashlib.sha256(state).hexdigest(),
    )
    devices.write_bytes(bound(state, binding))
    for path in (devices, disk, to):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return [
        PartFile(kind="memory", path=memory, head_bytes=read_header(memory).length),
        PartFile(kind="devices", path=devices),
        PartFile(kind="disk", path=disk),
    ]


def _mismatched(detail: str) -> DriverError:
    return DriverError("checkpoint-mismatched", detail, retryable=False)

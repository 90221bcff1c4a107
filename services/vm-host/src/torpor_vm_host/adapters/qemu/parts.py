"""A checkpoint's three parts: written by a machine that stands still, checked together before one starts from them."""

import hashlib
import os
import shutil
from pathlib import Path

import msgspec

from torpor_vm_host.adapters.qemu import memory as pages
from torpor_vm_host.adapters.qemu.devices import Binding, bound, loadable, unbound
from torpor_vm_host.adapters.qemu.template import Template, digest_of
from torpor_vm_host.ports import CheckpointFiles, DriverError, PartFile


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Parts that belong together: `state` is loadable, `memory` and `disk` are files."""

    memory: Path
    state: bytes
    disk: Path


def check(checkpoint: CheckpointFiles, template: Template) -> Parts:
    """The parts, once each is whole and all are of one generation and of this engine and template.

    Raises `DriverError` `checkpoint-corrupt` or `checkpoint-mismatched`; nothing has been started then.
    """
    try:
        files = {kind: checkpoint.files[kind] for kind in ("memory", "devices", "disk")}
        binding, state = unbound(files["devices"].read_bytes())
        header = pages.read_header(files["memory"])
        digests = {"memory": digest_of(files["memory"]), "disk": digest_of(files["disk"])}
    except KeyError as error:
        raise DriverError("checkpoint-corrupt", f"the part {error} is missing", retryable=False) from error
    except (OSError, ValueError) as error:
        raise DriverError("checkpoint-corrupt", str(error), retryable=False) from error
    if hashlib.sha256(state).hexdigest() != binding.state_digest:
        raise DriverError("checkpoint-corrupt", "the device state is not what it was", retryable=False)
    if binding.fingerprint != template.info.fingerprint:
        raise DriverError(
            "checkpoint-mismatched",
            f"it was made by {binding.fingerprint}, this host runs {template.info.fingerprint}",
            retryable=False,
        )
    if binding.template_key != template.info.key or header.base_digest != template.memory_digest:
        raise DriverError("checkpoint-mismatched", "its memory builds on another template", retryable=False)
    for kind, expected in (("memory", binding.memory_digest), ("disk", binding.disk_digest)):
        if digests[kind] != expected:
            raise DriverError(
                "checkpoint-mismatched",
                f"the {kind} is not the one this device state belongs to: it is damaged, or of another generation",
                retryable=False,
            )
    return Parts(memory=files["memory"], state=state, disk=files["disk"])


def write(
    captured: list[tuple[int, bytes]], raw_state: bytes, own_disk: Path, template: Template, to: Path
) -> list[PartFile]:
    """Write the three parts durably into the directory `to`."""
    memory, devices, disk = to / "memory", to / "devices", to / "disk"
    pages.write_page_file(captured, template.memory, template.memory_digest, memory)
    shutil.copyfile(own_disk, disk)
    state = loadable(raw_state)
    binding = Binding(
        fingerprint=template.info.fingerprint,
        template_key=template.info.key,
        memory_digest=digest_of(memory),
        disk_digest=digest_of(disk),
        state_digest=hashlib.sha256(state).hexdigest(),
    )
    devices.write_bytes(bound(state, binding))
    for path in (devices, disk):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return [
        PartFile(kind="memory", path=memory, head_bytes=pages.read_header(memory).length),
        PartFile(kind="devices", path=devices),
        PartFile(kind="disk", path=disk),
    ]

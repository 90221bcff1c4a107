"""A checkpoint's three parts: bound to each other and to this engine, checked together before one starts from them."""

import hashlib
import os
from pathlib import Path

import msgspec

from torpor_vm_host.adapters.firecracker.template import Template
from torpor_vm_host.adapters.qemu.devices import Binding, bound, unbound
from torpor_vm_host.adapters.qemu.digests import digest_of
from torpor_vm_host.adapters.qemu.memory import read_header
from torpor_vm_host.ports import CheckpointFiles, DriverError, PartFile


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Parts that belong together: page files of memory and disk, and the state that Firecracker loads."""

    memory: Path
    disk: Path
    state: bytes


def base_digest(checkpoint: CheckpointFiles) -> str | None:
    """The digest of the memory that a checkpoint's memory builds on, or None where it does not say."""
    try:
        return read_header(checkpoint.files["memory"]).base_digest.hex()
    except (KeyError, OSError, ValueError):
        return None


def check(checkpoint: CheckpointFiles, fingerprint: str, template: Template | None) -> Parts:
    """The parts, once each is whole and all are of one generation and of this engine and template, which must be there.

    Firecracker checks its own state only, and only against accidents (a CRC); memory and disk it takes as they are.
    Raises `DriverError` `checkpoint-corrupt`, `checkpoint-mismatched` or `template-missing`; nothing has been started.
    """
    try:
        files = {kind: checkpoint.files[kind] for kind in ("memory", "devices", "disk")}
        binding, state = unbound(files["devices"].read_bytes())
        bases = {kind: read_header(files[kind]).base_digest.hex() for kind in ("memory", "disk")}
        digests = {kind: digest_of(files[kind]) for kind in ("memory", "disk")}
    except KeyError as error:
        raise DriverError("checkpoint-corrupt", f"the part {error} is missing", retryable=False) from error
    except (OSError, ValueError) as error:
        raise DriverError("checkpoint-corrupt", str(error), retryable=False) from error
    if hashlib.sha256(state).hexdigest() != binding.state_digest:
        raise DriverError("checkpoint-corrupt", "the device state is not what it was", retryable=False)
    if binding.fingerprint != fingerprint:
        raise DriverError(
            "checkpoint-mismatched",
            f"it was made by {binding.fingerprint}, this host runs {fingerprint}",
            retryable=False,
        )
    if template is None:
        detail = f"it builds on the template {bases['memory'][:16]}, which is not on this host"
        raise DriverError("template-missing", detail, retryable=False)
    expected = {"memory": template.info.digests["memory"], "disk": template.info.digests["disk"]}
    if binding.template_key != template.info.key or bases != expected:
        raise DriverError("checkpoint-mismatched", "it builds on another template", retryable=False)
    if digests != {"memory": binding.memory_digest, "disk": binding.disk_digest}:
        raise DriverError(
            "checkpoint-mismatched",
            "memory or disk are not those this device state belongs to: damaged, or of another generation",
            retryable=False,
        )
    return Parts(memory=files["memory"], disk=files["disk"], state=state)


def bind(memory: Path, disk: Path, state: bytes, template: Template, to: Path) -> list[PartFile]:
    """Write the devices part, which says what memory and disk it belongs to, into the directory `to`; all parts."""
    devices = to / "devices"
    binding = Binding(
        fingerprint=template.info.fingerprint,
        template_key=template.info.key,
        memory_digest=digest_of(memory),
        disk_digest=digest_of(disk),
        state_digest=hashlib.sha256(state).hexdigest(),
    )
    with devices.open("wb") as file:
        file.write(bound(state, binding))
        file.flush()
        os.fsync(file.fileno())
    return [
        PartFile(kind="memory", path=memory, head_bytes=read_header(memory).length),
        PartFile(kind="devices", path=devices),
        PartFile(kind="disk", path=disk, head_bytes=read_header(disk).length),
    ]

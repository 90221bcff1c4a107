"""How a simulated machine is written into the three parts of a checkpoint, and made again from them."""

import os
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from torpor_chunks.os_errors import typed
from torpor_contracts.ids import ExecId
from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.simulated.machine import Machine, Meta, Process
from torpor_vm_host.ports import CheckpointFiles, DriverError, PartFile, PartKind, VmSpec

FINGERPRINT: Final = "simulated-1"

Part = TypeVar("Part", "Memory", "Devices", "Disk")


class Memory(msgspec.Struct, frozen=True, kw_only=True, tag="memory", forbid_unknown_fields=True):
    """What is lost when the machine is; the programs stand still at `paused_us`."""

    generation: str
    memory_mib: int
    paused_us: int
    counter: int
    variables: dict[str, str]
    processes: dict[ExecId, Process]


class Devices(msgspec.Struct, frozen=True, kw_only=True, tag="devices", forbid_unknown_fields=True):
    """The engine that can load the checkpoint, and what it builds on."""

    generation: str
    fingerprint: str
    vcpus: int
    base: str = ""


class Disk(msgspec.Struct, frozen=True, kw_only=True, tag="disk", forbid_unknown_fields=True):
    """The files."""

    generation: str
    image: str
    files: dict[str, bytes]
    folders: dict[str, Meta] = {}
    metas: dict[str, Meta] = {}
    uploads: dict[str, bytes] = {}


def write_parts(machine: Machine, directory: Path) -> list[PartFile]:
    """Write a paused machine's parts into `directory`, durably; the same state gives the same bytes."""
    assert machine.paused_us is not None, "only a machine that stands still can be written"
    generation = f"{machine.vm_id}-{machine.generation}"
    parts: dict[PartKind, msgspec.Struct] = {
        "memory": Memory(
            generation=generation,
            memory_mib=machine.spec.memory_mib,
            paused_us=machine.paused_us,
            counter=machine.counter,
            variables=machine.variables,
            processes=machine.processes,
        ),
        "devices": Devices(generation=generation, fingerprint=FINGERPRINT, vcpus=machine.spec.vcpus, base=machine.base),
        "disk": Disk(
            generation=generation,
            image=machine.spec.image,
            files=machine.files,
            folders=machine.folders,
            metas=machine.metas,
            uploads=machine.uploads,
        ),
    }
    return [_written(kind, directory / kind, part) for kind, part in parts.items()]


def machine_from(spec: VmSpec, checkpoint: CheckpointFiles | None) -> Machine:
    """A machine that stands still: a fresh one, or what the checkpoint holds, under the identity of `spec`."""
    machine = Machine(
        vm_id=spec.vm_id,
        tenant_id=spec.tenant_id,
        session_id=spec.session_id,
        incarnation=spec.incarnation,
        spec=spec.machine,
        state="starting",
    )
    if checkpoint is None:
        return machine
    memory = _read(checkpoint, "memory", Memory)
    devices = _read(checkpoint, "devices", Devices)
    disk = _read(checkpoint, "disk", Disk)
    generations = {memory.generation, devices.generation, disk.generation}
    if len(generations) != 1:
        raise _mismatched(f"the parts are of different generations: {', '.join(sorted(generations))}")
    if devices.fingerprint != FINGERPRINT:
        raise _mismatched(f"it was made by {devices.fingerprint!r}, this engine is {FINGERPRINT!r}")
    if (memory.memory_mib, devices.vcpus) != (spec.machine.memory_mib, spec.machine.vcpus):
        raise _mismatched("it is of a machine of another size")
    machine.base = devices.base
    machine.counter, machine.variables = memory.counter, memory.variables
    machine.processes, machine.paused_us = memory.processes, memory.paused_us
    machine.files, machine.folders = disk.files, disk.folders
    machine.metas, machine.uploads = disk.metas, disk.uploads
    return machine


def base_of(checkpoint: CheckpointFiles) -> str:
    """The name of what a checkpoint builds on; empty where that is nothing, or cannot be read."""
    try:
        return _read(checkpoint, "devices", Devices).base
    except DriverError:
        return ""


def refuse_unknown(machine: MachineSpec) -> None:
    """A simulated machine has one image and needs at least something of everything."""
    if machine.image != "default":
        raise DriverError("image-unknown", f"there is no image {machine.image!r}; there is 'default'", retryable=False)
    if min(machine.vcpus, machine.memory_mib, machine.disk_mib) < 1:
        raise DriverError("machine-refused", "a machine needs a vCPU, memory and a disk", retryable=False)


def _written(kind: PartKind, path: Path, part: msgspec.Struct) -> PartFile:
    with typed(path), path.open("wb") as file:
        file.write(msgspec.json.encode(part))
        file.flush()
        os.fsync(file.fileno())
    return PartFile(kind=kind, path=path)


def _read(checkpoint: CheckpointFiles, kind: PartKind, expected: type[Part]) -> Part:
    path = checkpoint.files.get(kind)
    if path is None:
        raise _corrupt(f"it has no {kind}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=expected)
    except (OSError, msgspec.MsgspecError) as error:
        raise _corrupt(f"its {kind} cannot be read: {error}") from error


def _corrupt(why: str) -> DriverError:
    return DriverError("checkpoint-corrupt", why, retryable=False)


def _mismatched(why: str) -> DriverError:
    return DriverError("checkpoint-mismatched", why, retryable=False)

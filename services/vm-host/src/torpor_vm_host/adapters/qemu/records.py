"""What is written beside a machine: what it was started for, and that its start came to its end."""

from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.ids import SessionId, VmId
from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.qemu.guest import Identity

SPEC: Final = "spec.json"
STARTED: Final = "started"
DISK: Final = "disk.qcow2"


class KeptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine was started for; `memory_digest` is that of its template's memory."""

    vm_id: VmId
    session_id: SessionId
    incarnation: int
    machine: MachineSpec
    memory_digest: str
    identity: Identity


def write_spec(directory: Path, kept: KeptSpec) -> None:
    """Note what the machine is started for, before anything of it exists."""
    (directory / STARTED).unlink(missing_ok=True)
    fresh = directory / f".{SPEC}"
    fresh.write_bytes(msgspec.json.encode(kept))
    fresh.replace(directory / SPEC)


def read_spec(directory: Path) -> KeptSpec | None:
    """What the machine in this directory was started for; None when that cannot be read."""
    try:
        return msgspec.json.decode((directory / SPEC).read_bytes(), type=KeptSpec)
    except (OSError, msgspec.MsgspecError):
        return None


def note_started(directory: Path) -> None:
    """The machine's start has come to its end: its guest has answered."""
    (directory / STARTED).touch()


def is_started(directory: Path) -> bool:
    """Whether the machine's start has come to its end."""
    return (directory / STARTED).exists()

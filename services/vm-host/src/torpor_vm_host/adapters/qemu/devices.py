"""The device state of a checkpoint: made loadable on its own, and bound to the memory and disk it belongs to."""

import hashlib
from typing import Final

import msgspec

MACHINE: Final = b"microvm"
SECTION_CONFIGURATION: Final = b"\x07"
NO_DESCRIPTION: Final = b"\x06" + bytes(4)
HEADER_BYTES: Final = 8
"""The magic `QEVM` and the version of a QEMU state stream."""
MAGIC: Final = b"TORPORD2"
LENGTH_BYTES: Final = 4
DIGEST_BYTES: Final = 32
BINDING_BYTES_MAX: Final = 64 * 1024


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """What a device state goes with; digests are SHA-256 in hex."""

    fingerprint: str
    template_key: str
    memory_digest: str
    disk_digest: str
    state_digest: str


def loadable(state: bytes) -> bytes:
    """The output of `xen-save-devices-state` with the configuration section that `migrate-incoming` asks for.

    That command leaves the section out (QEMU: migration/savevm.c, qmp_xen_save_devices_state); it is one type byte,
    the length of the machine's name as a big-endian u32, and the name. Another that is left out stands at the end:
    the description of the state in JSON, whose absence would be complained of; an empty one is enough.
    """
    if state[:4] != b"QEVM" or len(state) <= HEADER_BYTES:
        raise ValueError("this is no QEMU device state")
    section = SECTION_CONFIGURATION + len(MACHINE).to_bytes(4, "big") + MACHINE
    return state[:HEADER_BYTES] + section + state[HEADER_BYTES:] + NO_DESCRIPTION


def bound(state: bytes, binding: Binding) -> bytes:
    """A checkpoint's devices part: the binding with its digest, then the state, whose digest the binding has."""
    head = msgspec.json.encode(binding)
    return MAGIC + len(head).to_bytes(LENGTH_BYTES, "big") + hashlib.sha256(head).digest() + head + state


def unbound(part: bytes) -> tuple[Binding, bytes]:
    """The binding and the state of a devices part; `ValueError` when it is none."""
    at = len(MAGIC) + LENGTH_BYTES
    length = int.from_bytes(part[len(MAGIC) : at], "big")
    if part[: len(MAGIC)] != MAGIC or length > BINDING_BYTES_MAX:
        raise ValueError("this is no device state of a checkpoint")
    digest, head = part[at : at + DIGEST_BYTES], part[at + DIGEST_BYTES : at + DIGEST_BYTES + length]
    if hashlib.sha256(head).digest() != digest:
        raise ValueError("the binding of the device state is not what it was")
    try:
        return msgspec.json.decode(head, type=Binding), part[at + DIGEST_BYTES + length :]
    except msgspec.DecodeError as error:
        raise ValueError(f"the binding of the device state cannot be read: {error}") from error

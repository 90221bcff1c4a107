"""Seals the sections of one pack: AES-256-GCM under a key that is the pack's own, bound to who and what it is."""

import hashlib
import hmac
import os
import struct
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from torpor_chunks.port import PartCorrupt

MAGIC: Final = b"TORPORPK"
FORMAT: Final = 1
_HEADER: Final = struct.Struct("<8sII32s")
HEADER_BYTES: Final = _HEADER.size
KEY_BYTES: Final = 32
SEAL_BYTES: Final = 16
"""What sealing adds: the tag."""

FRAME: Final = 0
INDEX: Final = 1
MANIFEST: Final = 2


class Header(NamedTuple):
    """What a pack begins with, in the clear: which of the tenant's keys it is under, and its own salt."""

    key_version: int
    salt: bytes

    def encoded(self) -> bytes:
        """The header's bytes."""
        return _HEADER.pack(MAGIC, FORMAT, self.key_version, self.salt)


def new_header(key_version: int) -> Header:
    """A header with a salt nobody has used."""
    return Header(key_version, os.urandom(32))


def decode_header(data: bytes, what: str) -> Header:
    """The header of a pack; raises `PartCorrupt`."""
    if len(data) < HEADER_BYTES:
        raise PartCorrupt(f"{what} is too short to be a pack")
    magic, form, version, salt = _HEADER.unpack_from(data)
    if magic != MAGIC or form != FORMAT:
        raise PartCorrupt(f"{what} is no pack of format {FORMAT}")
    return Header(version, salt)


def derived(secret: bytes, salt: bytes, purpose: str) -> bytes:
    """A key of 32 bytes for one purpose: HKDF-SHA256 (RFC 5869) with one block of output."""
    extracted = hmac.digest(salt, secret, hashlib.sha256)
    return hmac.digest(extracted, purpose.encode() + b"\x01", hashlib.sha256)


class Seal:
    """Seals and opens what is in one pack; a nonce is a section's kind and number, so none is used twice.

    The header is authenticated with each section, the tenant and the pack's address are part of the key: a section
    authenticates nowhere else.
    """

    def __init__(self, secret: bytes, tenant_id: str, address: str, header: Header) -> None:
        self._what = address
        self._header = header.encoded()
        self._cipher = AESGCM(derived(secret, header.salt, f"torpor pack {FORMAT} {tenant_id} {address}"))

    def seal(self, kind: int, number: int, data: bytes) -> bytes:
        """A sealed section."""
        return self._cipher.encrypt(_nonce(kind, number), data, self._header)

    def open(self, kind: int, number: int, data: bytes) -> bytes:
        """What is in a section; raises `PartCorrupt` for one that is not as it was sealed."""
        try:
            return self._cipher.decrypt(_nonce(kind, number), data, self._header)
        except (InvalidTag, ValueError) as error:
            raise PartCorrupt(f"{self._what}: section {kind}/{number} is not what was put there") from error


def _nonce(kind: int, number: int) -> bytes:
    return kind.to_bytes(4, "big") + number.to_bytes(8, "big")

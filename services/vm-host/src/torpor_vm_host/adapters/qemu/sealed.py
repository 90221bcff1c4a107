"""Templates' memory in sealed memory files: verified once, then nobody can change a byte of it, on disk or off."""

import fcntl
import hashlib
import os
from pathlib import Path
from typing import Final

PIECE: Final = 1024 * 1024
F_ADD_SEALS: Final = 1033
SEALS: Final = 0x0001 | 0x0002 | 0x0004 | 0x0008
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE (linux/fcntl.h)."""
ZEROS: Final = bytes(PIECE)


def seal(source: Path, digest: str, name: str) -> int:
    """A sealed memory file with the bytes of `source`, whose SHA-256 must be `digest` (hex); holes stay holes.

    Raises `ValueError` when the bytes are others. The caller closes the descriptor.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    hasher = hashlib.sha256()
    try:
        with source.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            os.ftruncate(descriptor, size)
            at = 0
            while data := file.read(PIECE):
                hasher.update(data)
                if data != ZEROS[: len(data)]:
                    _write(descriptor, data, at)
                at += len(data)
        _must_be(source, hasher.hexdigest(), digest)
        fcntl.fcntl(descriptor, F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _must_be(source: Path, found: str, digest: str) -> None:
    if found != digest:
        raise ValueError(f"{source} has the digest {found}, not {digest}")


def _write(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written

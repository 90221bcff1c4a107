"""Templates' memory in sealed memory files: verified once, then nobody can change a byte of it, on disk or off."""

import fcntl
import os
import weakref
from pathlib import Path
from typing import Final

from torpor_vm_host.adapters.qemu.digests import PIECE, ZEROS, SparseDigest, pieces_with_data

F_ADD_SEALS: Final = 1033
SEALS: Final = 0x0001 | 0x0002 | 0x0004 | 0x0008
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE (linux/fcntl.h)."""
NAME_DIGITS: Final = 32


class Sealed:
    """A sealed memory file. Its descriptor is open for as long as somebody holds this object."""

    def __init__(self, descriptor: int, digest: str) -> None:
        self.descriptor = descriptor
        self.digest = digest
        self.name = memory_name(digest)
        weakref.finalize(self, os.close, descriptor)


_open: Final[weakref.WeakValueDictionary[str, Sealed]] = weakref.WeakValueDictionary()
"""Digest -> the memory file of this process with it: templates that are the same share one."""


def memory_name(digest: str) -> str:
    """The name by which a memory file is known in the address space of a process that maps it."""
    return f"torpor-{digest[:NAME_DIGITS]}"


def seal(source: Path, digest: str) -> Sealed:
    """A sealed memory file with the bytes of `source`, whose sparse digest must be this one; holes stay holes.

    Raises `ValueError` when the bytes are others.
    """
    known = _open.get(digest)
    if known is not None:
        return known
    descriptor = os.memfd_create(memory_name(digest), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with source.open("rb", buffering=0) as file:
            found = copy_sparse(file.fileno(), descriptor)
        if found != digest:
            raise ValueError(f"{source} has the digest {found}, not {digest}")  # noqa: TRY301  (closes below)
        fcntl.fcntl(descriptor, F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    sealed = _open[digest] = Sealed(descriptor, digest)
    return sealed


def copy_sparse(source: int, target: int) -> str:
    """Copy a file into an empty one, leaving holes where there are zeros; its sparse digest."""
    size, digest = os.fstat(source).st_size, SparseDigest()
    os.ftruncate(target, size)
    for at in pieces_with_data(source, size):
        piece = os.pread(source, PIECE, at)
        if piece != ZEROS[: len(piece)]:
            digest.update(at, piece)
            _write(target, piece, at)
    return digest.finished(size)


def _write(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written

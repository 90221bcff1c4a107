"""Copies of large files that cost little: shared blocks where the file system can, holes left out where it cannot."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from torpor_vm_host.adapters.firecracker.deltas import PIECE, extents

FICLONE: Final = 0x40049409
CANNOT_CLONE: Final = {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.EPERM, errno.ETXTBSY}
COPY_BYTES: Final = 16 * 1024 * 1024


def clone(source: Path, target: Path) -> bool:
    """Let a new file share all blocks of `source`; False, and no file, where the file system cannot."""
    with source.open("rb", buffering=0) as old, target.open("xb", buffering=0) as new:
        try:
            fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
        except OSError as error:
            target.unlink()
            if error.errno not in CANNOT_CLONE:
                raise
            return False
    return True


def copy(source: Path, target: Path, size: int | None = None) -> None:
    """Copy `source` to a new file `target`, which has `size` bytes (more than the source) when that is given."""
    if not clone(source, target):
        with source.open("rb", buffering=0) as old, target.open("xb", buffering=0) as new:
            length = os.fstat(old.fileno()).st_size
            os.ftruncate(new.fileno(), length)
            for start, end in extents(old.fileno(), length):
                _copy_range(old.fileno(), new.fileno(), start, end)
    if size is not None:
        os.truncate(target, size)


def copy_without_zeros(source: Path, target: Path) -> None:
    """Copy a file, leaving holes where it has nothing but zeros, durably."""
    zeros = bytes(PIECE)
    with source.open("rb", buffering=0) as old, target.open("xb", buffering=0) as new:
        size = os.fstat(old.fileno()).st_size
        os.ftruncate(new.fileno(), size)
        for at in range(0, size, PIECE):
            piece = os.pread(old.fileno(), PIECE, at)
            if piece != zeros[: len(piece)]:
                os.pwrite(new.fileno(), piece, at)
        os.fsync(new.fileno())


def _copy_range(old: int, new: int, start: int, end: int) -> None:
    at = start
    while at < end:
        done = os.copy_file_range(old, new, min(COPY_BYTES, end - at), at, at)
        if done == 0:  # the source ends inside its last page
            return
        at += done

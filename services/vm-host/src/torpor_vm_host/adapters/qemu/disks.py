"""Disk images: overlays, how they are copied, and how many bytes of a file are really there."""

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from torpor_vm_host.ports import DriverError

FICLONE: Final = 0x40049409
PIECE_MAX: Final = 64 * 1024 * 1024
READ_MAX: Final = 1024 * 1024
FULL: Final = {errno.ENOSPC, errno.EDQUOT}
NO_CLONES: Final = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS}


def refused(error: OSError, code: str, what: str = "") -> DriverError:
    """What the operating system refuses, as a driver's error: `no-space` where the disk is full, else of this code."""
    detail = f"{what}: {error}" if what else str(error)
    return DriverError("no-space" if error.errno in FULL else code, detail, retryable=True)


def overlay(backing: str, form: str, target: Path, disk_mib: int) -> None:
    """An empty qcow2 overlay of the given size on a file beside it (which need not be there yet)."""
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-u", "-b", backing, "-F", form, str(target), f"{disk_mib}M"]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DriverError("disk-failed", f"qemu-img cannot be run: {error}", retryable=True) from error
    if made.returncode != 0:
        raise DriverError("disk-failed", f"qemu-img: {made.stderr.strip()}", retryable=True)


def copy_over(source: Path, target: Path) -> None:
    """Make `target` hold what `source` holds; it stays the same file, and nobody else can read it.

    Where the file system can, both share their blocks until one is written to; holes stay holes. Raises `OSError`.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with source.open("rb", buffering=0) as read, os.fdopen(os.open(target, flags, 0o600), "r+b", buffering=0) as write:
        os.ftruncate(write.fileno(), 0)
        try:
            fcntl.ioctl(write.fileno(), FICLONE, read.fileno())
        except OSError as error:
            if error.errno not in NO_CLONES:
                raise
            _copy_data(read.fileno(), write.fileno())


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for a file that nobody writes to again; a copy where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        copy_over(source, target)
        shutil.copymode(source, target)


def _copy_data(source: int, target: int) -> None:
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    at = 0
    # Behind the last of the data there is nothing more to find: ENXIO.
    with contextlib.suppress(_NothingMore):
        while at < size:
            at = _seek(source, at, os.SEEK_DATA)
            end = _seek(source, at, os.SEEK_HOLE)
            while at < end:
                at += _copy_piece(source, target, at, min(end - at, PIECE_MAX))


def _copy_piece(source: int, target: int, at: int, length: int) -> int:
    """Copy at most this much, without reading it where the kernel can; how much it was."""
    try:
        copied = os.copy_file_range(source, target, length, at, at)
    except OSError as error:
        if error.errno not in NO_CLONES:
            raise
        copied = os.pwrite(target, os.pread(source, min(length, READ_MAX), at), at)
    if copied == 0:
        raise OSError(errno.EIO, "a file became shorter while it was copied")
    return copied


class _NothingMore(Exception):  # noqa: N818
    """Only a hole is left."""


def _seek(descriptor: int, at: int, what: int) -> int:
    try:
        return os.lseek(descriptor, at, what)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _NothingMore from None
        raise

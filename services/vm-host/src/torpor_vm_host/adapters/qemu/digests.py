"""Digests of files; one that was verified is not read again while it is the same file, untouched."""

import hashlib
import os
from pathlib import Path
from typing import Final

PIECE: Final = 1024 * 1024
ZEROS: Final = bytes(PIECE)

_verified: Final[dict[tuple[int, int, int, int, int], str]] = {}
"""Device, inode, size, times of writing and of change -> digest. The kernel sets the last; nobody else can."""


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, digest: str) -> None:
    """Raises `ValueError` unless the file's SHA-256 is this one; for files that nobody writes to again."""
    found = path.stat()
    known = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    if _verified.get(known) != digest:
        now = digest_of(path)
        if now != digest:
            raise ValueError(f"{path} has the digest {now}, not {digest}")
        _verified[known] = digest


class SparseDigest:
    """A digest of a file's size and of those of its pieces that are not all zeros, so that holes need not be read."""

    def __init__(self) -> None:
        self._hasher = hashlib.sha256(b"torpor sparse 1\n")

    def update(self, at: int, piece: bytes) -> None:
        """The piece at this multiple of `PIECE`; those of zeros may be left out."""
        if piece != ZEROS[: len(piece)]:
            self._hasher.update(at.to_bytes(8, "big"))
            self._hasher.update(piece)

    def finished(self, size: int) -> str:
        """The digest, in hex."""
        self._hasher.update(size.to_bytes(8, "big"))
        return self._hasher.hexdigest()


def sparse_digest_of(path: Path) -> str:
    """The digest of a whole file, in hex."""
    digest = SparseDigest()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for at in pieces_with_data(file.fileno(), size):
            digest.update(at, os.pread(file.fileno(), PIECE, at))
    return digest.finished(size)


def pieces_with_data(descriptor: int, size: int) -> list[int]:
    """Where the pieces of a file begin that are no holes."""
    found: list[int] = []
    at = 0
    while at < size:
        try:
            at = os.lseek(descriptor, at, os.SEEK_DATA) // PIECE * PIECE
        except OSError:  # nothing but a hole is left
            break
        hole = os.lseek(descriptor, at, os.SEEK_HOLE) if not found or at > found[-1] else at
        end = max(hole, at + 1)
        found.extend(start for start in range(at, end, PIECE) if not found or start > found[-1])
        at = found[-1] + PIECE
    return found

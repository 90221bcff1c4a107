"""Copies of a remote store's packs on this machine's disk: a machine that sleeps here usually wakes here.

Packs never change, and what is read from a copy is authenticated like everything else; the disk is trusted with
nothing but time. Other objects are never copied.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Final

from torpor_chunks.objects import Entry, Objects

PACKS: Final = "/packs/"
PACK_BYTES_MAX: Final = 64 << 20
"""Larger packs are not copied."""

SWEEP_EVERY: Final = 16
"""The copies are counted, and the oldest removed, once in so many new ones."""


class CachedObjects:
    """`Objects` with copies of the packs that were put or read here, up to `bytes_max` of them, the oldest removed."""

    def __init__(self, objects: Objects, directory: Path, bytes_max: int) -> None:
        self._objects = objects
        self._directory = directory
        self._bytes_max = bytes_max
        self._lock = Lock()
        self._made = 0

    @property
    def near(self) -> bool:
        """See `Objects.near`: what is not copied is as far away as ever."""
        return self._objects.near

    def put(self, path: str, data: bytes | Iterable[bytes], *, create: bool = False) -> None:
        """See `Objects.put`."""
        self._objects.put(path, data, create=create)
        if isinstance(data, bytes) and _is_pack(path):
            self._keep(path, data)

    def tail(self, path: str, length: int) -> tuple[bytes, int]:
        """See `Objects.tail`. A small pack is fetched whole: the rest of it is what will be asked for next."""
        file = self._opened(path)
        if file is None:
            data, size_bytes = self._objects.tail(path, length)
            if len(data) == size_bytes and _is_pack(path):
                self._keep(path, data)
            return data, size_bytes
        with file:
            size_bytes = os.fstat(file.fileno()).st_size
            return os.pread(file.fileno(), length, max(0, size_bytes - length)), size_bytes

    def read(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See `Objects.read`. When most of a pack is asked for, all of it is fetched and kept."""
        file = self._opened(path) or self._fetched(path, ranges)
        if file is None:
            return self._objects.read(path, ranges)
        with file:
            return [os.pread(file.fileno(), length, start) for start, length in ranges]

    def look(self, path: str) -> Entry | None:
        """See `Objects.look`: at the store's own object, for a copy proves nothing."""
        return self._objects.look(path)

    def delete(self, path: str) -> bool:
        """See `Objects.delete`."""
        self.distrust(path)
        return self._objects.delete(path)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """See `Objects.entries`."""
        return self._objects.entries(prefix)

    def folders(self, prefix: str) -> list[str]:
        """See `Objects.folders`."""
        return self._objects.folders(prefix)

    def distrust(self, path: str) -> bool:
        """See `Objects.distrust`."""
        try:
            self._copy(path).unlink()
        except OSError:
            return False
        return True

    def remove_abandoned(self, older_s: float) -> int:
        """See `Objects.remove_abandoned`."""
        return self._objects.remove_abandoned(older_s)

    def _fetched(self, path: str, ranges: Sequence[tuple[int, int]]) -> BinaryIO | None:
        wanted = sum(length for _, length in ranges)
        found = self._objects.look(path) if _is_pack(path) else None
        if found is None or found.size_bytes > PACK_BYTES_MAX or 2 * wanted < found.size_bytes:
            return None
        (whole,) = self._objects.read(path, [(0, found.size_bytes)])
        self._keep(path, whole)
        return self._opened(path)

    def _opened(self, path: str) -> BinaryIO | None:
        if not _is_pack(path):
            return None
        try:
            file = self._copy(path).open("rb")
        except OSError:
            return None
        # Marks it as used: the copies unused for longest go first.
        with contextlib.suppress(OSError):
            os.utime(file.fileno())
        return file

    def _keep(self, path: str, data: bytes) -> None:
        """Keep a copy if that is possible: the store itself has the pack."""
        if len(data) > PACK_BYTES_MAX:
            return
        copy = self._copy(path)
        with contextlib.suppress(OSError):
            copy.parent.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=copy.parent, prefix=".new-")
            try:
                with os.fdopen(number, "wb") as new:
                    new.write(data)
                Path(name).rename(copy)
            finally:
                Path(name).unlink(missing_ok=True)
        with self._lock:
            self._made += 1
            due = self._made % SWEEP_EVERY == 1
        if due:
            self._make_room()

    def _make_room(self) -> None:
        found = []
        for copy in self._directory.rglob("*"):
            with contextlib.suppress(OSError):
                if copy.is_file():
                    status = copy.stat()
                    found.append((status.st_mtime_ns, status.st_size, copy))
        total_bytes = sum(size for _, size, _ in found)
        for _, size, copy in sorted(found):
            if total_bytes <= self._bytes_max:
                break
            copy.unlink(missing_ok=True)
            total_bytes -= size

    def _copy(self, path: str) -> Path:
        return self._directory / path


def _is_pack(path: str) -> bool:
    return PACKS in path

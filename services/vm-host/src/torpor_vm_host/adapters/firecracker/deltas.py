"""Page files of Firecracker machines: how memory and disk differ from the template's, which never change.

Both are compared with their base and only what differs is kept, so a checkpoint builds on nothing but its template.
The format is that of `adapters.qemu.memory`; for a disk a page is 4096 bytes of it.
"""

import array
import errno
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from torpor_vm_host.adapters.qemu.memory import FORMAT, HEADER, MAGIC, PAGE, read_header, runs

PIECE: Final = 256 * PAGE


class PageFile:
    """An open page file: which pages it has, and their bytes."""

    def __init__(self, path: Path) -> None:
        count = read_header(path).pages
        self._file = path.open("rb")
        self._file.seek(HEADER.size)
        self.numbers = array.array("I")
        self.numbers.frombytes(self._file.read(4 * count))
        self._place = {number: place for place, number in enumerate(self.numbers)}
        self._pages_at = HEADER.size + 4 * count

    def __contains__(self, page: int) -> bool:
        return page in self._place

    def read(self, page: int) -> bytes:
        """The bytes of a page that is in it."""
        return os.pread(self._file.fileno(), PAGE, self._pages_at + self._place[page] * PAGE)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts (start, end) of a sparse file that are no holes, in whole pages."""
    at = 0
    while at < size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start - start % PAGE, min(size, end + -end % PAGE)
        at = end


def differing(own: int, base: int, size: int) -> Sequence[int]:
    """The pages in which a file differs from its base; where both have holes nothing is read."""
    found = array.array("I")
    checked = 0
    for start, end in sorted([*extents(own, size), *extents(base, size)]):
        for at in range(max(start, checked), end, PIECE):
            length = min(PIECE, end - at)
            now, before = os.pread(own, length, at), os.pread(base, length, at)
            before += bytes(len(now) - len(before))
            if now != before:
                found.extend(_differing_pages(now, before, at // PAGE))
        checked = max(checked, end)
    return found


def _differing_pages(now: bytes, before: bytes, first: int) -> Iterator[int]:
    for at in range(0, len(now), PAGE):
        if now[at : at + PAGE] != before[at : at + PAGE]:
            yield first + at // PAGE


def write_from_file(own: Path, base: Path, base_digest: bytes, target: Path) -> None:
    """Write what a whole file has that its base has not, durably."""
    with own.open("rb", buffering=0) as now, base.open("rb", buffering=0) as before:
        numbers = differing(now.fileno(), before.fileno(), os.fstat(now.fileno()).st_size)
        with target.open("wb") as file:
            _begin(file.fileno(), numbers, base_digest)
            file.seek(0, os.SEEK_END)
            for first, count in runs(list(numbers)):
                file.write(os.pread(now.fileno(), count * PAGE, first * PAGE))
            file.flush()
            os.fsync(file.fileno())


def write_from_diff(diff: Path, earlier: Path | None, base: Path, base_digest: bytes, target: Path) -> None:
    """Write, durably, memory as it is after a diff snapshot: its pages, over those of an earlier page file.

    A diff snapshot is a sparse file: what is no hole has been written since the machine was loaded or snapshot.
    """
    before = None if earlier is None else PageFile(earlier)
    try:
        with diff.open("rb", buffering=0) as now, base.open("rb", buffering=0) as under:
            size = os.fstat(now.fileno()).st_size
            fresh = {page for start, end in extents(now.fileno(), size) for page in range(start // PAGE, end // PAGE)}

            def read(page: int) -> bytes:
                if page in fresh or before is None:
                    return os.pread(now.fileno(), PAGE, page * PAGE)
                return before.read(page)

            candidates = sorted(fresh.union(() if before is None else before.numbers))
            kept = array.array("I", (p for p in candidates if read(p) != os.pread(under.fileno(), PAGE, p * PAGE)))
            with target.open("wb") as file:
                _begin(file.fileno(), kept, base_digest)
                file.seek(0, os.SEEK_END)
                for page in kept:
                    file.write(read(page))
                file.flush()
                os.fsync(file.fileno())
    finally:
        if before is not None:
            before.close()


def holes_are_exact(folder: Path) -> bool:
    """Whether the file system keeps holes page by page: else a page beside a written one would look written."""
    return os.statvfs(folder).f_frsize <= PAGE and os.statvfs(folder).f_bsize <= PAGE


def apply(pages: Path, target: Path) -> None:
    """Write the pages of a page file into a file that has the bytes of its base."""
    header = read_header(pages)
    with pages.open("rb") as source, target.open("r+b", buffering=0) as file:
        source.seek(HEADER.size)
        numbers = list(struct.unpack(f"<{header.pages}I", source.read(4 * header.pages)))
        for first, count in runs(numbers):
            data = source.read(count * PAGE)
            if os.pwrite(file.fileno(), data, first * PAGE) != len(data):
                raise OSError(errno.EIO, f"page {first} could not be written whole", str(target))


def _begin(descriptor: int, numbers: Sequence[int], base_digest: bytes) -> None:
    head = HEADER.pack(MAGIC, FORMAT, PAGE, len(numbers), base_digest)
    head += array.array("I", numbers).tobytes()
    if os.write(descriptor, head) != len(head):
        raise OSError(errno.ENOSPC, "a page file's head could not be written whole")

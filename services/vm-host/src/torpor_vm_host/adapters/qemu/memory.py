"""Guest memory as pages: which pages a machine has changed, and how they are written down and put back.

A page file is what a checkpoint keeps of memory: a header, the page numbers, then the pages. Its base is the template's
memory, which never changes, so page files never build on each other and the hundredth is restored like the second.
"""

import errno
import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

PAGE: Final = 4096
PRESENT_OR_SWAPPED: Final = 0xC0
FILE_OR_SHARED: Final = 0x20
CHANGED: Final = bytes(bool(byte & PRESENT_OR_SWAPPED and not byte & FILE_OR_SHARED) for byte in range(256))
"""The last byte of a `pagemap` entry -> 1 when the page is the process's own."""
MAGIC: Final = b"TORPORPG"
HEADER: Final = struct.Struct("<8sIIQ32s")
"""Magic, format, page size, number of pages, digest of the base memory."""
FORMAT: Final = 1
RUN_PAGES_MAX: Final = 256

Run = tuple[int, int]
"""First page, and how many."""


class PageFileHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a page file says of itself."""

    pages: int
    base_digest: bytes

    @property
    def length(self) -> int:
        """Where the pages begin: after the header and their numbers."""
        return HEADER.size + 4 * self.pages


class MemoryRange(msgspec.Struct, frozen=True, kw_only=True):
    """A part of guest memory in QEMU's address space: where it is, how long, and where in the memory file."""

    address: int
    length: int
    offset: int


def find_memory(pid: int, name: str) -> list[MemoryRange]:
    """Where the process maps the memory file (memfd) of this name; raises `OSError` when it does not."""
    ranges = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(None, 5)
        if fields[5:] == [f"/memfd:{name} (deleted)"]:
            start, end = (int(part, 16) for part in fields[0].split("-"))
            ranges.append(MemoryRange(address=start, length=end - start, offset=int(fields[2], 16)))
    if not ranges:
        raise FileNotFoundError(errno.ENOENT, "the memory of the machine is not mapped", f"/proc/{pid}/maps")
    return sorted(ranges, key=lambda part: part.offset)


def changed_runs(pid: int, ranges: Iterable[MemoryRange]) -> list[Run]:
    """Runs of the pages that are the process's own, in order: written since it mapped the file.

    A page of a private mapping is copied when it is written; the copy is anonymous, so bit 61 of its entry in
    `pagemap` is clear (kernel: Documentation/admin-guide/mm/pagemap.rst). The three bits are in an entry's last byte.
    """
    found: list[Run] = []
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:  # noqa: PTH123  (unbuffered)
        for part in ranges:
            raw = os.pread(pagemap.fileno(), part.length // PAGE * 8, part.address // PAGE * 8)
            marks, first = raw[7::8].translate(CHANGED), part.offset // PAGE
            start = marks.find(1)
            while start >= 0:
                end = marks.find(0, start)
                end = len(marks) if end < 0 else end
                found.extend(_split(first + start, end - start))
                start = marks.find(1, end)
    return found


def _split(first: int, count: int) -> Iterator[Run]:
    while count > 0:
        yield first, min(count, RUN_PAGES_MAX)
        first, count = first + RUN_PAGES_MAX, count - RUN_PAGES_MAX


def runs(pages: list[int]) -> Iterator[Run]:
    """Sorted page numbers as runs of neighbours, at most `RUN_PAGES_MAX` long."""
    at = 0
    while at < len(pages):
        count = 1
        while count < RUN_PAGES_MAX and at + count < len(pages) and pages[at + count] == pages[at] + count:
            count += 1
        yield pages[at], count
        at += count


def write_page_file(captured: Iterable[tuple[int, bytes]], base: int, base_digest: bytes, target: Path) -> int:
    """Write those of the captured pages durably that differ from the base memory; answers how many there are.

    `captured` gives runs, each as its first page and its bytes, in order; `base` is a descriptor.
    """
    kept: list[int] = []
    aside = target.with_suffix(".pages")
    with target.open("wb") as file, aside.open("w+b") as pages:
        aside.unlink()
        for first, now in captured:
            before = os.pread(base, len(now), first * PAGE)
            if now == before:
                continue
            for at in range(0, len(now), PAGE):
                page = now[at : at + PAGE]
                if page != before[at : at + PAGE]:
                    kept.append(first + at // PAGE)
                    pages.write(page)
        pages.flush()
        file.write(HEADER.pack(MAGIC, FORMAT, PAGE, len(kept), base_digest))
        file.write(struct.pack(f"<{len(kept)}I", *kept))
        file.flush()
        offset, left = 0, len(kept) * PAGE
        while left:
            copied = os.copy_file_range(pages.fileno(), file.fileno(), left, offset)
            offset, left = offset + copied, left - copied
        os.fsync(file.fileno())
    return len(kept)


def read_header(file: Path) -> PageFileHeader:
    """The header of a page file; `ValueError` when it is none, or its length is not what the header says."""
    with file.open("rb") as opened:
        head = opened.read(HEADER.size)
    if len(head) != HEADER.size:
        raise ValueError(f"{file} is too short to be a page file")
    magic, version, page, pages, base = HEADER.unpack(head)
    if magic != MAGIC or version != FORMAT or page != PAGE:
        raise ValueError(f"{file} is no page file of format {FORMAT}")
    if file.stat().st_size != HEADER.size + pages * (4 + PAGE):
        raise ValueError(f"{file} does not have the length its header says")
    return PageFileHeader(pages=pages, base_digest=base)


def read_pages(file: Path) -> Iterator[tuple[int, bytes]]:
    """The pages of a page file as runs, each as its first page and its bytes; raises `ValueError`."""
    count = read_header(file).pages
    with file.open("rb") as source:
        source.seek(HEADER.size)
        numbers = list(struct.unpack(f"<{count}I", source.read(4 * count)))
        if any(after <= before for before, after in itertools.pairwise(numbers)):
            raise ValueError(f"{file} does not have its pages in order")
        for first, length in runs(numbers):
            yield first, source.read(length * PAGE)


def put_pages(file: Path, pid: int, ranges: list[MemoryRange]) -> None:
    """Write a page file's pages into a process that maps the base memory privately and does not run yet."""
    with open(f"/proc/{pid}/mem", "wb", buffering=0) as memory:  # noqa: PTH123  (unbuffered)
        for first, data in read_pages(file):
            for address, start, end in placed(ranges, first, len(data)):
                if os.pwrite(memory.fileno(), data[start:end], address) != end - start:
                    raise OSError(f"page {first} could not be written whole")


def placed(ranges: list[MemoryRange], first: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Where bytes that begin with page `first` are: address, and which of the bytes (start, end) lie there."""
    offset, done = first * PAGE, 0
    for part in ranges:
        at = offset + done
        if done < length and part.offset <= at < part.offset + part.length:
            size = min(length - done, part.offset + part.length - at)
            yield part.address + at - part.offset, done, done + size
            done += size
    if done < length:
        raise ValueError(f"page {first} is outside of the machine's memory")

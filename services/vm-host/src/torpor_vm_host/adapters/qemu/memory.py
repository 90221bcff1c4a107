"""Guest memory as pages: which pages a machine has changed since its template, and how they are written and put back.

A page file is what a checkpoint keeps of memory: a header, the page numbers, then the pages. Its base is the template's
memory, which never changes, so page files never build on each other and the hundredth is restored like the second.
"""

import os
import struct
from collections.abc import Iterator
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
"""Magic, format, page size, number of pages, SHA-256 of the base memory."""
FORMAT: Final = 1
RUN_PAGES_MAX: Final = 256


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


def find_memory(pid: int, inode: int) -> list[MemoryRange]:
    """Where the process maps the memory file with this inode."""
    ranges = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(None, 5)
        if int(fields[4]) == inode and inode:
            start, end = (int(part, 16) for part in fields[0].split("-"))
            ranges.append(MemoryRange(address=start, length=end - start, offset=int(fields[2], 16)))
    return ranges


def changed_runs(pid: int, ranges: list[MemoryRange]) -> list[tuple[int, int]]:
    """Runs (first page, count) of the pages that are the process's own: written since it mapped the file.

    A page of a private mapping is copied when it is written; the copy is anonymous, so bit 61 of its entry in
    `pagemap` is clear (kernel: Documentation/admin-guide/mm/pagemap.rst). The three bits are in an entry's last byte.
    """
    found: list[tuple[int, int]] = []
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


def _split(first: int, count: int) -> Iterator[tuple[int, int]]:
    while count > 0:
        yield first, min(count, RUN_PAGES_MAX)
        first, count = first + RUN_PAGES_MAX, count - RUN_PAGES_MAX


def runs(pages: list[int]) -> Iterator[tuple[int, int]]:
    """Sorted page numbers as (first, count) of neighbours, at most `RUN_PAGES_MAX` long."""
    at = 0
    while at < len(pages):
        count = 1
        while count < RUN_PAGES_MAX and at + count < len(pages) and pages[at + count] == pages[at] + count:
            count += 1
        yield pages[at], count
        at += count


def capture(pid: int, ranges: list[MemoryRange]) -> list[tuple[int, bytes]]:
    """The changed pages as (first page, bytes) runs: all that must happen while the machine stands still."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123  (unbuffered)
        return [
            (first, os.pread(memory.fileno(), count * PAGE, _address(ranges, first)))
            for first, count in sorted(changed_runs(pid, ranges))
        ]


def write_page_file(captured: list[tuple[int, bytes]], base: int, base_digest: bytes, target: Path) -> int:
    """Write the captured pages that differ from the base memory (descriptor `base`); answers how many there are."""
    kept: list[int] = []
    data: list[bytes] = []
    for first, now in captured:
        before = os.pread(base, len(now), first * PAGE)
        if now == before:
            continue
        for at in range(0, len(now), PAGE):
            page = now[at : at + PAGE]
            if page != before[at : at + PAGE]:
                kept.append(first + at // PAGE)
                data.append(page)
    with target.open("wb") as file:
        file.write(HEADER.pack(MAGIC, FORMAT, PAGE, len(kept), base_digest))
        file.write(struct.pack(f"<{len(kept)}I", *kept))
        file.writelines(data)
        file.flush()
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


def put_pages(file: Path, pid: int, ranges: list[MemoryRange]) -> None:
    """Write a page file's pages into a process that maps the base memory privately and does not run yet."""
    header = read_header(file)
    with file.open("rb") as source, open(f"/proc/{pid}/mem", "wb", buffering=0) as memory:  # noqa: PTH123
        source.seek(HEADER.size)
        numbers = list(struct.unpack(f"<{header.pages}I", source.read(4 * header.pages)))
        for first, count in runs(numbers):
            data = source.read(count * PAGE)
            if os.pwrite(memory.fileno(), data, _address(ranges, first)) != len(data):
                raise OSError(f"page {first} could not be written whole")


def _address(ranges: list[MemoryRange], page: int) -> int:
    offset = page * PAGE
    for part in ranges:
        if part.offset <= offset < part.offset + part.length:
            return part.address + offset - part.offset
    raise ValueError(f"page {page} is outside of the machine's memory")

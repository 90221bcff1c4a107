"""Guest memory as pages: found in a process, captured, written down, read back, put into another process."""

import ctypes
import mmap
import multiprocessing
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torpor_vm_host.adapters.qemu import memory
from torpor_vm_host.adapters.qemu.capture import SPARE_PAGES, Capture
from torpor_vm_host.adapters.qemu.memory import FORMAT, HEADER, MAGIC, PAGE, MemoryRange

PAGES = 3000
NAME = "torpor-test-memory"
BASE_DIGEST = bytes(range(32))

_spawning = multiprocessing.get_context("spawn")


def _hold(path: str, told: "Connection[Any, Any]") -> None:
    """A process that maps the memory file privately, as QEMU does, and writes where it is told to."""
    with mmap.mmap(os.open(path, os.O_RDWR), PAGES * PAGE, flags=mmap.MAP_PRIVATE) as view:
        told.send("mapped")
        while (order := told.recv()) is not None:
            match order:
                case ("write", at, data):
                    view[at : at + len(data)] = data
                case ("read", at, length):
                    told.send(view[at : at + length])
                    continue
                case _:
                    raise AssertionError(order)
            told.send("done")


class Holder:
    """Such a process, from outside."""

    def __init__(self, descriptor: int) -> None:
        self._told, theirs = _spawning.Pipe()
        self.process = _spawning.Process(target=_hold, args=(f"/proc/{os.getpid()}/fd/{descriptor}", theirs))
        self.process.start()
        theirs.close()
        assert self._told.recv() == "mapped"
        assert self.process.pid is not None
        self.pid = self.process.pid

    def write(self, at: int, data: bytes) -> None:
        self._told.send(("write", at, data))
        assert self._told.recv() == "done"

    def read(self, at: int, length: int) -> bytes:
        self._told.send(("read", at, length))
        found = self._told.recv()
        assert isinstance(found, bytes)
        return found

    def close(self) -> None:
        self._told.send(None)
        self.process.join(20)
        self._told.close()


@pytest.fixture
def base() -> Iterator[int]:
    descriptor = os.memfd_create(NAME)
    os.ftruncate(descriptor, PAGES * PAGE)
    for page in range(0, PAGES, 7):
        os.pwrite(descriptor, struct.pack("<Q", page) * (PAGE // 8), page * PAGE)
    yield descriptor
    os.close(descriptor)


@contextmanager
def holding(base: int) -> Iterator[Holder]:
    holder = Holder(base)
    try:
        yield holder
    finally:
        holder.close()


def captured(holder: Holder) -> dict[int, bytes]:
    capture = Capture(holder.pid, memory.find_memory(holder.pid, NAME))
    try:
        capture.take()
        return {
            first + at // PAGE: data[at : at + PAGE]
            for first, data in capture.runs()
            for at in range(0, len(data), PAGE)
        }
    finally:
        capture.close()


def test_changed_pages_are_found_written_and_put_into_another_process(base: int, tmp_path: Path) -> None:
    target = tmp_path / "memory"
    changes = {3: b"three", 4: b"four", 1000: b"x" * PAGE, PAGES - 1: b"last"}
    with holding(base) as holder:
        for page, data in changes.items():
            holder.write(page * PAGE, data)
        holder.write(7 * PAGE, struct.pack("<Q", 7) * (PAGE // 8))  # written, and the same as before
        pages = captured(holder)
        assert set(pages) == {*changes, 7}
        ranges = memory.find_memory(holder.pid, NAME)
        capture = Capture(holder.pid, ranges)
        capture.take()
        assert memory.write_page_file(capture.runs(), base, BASE_DIGEST, target) == len(changes)
        capture.close()
    assert memory.read_header(target) == memory.PageFileHeader(pages=len(changes), base_digest=BASE_DIGEST)
    with holding(base) as other:
        memory.put_pages(target, other.pid, memory.find_memory(other.pid, NAME))
        for page, data in changes.items():
            assert other.read(page * PAGE, len(data)) == data
        assert other.read(7 * PAGE, 8) == struct.pack("<Q", 7)
        assert set(captured(other)) == set(changes)


def test_more_changes_than_there_is_room_for_are_taken_all_the_same(base: int) -> None:
    with holding(base) as holder:
        capture = Capture(holder.pid, memory.find_memory(holder.pid, NAME))
        count = SPARE_PAGES + 500
        holder.write(0, b"y" * (count * PAGE))
        capture.take()
        taken = b"".join(data for _, data in capture.runs())
        capture.close()
    assert taken == b"y" * (count * PAGE)


def test_a_process_without_the_memory_has_none() -> None:
    with pytest.raises(FileNotFoundError):
        memory.find_memory(os.getpid(), "torpor-not-there")


def test_a_process_that_is_gone_is_an_error(base: int) -> None:
    holder = Holder(base)
    capture = Capture(holder.pid, memory.find_memory(holder.pid, NAME))
    holder.close()
    with pytest.raises(OSError, match=str(holder.pid)):
        capture.take()
    capture.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.dictionaries(st.integers(0, 500), st.binary(min_size=1, max_size=1), max_size=60))
def test_a_page_file_gives_back_what_differs_from_its_base(tmp_path: Path, pages: dict[int, bytes]) -> None:
    target = tmp_path / "memory"
    base = os.memfd_create("base")
    try:
        os.ftruncate(base, 501 * PAGE)
        given_runs = [
            (first, b"".join(pages[first + n] * PAGE for n in range(count)))
            for first, count in memory.runs(sorted(pages))
        ]
        kept = memory.write_page_file(given_runs, base, BASE_DIGEST, target)
    finally:
        os.close(base)
    found = {
        first + at // PAGE: data[at : at + PAGE]
        for first, data in memory.read_pages(target)
        for at in range(0, len(data), PAGE)
    }
    assert found == {page: byte * PAGE for page, byte in pages.items() if byte != b"\0"}
    assert kept == len(found)


@given(st.sets(st.integers(0, 3000)))
def test_runs_hold_each_page_once_and_in_order(pages: set[int]) -> None:
    found = [first + at for first, count in memory.runs(sorted(pages)) for at in range(count)]
    assert found == sorted(pages)
    assert all(1 <= count <= memory.RUN_PAGES_MAX for _, count in memory.runs(sorted(pages)))


def test_bytes_over_two_ranges_are_placed_in_both() -> None:
    ranges = [
        MemoryRange(address=0x10000, length=2 * PAGE, offset=0),
        MemoryRange(address=0x90000, length=4 * PAGE, offset=2 * PAGE),
    ]
    assert list(memory.placed(ranges, 1, 3 * PAGE)) == [
        (0x10000 + PAGE, 0, PAGE),
        (0x90000, PAGE, 3 * PAGE),
    ]
    with pytest.raises(ValueError, match="outside"):
        list(memory.placed(ranges, 5, 2 * PAGE))


def whole_page_file() -> bytes:
    return HEADER.pack(MAGIC, FORMAT, PAGE, 2, BASE_DIGEST) + struct.pack("<2I", 1, 2) + bytes(2 * PAGE)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        whole_page_file()[:20],
        whole_page_file()[:-1],
        whole_page_file() + b"\0",
        b"x" + whole_page_file()[1:],
        HEADER.pack(MAGIC, FORMAT + 1, PAGE, 0, BASE_DIGEST),
        HEADER.pack(MAGIC, FORMAT, 2 * PAGE, 0, BASE_DIGEST),
        HEADER.pack(MAGIC, FORMAT, PAGE, 2**60, BASE_DIGEST),
    ],
)
def test_what_is_no_page_file_is_refused(tmp_path: Path, content: bytes) -> None:
    target = tmp_path / "memory"
    target.write_bytes(content)
    with pytest.raises(ValueError, match="memory"):
        memory.read_header(target)


@pytest.mark.parametrize("numbers", [(2, 1), (1, 1)])
def test_pages_out_of_order_are_refused(tmp_path: Path, numbers: tuple[int, int]) -> None:
    target = tmp_path / "memory"
    target.write_bytes(
        HEADER.pack(MAGIC, FORMAT, PAGE, 2, BASE_DIGEST) + struct.pack("<2I", *numbers) + bytes(2 * PAGE)
    )
    with pytest.raises(ValueError, match="order"):
        list(memory.read_pages(target))


def test_pages_are_of_the_size_this_machine_has() -> None:
    assert ctypes.sizeof(ctypes.c_void_p) == 8
    assert mmap.PAGESIZE == PAGE

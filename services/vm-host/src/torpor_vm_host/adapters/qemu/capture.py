"""Taking a machine's changed pages while it stands still: into memory laid out before, as fast as the kernel copies."""

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Final

from torpor_vm_host.adapters.qemu.memory import PAGE, MemoryRange, Run, changed_runs, placed

PIECES_MAX: Final = 1024
"""IOV_MAX of Linux."""
SPARE_PAGES: Final = 1024
"""Room for what changes between the count and the pause; more is made room for within the pause."""


class _Piece(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


class Capture:
    """Room for the changed pages of one machine, and after `take` those pages."""

    def __init__(self, pid: int, ranges: Sequence[MemoryRange]) -> None:
        """Make room for the pages that are changed now, and touch it: a page fault in the pause would lengthen it."""
        self._pid = pid
        self._ranges = list(ranges)
        self._runs: list[Run] = []
        self._room = _room(sum(count for _, count in changed_runs(pid, self._ranges)) + SPARE_PAGES)

    def take(self) -> None:
        """Copy the changed pages out of the machine, which stands still; raises `OSError`."""
        self._runs = changed_runs(self._pid, self._ranges)
        needed = sum(count for _, count in self._runs)
        if needed * PAGE > len(self._room):
            self._room.close()
            self._room = _room(needed)
        pieces = [
            (address, end - start)
            for first, count in self._runs
            for address, start, end in placed(self._ranges, first, count * PAGE)
        ]
        at = 0
        for start in range(0, len(pieces), PIECES_MAX):
            at += self._read(pieces[start : start + PIECES_MAX], at)

    def runs(self) -> Iterator[tuple[int, bytes]]:
        """The pages taken, each run as its first page and its bytes, in order."""
        at = 0
        for first, count in self._runs:
            yield first, self._room[at : at + count * PAGE]
            at += count * PAGE

    def close(self) -> None:
        """Give the room back."""
        self._room.close()

    def _read(self, pieces: list[tuple[int, int]], at: int) -> int:
        wanted = sum(length for _, length in pieces)
        theirs = (_Piece * len(pieces))(*(_Piece(*piece) for piece in pieces))
        place = ctypes.c_char.from_buffer(self._room, at)
        ours = _Piece(ctypes.addressof(place), wanted)
        got = _libc.process_vm_readv(self._pid, ctypes.byref(ours), 1, theirs, len(pieces), 0)
        del place
        if got < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), f"memory of process {self._pid}")
        if got != wanted:
            raise OSError(f"only {got} of {wanted} bytes of the machine's memory could be read")
        return wanted


def _room(pages: int) -> mmap.mmap:
    return mmap.mmap(-1, max(pages, 1) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)

"""How fast this processor's time stamp counter runs: a guest that is told needs no calibration, which busy hosts break.

`/proc/cpuinfo` says the present speed of a core instead, which is another number wherever cores change theirs.
"""

import ctypes
import mmap
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

READ_COUNTER: Final = bytes.fromhex("0f31 48c1e220 4809d0 c3")
"""x86-64: rdtsc; shl rdx, 32; or rax, rdx; ret."""
MEASURED_S: Final = 0.05
TRIES: Final = 40
ROUNDED_UP_FROM: Final = 0.63
"""No processor's nominal speed lies near x.37 MHz, so two measurements of one are rounded to the same number."""


def tsc_khz() -> int:
    """Thousands of ticks a second, within a few millionths; from /proc/cpuinfo where no code may be made."""
    try:
        with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as code:
            code.write(READ_COUNTER)
            place = ctypes.c_char.from_buffer(code)
            counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(place))
            first = _point(counter)
            time.sleep(MEASURED_S)
            last = _point(counter)
            del counter, place
    except (OSError, PermissionError):
        return _from_cpuinfo()
    return round((last[1] - first[1]) * 1_000_000 / (last[0] - first[0]))


def tsc_mhz(khz: int) -> int:
    """The speed as a whole number that every measurement of one processor gives."""
    return int(khz / 1000 + ROUNDED_UP_FROM)


def _point(counter: Callable[[], int]) -> tuple[float, int]:
    """A moment in nanoseconds and the counter then, as close together as can be had."""
    best: tuple[int, float, int] | None = None
    for _ in range(TRIES):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        ticks = counter()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        if best is None or after - before < best[0]:
            best = after - before, (before + after) / 2, ticks
    assert best is not None
    return best[1], best[2]


def _from_cpuinfo() -> int:
    match = re.search(r"^cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return int(float(match[1]) * 1000) if match else 2_000_000

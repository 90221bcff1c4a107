"""What a benchmark reports: one figure with its floor and its goal; and the machine it was measured on."""

import os
import platform
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured value. `ratio` is ours to the floor, or to the peer, measured side by side.

    `goal` says in words what is wanted, `ok` whether it was met, `n` how many samples stand behind it.
    """

    name: str
    value: float
    unit: str
    goal: str
    ok: bool
    n: int
    floor: float | None = None
    ratio: float | None = None
    p50: float | None = None
    p99: float | None = None


Say = Callable[[str], None]
"""Prints a line of progress."""

Bench = Callable[[Say], Coroutine[Any, Any, Figure | Sequence[Figure]]]
"""Measures one thing, or some that belong together."""


def figure(
    name: str,
    value: float,
    unit: str,
    goal: tuple[Literal["at least", "at most"], float],
    *,
    of: Literal["value", "ratio"] = "value",
    floor: float | None = None,
    samples: Sequence[float] = (),
    n: int | None = None,
) -> Figure:
    """A figure judged by its goal, on its value or on its ratio to the floor; percentiles come from `samples`."""
    ratio = value / floor if floor else None
    judged = ratio if of == "ratio" else value
    relation, bound = goal
    met = judged is not None and (judged >= bound if relation == "at least" else judged <= bound)
    suffix = "x the floor" if of == "ratio" else unit
    return Figure(
        name=name,
        value=value,
        unit=unit,
        goal=f"{relation} {bound:g} {suffix}",
        ok=met,
        n=n if n is not None else max(len(samples), 1),
        floor=floor,
        ratio=ratio,
        p50=percentile(samples, 0.5),
        p99=percentile(samples, 0.99),
    )


def percentile(samples: Sequence[float], share: float) -> float | None:
    """The value below which `share` of the samples lie (nearest rank); None without samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


def machine() -> dict[str, Any]:
    """Where this was measured."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in _text("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory = _text("/proc/meminfo").split()
    return {
        "cpus": os.cpu_count(),
        "cpu": model,
        "memory_mib": int(memory[1]) // 1024 if len(memory) > 1 else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

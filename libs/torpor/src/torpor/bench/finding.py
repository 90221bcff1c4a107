"""Finds the benchmarks of a checkout: files `*_bench.py` in `tests/bench`, each with a table `BENCHES`."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from torpor.bench.figures import Bench
from torpor.errors import CannotStart

VARIABLE: Final = "TORPOR_BENCH_DIR"


def bench_dir() -> Path:
    """`TORPOR_BENCH_DIR`, else `tests/bench` of the checkout that this package is installed from."""
    named = os.environ.get(VARIABLE)
    for candidate in [Path(named)] if named else [parent / "tests/bench" for parent in Path(__file__).parents]:
        if any(candidate.glob("*_bench.py")):
            return candidate
    raise CannotStart(
        "no-benches",
        f"there are no benchmarks in {named}" if named else "this installation has no benchmarks beside it",
        f"run it from a checkout (bash deploy/run torpor bench …), or name its tests/bench with {VARIABLE}",
    )


def find_benches() -> dict[str, list[Bench]]:
    """Every benchmark by the name it is called with; a name may be filled by several files."""
    directory = bench_dir()
    found: dict[str, list[Bench]] = {}
    # Benchmarks share builders with the tests, which import them from the checkout's root.
    root = str(directory.resolve().parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    for path in sorted(directory.glob("*_bench.py")):
        table: dict[str, Sequence[Bench]] = getattr(_load(path), "BENCHES", {})
        for name, benches in table.items():
            found.setdefault(name, []).extend(benches)
    return found


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"torpor_benches.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

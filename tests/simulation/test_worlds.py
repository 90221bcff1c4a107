"""Worlds of all services: none breaks a law, each repeats with its seed, and a broken one says how to see it again."""

import os
import re
import subprocess
import sys

import pytest

from torpor_simulation.__main__ import main
from torpor_simulation.mutants import MUTANTS, at_large
from torpor_simulation.plan import draw
from torpor_simulation.running import run_world

WORLDS = 160
FIRST_SEED = 1_000_000
"""Far from the seeds of `task sim`."""


def test_no_world_breaks_a_law(capsys: pytest.CaptureFixture[str]) -> None:
    failed = main(["run", "--worlds", str(WORLDS), "--first-seed", str(FIRST_SEED), "--jobs", "2"])
    assert not failed, capsys.readouterr().err


@pytest.mark.parametrize("seed", [3, 9])
def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    first, second = run_world(draw(seed)), run_world(draw(seed))
    assert (first.digest, first.steps, first.virtual_s) == (second.digest, second.steps, second.virtual_s)
    assert first.digest != run_world(draw(seed + 1)).digest


def test_a_trace_does_not_depend_on_how_a_process_hashes() -> None:
    told = {replayed(hash_seed) for hash_seed in ("0", "1", "77")}
    assert len(told) == 1
    assert re.search(r"trace [0-9a-f]{16}", told.pop())


def replayed(hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "torpor_simulation", "seed", "21"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = re.search(r"seed 21: .*", done.stderr)
    assert found is not None, done.stderr
    return re.sub(r" in [0-9.]+ s", "", found.group())


def test_a_broken_world_says_which_law_and_how_to_see_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    with at_large(MUTANTS["acquired-before-claim"]):
        assert main(["run", "--worlds", "2", "--first-seed", "1", "--jobs", "1"]) == 1
        said = capsys.readouterr().err
        assert "claimed-first:" in said
        assert "replay: task sim:seed -- 1 --trace" in said
        assert main(["seed", "1", "--trace"]) == 1
    shown = capsys.readouterr()
    assert "vm-started.v1" in shown.out
    assert "claimed-first:" in shown.err
    assert main(["seed", "1"]) == 0

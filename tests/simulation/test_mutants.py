"""Each mutant is caught, by a checker that is meant to, within a bounded number of worlds."""

import pytest

from torpor_simulation.mutants import MUTANTS, SEEDS_MAX, at_large, hunt
from torpor_simulation.plan import draw
from torpor_simulation.running import run_world


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    caught = hunt(mutant)
    assert caught is not None, f"{name} survived {SEEDS_MAX} worlds"
    first = caught.violations[0]
    assert first.checker in mutant.caught_by, f"seed {caught.seed}: {first}"


def test_what_a_mutant_changed_is_put_back() -> None:
    before = run_world(draw(5))
    for mutant in MUTANTS.values():
        with at_large(mutant):
            pass
    after = run_world(draw(5))
    assert after.digest == before.digest
    assert not after.violations

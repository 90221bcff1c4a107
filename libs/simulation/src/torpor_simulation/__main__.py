"""The command `python -m torpor_simulation`: runs many worlds, or one again by its seed."""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Final

from torpor_simulation.plan import draw
from torpor_simulation.points import crash_at, fault_points
from torpor_simulation.running import Outcome, run_seed, run_seeds, run_world

FAILURES_SHOWN_MAX: Final = 10
PROGRESS_EVERY_S: Final = 5.0
SHARE: Final = 8
"""Worlds that a worker is given at a time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when no law was broken, 1 when one was."""
    parser = argparse.ArgumentParser(prog="python -m torpor_simulation", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run", help="run many worlds, each drawn from its seed")
    run.add_argument("--worlds", type=int, default=2000)
    run.add_argument("--first-seed", type=int, default=1)
    run.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    points = commands.add_parser("points", help="tell one story again and again, with a crash at each fault point")
    points.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    one = commands.add_parser("seed", help="run one world again")
    one.add_argument("seed", type=int)
    one.add_argument("--trace", action="store_true", help="print everything that happens in it")
    chosen = parser.parse_args(arguments)
    if chosen.command == "seed":
        return _replay(chosen.seed, trace=chosen.trace)
    if chosen.command == "points":
        return _crash_everywhere(max(1, chosen.jobs))
    return _run(range(chosen.first_seed, chosen.first_seed + chosen.worlds), max(1, chosen.jobs))


def _run(seeds: range, jobs: int) -> int:
    began_s = said_s = time.monotonic()
    failed: list[Outcome] = []
    done = events = points = 0
    virtual_s = 0.0
    for outcome in _outcomes(seeds, jobs):
        done, events, points = done + 1, events + outcome.events, points + outcome.points
        virtual_s += outcome.virtual_s
        if outcome.violations:
            failed.append(outcome)
            if len(failed) <= FAILURES_SHOWN_MAX:
                _show(outcome)
        if time.monotonic() - said_s >= PROGRESS_EVERY_S:
            said_s = time.monotonic()
            _say(f"{done} of {len(seeds)} worlds, {len(failed)} failed, {said_s - began_s:.0f} s")
    _say(
        f"{done} worlds in {time.monotonic() - began_s:.1f} s: {virtual_s / 3600:.1f} virtual hours, {events} events, "
        f"{points} fault points passed; {len(failed)} worlds failed"
    )
    if failed:
        _say("seeds: " + " ".join(str(outcome.seed) for outcome in failed[:100]))
    return 1 if failed else 0


def _crash_everywhere(jobs: int) -> int:
    clean, points = fault_points()
    _say(f"the clean run passed {len(points)} points and broke {len(clean.violations)} laws")
    failed = len(clean.violations)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for point, outcome in zip(points, pool.map(crash_at, points, chunksize=SHARE), strict=True):
            if outcome.violations:
                failed += 1
                _say(f"a crash of {point.program} at point {point.number}, {point.name}: {outcome.violations[0]}")
    _say(f"{len(points)} crashes, {failed} of them broke a law")
    return 1 if failed else 0


def _outcomes(seeds: range, jobs: int) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(run_seed, seeds)
        return
    shares = [seeds[start : start + SHARE] for start in range(0, len(seeds), SHARE)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_seeds, share) for share in shares]):
            yield from done.result()


def _replay(seed: int, *, trace: bool) -> int:
    plan = draw(seed)
    _say(f"{plan}")
    outcome = run_world(plan, print if trace else None)
    _say(
        f"seed {seed}: {outcome.virtual_s:.1f} virtual seconds, {outcome.events} events, {outcome.points} points, "
        f"{outcome.steps} steps in {outcome.wall_s:.2f} s, trace {outcome.digest[:16]}"
    )
    if outcome.violations:
        _show(outcome)
        return 1
    return 0


def _show(outcome: Outcome) -> None:
    _say(f"seed {outcome.seed} broke {len(outcome.violations)} laws; replay: task sim:seed -- {outcome.seed} --trace")
    for violation in outcome.violations[:FAILURES_SHOWN_MAX]:
        _say(f"  {violation}")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())

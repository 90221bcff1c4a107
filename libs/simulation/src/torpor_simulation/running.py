"""Runs worlds: one at a time in a virtual loop of its own, from a plan to its outcome."""

import asyncio
import contextlib
import gc
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from torpor_simulation.history import Violation
from torpor_simulation.loop import Deadlock, TooManySteps, VirtualLoop
from torpor_simulation.plan import Plan, draw
from torpor_simulation.world import World, scratch_directory

ENDING_STEPS: Final = 200_000
"""What the tasks of a world may take to see their cancellation."""


@dataclass(frozen=True)
class Outcome:
    """What became of one world. `digest` is that of its trace: the same seed always gives the same."""

    seed: int
    violations: tuple[Violation, ...]
    digest: str
    events: int
    points: int
    steps: int
    virtual_s: float
    wall_s: float


def run_world(
    plan: Plan, show: Callable[[str], None] | None = None, prepare: Callable[[World], None] | None = None
) -> Outcome:
    """Run one world to its end. `prepare` may change it before it begins."""
    began_s = time.perf_counter()
    loop = VirtualLoop(plan.seed)
    worlds: list[World] = []
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        scratch = scratch_directory(stack)

        async def live() -> None:
            world = World(plan, scratch, show)
            worlds.append(world)
            if prepare is not None:
                prepare(world)
            await world.run()

        ended: list[Violation] = []
        try:
            loop.run_until_complete(live())
        except (Deadlock, TooManySteps) as error:
            ended.append(Violation(type(error).__name__.lower(), str(error)))
        except Exception as error:
            # A world that breaks the simulator is a finding, and has a seed; one that was never built is not.
            if not worlds:
                raise
            ended.append(Violation("escaped", "".join(traceback.format_exception(error, limit=-4))))
        finally:
            _end(loop)
    (world,) = worlds
    return Outcome(
        seed=plan.seed,
        violations=(*world.violations, *ended, *_unhandled(loop)),
        digest=world.trace.digest(),
        events=len(world.log.rows),
        points=world.faults.passed,
        steps=loop.steps,
        virtual_s=loop.time(),
        wall_s=time.perf_counter() - began_s,
    )


def run_seed(seed: int) -> Outcome:
    """Run the world of a seed."""
    return run_world(draw(seed))


def run_seeds(seeds: Sequence[int]) -> list[Outcome]:
    """Run the worlds of these seeds, one after the other; for a worker process."""
    gc.freeze()  # what is imported stays: collecting after each world need not look at it
    outcomes = []
    for seed in seeds:
        outcomes.append(run_seed(seed))
        gc.collect()
    return outcomes


def _end(loop: VirtualLoop) -> None:
    """Let every task that is left see its cancellation, then close the loop."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.grant(ENDING_STEPS)
    ending = _ended(left)
    with contextlib.suppress(Deadlock, TooManySteps, asyncio.CancelledError):
        if left:
            loop.run_until_complete(ending)
    ending.close()
    loop.close()


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks, timeout=1.0)


def _unhandled(loop: VirtualLoop) -> Iterator[Violation]:
    for context in loop.unhandled:
        error = context.get("exception")
        yield Violation("unhandled", f"{context.get('message')}: {type(error).__name__}: {error}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No logging, and no collector of garbage in the middle of a world: it would run finalizers at odd moments."""
    logging.disable(logging.CRITICAL)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        logging.disable(logging.NOTSET)

"""Fault points one by one: a clean run of a fixed story counts them, then it is told again with a crash at each."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from torpor_simulation.plan import Disaster, Plan
from torpor_simulation.process import Process
from torpor_simulation.running import Outcome, run_world
from torpor_simulation.world import World

STORY_SEED: Final = 11


@dataclass(frozen=True)
class FaultPoint:
    """The `number`th point passed in the story; `program` passes it, `name` says where."""

    number: int
    program: str
    name: str


def story(crash_at: int | None = None) -> Plan:
    """One session on one of two hosts: made, used, moved when its host is drained, woken; and a stranger beside it."""
    plan = Plan(seed=STORY_SEED, hosts=2, schedulers=1, sessions=1, acts=7, trouble_s=120.0, crash_at=crash_at)
    plan.disasters = (
        Disaster(kind="drain", at_s=4.0, lasts_s=2.0, which=0.0),
        Disaster(kind="stranger", at_s=1.0, lasts_s=0.5, which=0.0),
        Disaster(kind="machine-dies", at_s=12.0, lasts_s=0.5, which=0.6),
        Disaster(kind="tidying", at_s=15.0, lasts_s=0.5, which=0.0),
    )
    return plan


def fault_points() -> tuple[Outcome, list[FaultPoint]]:
    """The clean run, and every point it passed before its faults were over."""
    passed: list[FaultPoint] = []

    def count(world: World) -> None:
        def on_pass(process: Process, point: str) -> None:
            passed.append(FaultPoint(world.faults.passed, process.name.partition("#")[0], point))

        world.faults.on_pass = on_pass

    return run_world(story(), prepare=count), passed


def one_of_each(points: list[FaultPoint]) -> Iterator[FaultPoint]:
    """The first, the middle and the last pass of each point by each program."""
    alike: dict[tuple[str, str], list[FaultPoint]] = defaultdict(list)
    for point in points:
        alike[point.program, point.name].append(point)
    for same in alike.values():
        yield from {point.number: point for point in (same[0], same[len(same) // 2], same[-1])}.values()


def crash_at(point: FaultPoint) -> Outcome:
    """The story again, with the program dying at this point."""
    return run_world(story(point.number))

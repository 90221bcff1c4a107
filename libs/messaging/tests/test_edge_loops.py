import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from torpor_contracts.errors import InvariantViolation, Transient
from torpor_messaging.edge_loops import Hints, run_background
from torpor_messaging.service import BackgroundRoute

pytestmark = pytest.mark.anyio
BOUND_S = 5.0


class CountedClock:
    """A clock whose sleeps take no time; after `naps_max` of them it cancels who sleeps."""

    def __init__(self, naps_max: int) -> None:
        self.naps_s: list[float] = []
        self._naps_max = naps_max

    def now(self) -> Any:
        raise AssertionError("a loop does not ask for the time of day")

    def monotonic_s(self) -> float:
        return sum(self.naps_s)

    async def sleep(self, seconds: float) -> None:
        self.naps_s.append(seconds)
        if len(self.naps_s) > self._naps_max:
            raise asyncio.CancelledError
        await asyncio.sleep(0)


def never(error: InvariantViolation) -> None:
    raise AssertionError(error)


async def naps(route: BackgroundRoute, count: int, failures: dict[str, int] | None = None) -> list[float]:
    clock = CountedClock(count)
    with pytest.raises(asyncio.CancelledError):
        await run_background(route, clock, never, failures if failures is not None else {})
    return clock.naps_s


async def test_a_loop_runs_regularly_first_after_its_first_pause() -> None:
    runs = 0

    async def run() -> None:
        nonlocal runs
        runs += 1

    assert await naps(BackgroundRoute("loop", every_s=2.0, run=run, first_s=7.0), 4) == [7.0, 2.0, 2.0, 2.0, 2.0]
    assert runs == 4


@pytest.mark.parametrize("error", [Transient("away"), KeyError("a bug")])
async def test_a_failing_loop_pauses_longer_up_to_a_bound_and_recovers(error: Exception) -> None:
    results = iter([error] * 6 + [None] * 10)
    failures: dict[str, int] = {}

    async def run() -> None:
        result = next(results)
        if result is not None:
            raise result

    route = BackgroundRoute("loop", every_s=1.0, run=run, pause_s_max=16.0)
    assert await naps(route, 8, failures) == [0.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0, 1.0, 1.0]
    assert failures == {"loop": 6}


async def test_a_violated_invariant_ends_the_process() -> None:
    deaths: list[InvariantViolation] = []

    async def run() -> None:
        raise InvariantViolation("two live machines")

    await run_background(BackgroundRoute("loop", every_s=1.0, run=run), CountedClock(9), deaths.append, {})
    assert len(deaths) == 1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110  (many conditions, no one event)
            await asyncio.sleep(0)


async def test_many_commits_at_once_are_one_hint(bus: Any) -> None:
    hints = Hints(bus)
    running = asyncio.ensure_future(hints.run())
    for position in range(100):
        hints.committed(position)
    await until(lambda: bool(bus.published))
    hints.committed(100)
    await until(lambda: len(bus.published) > 1)
    running.cancel()
    assert bus.published == [("hint.log", b""), ("hint.log", b"")]


async def test_a_lost_hint_stops_nothing(bus: Any) -> None:
    bus.mute = True
    hints = Hints(bus)
    running = asyncio.ensure_future(hints.run())
    hints.committed(1)
    for _ in range(10):
        await asyncio.sleep(0)
    bus.mute = False
    hints.committed(2)
    await until(lambda: bool(bus.published))
    running.cancel()

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from torpor_contracts.errors import Transient
from torpor_messaging.dispatch import OrderedDispatch
from torpor_messaging.system import SystemClock

pytestmark = pytest.mark.anyio
BOUND_S = 5.0


class Work:
    """Handles a delivery when its gate opens; remembers order per target and how many ran at once."""

    def __init__(self, *, open_gates: bool = True) -> None:
        self.order: dict[str, list[int]] = defaultdict(list)
        self.gates: dict[str, asyncio.Event] = {}
        self.running = 0
        self.most = 0
        self.begun = asyncio.Event()
        self._open = open_gates

    def gate(self, target: str) -> asyncio.Event:
        if target not in self.gates:
            self.gates[target] = asyncio.Event()
            if self._open:
                self.gates[target].set()
        return self.gates[target]

    async def __call__(self, delivery: Any) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.begun.set()
        await self.gate(delivery.subject).wait()
        await asyncio.sleep(0)
        self.order[delivery.subject].append(delivery.sequence)
        self.running -= 1
        await delivery.ack()


def dispatch(work: Any, **bounds: Any) -> OrderedDispatch:
    options: dict[str, Any] = {"ack_wait_s": 30.0, "parallel_max": 4} | bounds
    return OrderedDispatch(work, lambda delivery: delivery.subject, clock=SystemClock(), **options)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110  (many conditions, no one event)
            await asyncio.sleep(0)


async def test_one_target_in_order_and_targets_in_parallel(delivered: Callable[..., Any]) -> None:
    work = Work()
    deliveries = [delivered(f"t{number % 5}", sequence=number) for number in range(100)]
    async with dispatch(work) as under_test:
        for delivery in deliveries:
            await under_test.submit(delivery)
        assert await under_test.drain(BOUND_S)
    for target, sequences in work.order.items():
        assert sequences == sorted(sequences), target
    ended = [delivery for delivery in deliveries if delivery.end == "ack"]
    assert len(ended) + sum(delivery.end == "nak" for delivery in deliveries) == 100
    assert 1 < work.most <= 4


async def test_a_slow_target_holds_up_no_other(delivered: Callable[..., Any]) -> None:
    work = Work(open_gates=False)
    work.gate("fast").set()
    slow, fast = delivered("slow"), delivered("fast")
    async with dispatch(work) as under_test:
        await under_test.submit(slow)
        await under_test.submit(fast)
        await until(lambda: fast.end == "ack")
        assert slow.end is None
        work.gate("slow").set()
        await until(lambda: slow.end == "ack")


async def test_it_holds_no_more_than_it_may(delivered: Callable[..., Any]) -> None:
    work = Work(open_gates=False)
    async with dispatch(work, held_max=3) as under_test:
        for number in range(3):
            await under_test.submit(delivered("slow", sequence=number))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(under_test.submit(delivered("slow", sequence=3)), timeout=0.05)
        assert under_test.held == 3
        work.gate("slow").set()
        await asyncio.wait_for(under_test.submit(delivered("slow", sequence=4)), timeout=BOUND_S)
        await until(lambda: under_test.held == 0)
    assert work.order["slow"] == [0, 1, 2, 4]


async def test_what_is_held_is_kept_alive(delivered: Callable[..., Any]) -> None:
    work = Work(open_gates=False)
    running, waiting = delivered("slow"), delivered("slow")
    async with dispatch(work, ack_wait_s=0.06) as under_test:
        await under_test.submit(running)
        await under_test.submit(waiting)
        await until(lambda: running.kept_alive > 2 and waiting.kept_alive > 2)
        work.gate("slow").set()
        await until(lambda: under_test.held == 0)


async def test_stopping_finishes_what_runs_and_hands_back_the_rest(delivered: Callable[..., Any]) -> None:
    work = Work(open_gates=False)
    running, waiting, elsewhere, late = (delivered(subject) for subject in ("a", "a", "b", "c"))
    async with dispatch(work, parallel_max=1, held_max=8) as under_test:
        for delivery in (running, waiting, elsewhere):
            await under_test.submit(delivery)
        await work.begun.wait()
        draining = asyncio.ensure_future(under_test.drain(BOUND_S))
        await until(lambda: waiting.end == "nak")
        await under_test.submit(late)
        work.gate("a").set()
        assert await draining
    assert (running.end, waiting.end, elsewhere.end, late.end) == ("ack", "nak", "nak", "nak")


async def test_draining_is_bounded(delivered: Callable[..., Any]) -> None:
    stuck, work = delivered("stuck"), Work(open_gates=False)
    async with dispatch(work) as under_test:
        await under_test.submit(stuck)
        await work.begun.wait()
        assert not await under_test.drain(0.02)
    assert stuck.end is None, "it is delivered again"


async def test_an_end_that_cannot_be_told_stops_nothing(delivered: Callable[..., Any]) -> None:
    work = Work()
    lost, next_one = delivered("a", away=True), delivered("a")
    async with dispatch(work) as under_test:
        await under_test.submit(lost)
        await under_test.submit(next_one)
        await until(lambda: next_one.end == "ack")
        assert lost.end is None


async def test_a_bug_in_processing_is_not_swallowed(delivered: Callable[..., Any]) -> None:
    async def broken(_: Any) -> None:
        raise KeyError("bug")

    async def run() -> None:
        async with dispatch(broken) as under_test:
            await under_test.submit(delivered("a"))
            await until(lambda: False)

    with pytest.raises(ExceptionGroup) as raised:
        await run()
    assert raised.group_contains(KeyError)


async def test_a_lost_keep_alive_stops_nothing(delivered: Callable[..., Any]) -> None:
    work = Work(open_gates=False)
    delivery = delivered("slow")
    tries = 0

    async def unreachable() -> None:
        nonlocal tries
        tries += 1
        raise Transient("the server is away")

    delivery.in_progress = unreachable
    async with dispatch(work, ack_wait_s=0.03) as under_test:
        await under_test.submit(delivery)
        await until(lambda: tries > 2)
        work.gate("slow").set()
        await until(lambda: delivery.end == "ack")

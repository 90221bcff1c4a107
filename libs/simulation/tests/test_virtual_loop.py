import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from torpor_simulation.clock import BEGINNING, SimClock, SimIds
from torpor_simulation.loop import Deadlock, TooManySteps, VirtualLoop
from torpor_simulation.process import Process, ProcessKilled


def run(main: Callable[[], Coroutine[Any, Any, Any]], seed: int = 0, steps_max: int = 10_000) -> Any:
    loop = VirtualLoop(seed, steps_max)
    try:
        return loop.run_until_complete(main())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()


async def interleaving() -> tuple[int, ...]:
    order: list[int] = []

    async def worker(number: int) -> None:
        for _ in range(5):
            order.append(number)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as workers:
        for number in range(4):
            workers.create_task(worker(number))
    return tuple(order)


def test_same_seed_interleaves_alike_and_other_seeds_do_not() -> None:
    assert run(interleaving, seed=3) == run(interleaving, seed=3)
    assert len({run(interleaving, seed=seed) for seed in range(10)}) > 5


def test_an_hour_passes_at_once_and_to_the_second() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run(main) == 3600


def test_a_world_in_which_nothing_can_happen_is_reported_with_who_waits() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"test_virtual_loop\.py:\d+"):
        run(main)


def test_a_world_that_spins_is_reported() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110  (the fault to be reported)
            await asyncio.sleep(0)

    with pytest.raises(TooManySteps, match="100 steps"):
        run(main, steps_max=100)


def test_work_for_a_thread_is_done_at_once_in_this_one() -> None:
    async def main() -> None:
        assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    run(main)


def test_a_kill_ends_all_tasks_of_the_process_and_shuts_its_ports() -> None:
    async def main() -> list[str]:
        seen: list[str] = []
        process = Process("victim")
        clock = SimClock(process)

        async def child() -> None:
            try:
                await clock.sleep(100)
                seen.append("slept through the kill")
            finally:
                try:
                    await clock.sleep(1)
                    seen.append("cleaned up after death")
                except ProcessKilled:
                    seen.append("port shut")

        async def parent() -> None:
            async with asyncio.TaskGroup() as children:
                children.create_task(child())
                children.create_task(child())

        process.spawn(parent(), "parent")
        await asyncio.sleep(10)
        assert len(process.running) == 3
        process.kill()
        await process.ended()
        await asyncio.sleep(1)
        assert process.running == []
        return seen

    assert run(main) == ["port shut", "port shut"]


def test_a_task_born_after_the_kill_never_runs() -> None:
    async def main() -> None:
        process = Process("victim")
        process.kill()

        async def late() -> None:
            raise AssertionError("a dead process works")

        task = process.spawn(late(), "late")
        await asyncio.wait([task])
        assert task.cancelled()

    run(main)


def test_calendar_and_identifiers_come_from_virtual_time_and_seed() -> None:
    async def main() -> tuple[str, str]:
        process = Process("someone")
        ids = SimIds("7")
        await SimClock(process).sleep(5)
        assert (SimClock(process, skew_s=0.5).now() - BEGINNING).total_seconds() == 5.5
        return ids.new("vm"), ids.new("vm")

    first, second = run(main)
    assert (first, second) == run(main)
    assert first != second
    assert first.startswith("vm-")
    assert first[3 + 12] == "7"
    assert first[3 + 16] in "89ab"

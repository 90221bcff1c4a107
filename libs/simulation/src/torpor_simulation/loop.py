"""A virtual-time event loop: seeded interleaving, no sockets, no threads; it reports an idle and an endless world."""

import asyncio
import heapq
import random
from asyncio import base_events
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, Final, TypeVar, TypeVarTuple

from torpor_simulation.process import process_of

T = TypeVar("T")
Args = TypeVarTuple("Args")

STEPS_MAX: Final = 400_000
"""Callbacks one world may run; more is taken for a livelock."""


class Deadlock(Exception):  # noqa: N818  (what it is, not an error of a caller)
    """Nothing is ready and nothing is scheduled, yet the world has not ended."""


class TooManySteps(Exception):  # noqa: N818
    """The loop ran more callbacks than a world may need: something spins."""


class NoSelector:
    """Stands where the base loop keeps its selector: there is no file descriptor to wait for."""

    def close(self) -> None:
        """Nothing is held."""


class NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number: task groups keep sets of tasks, and their order must not depend on addresses."""

    def __init__(self, number: int, coro: Any, *, loop: asyncio.AbstractEventLoop, context: Context | None) -> None:
        self._number = number
        super().__init__(coro, loop=loop, name=f"task-{number}", context=context)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(base_events.BaseEventLoop):
    """Runs what is ready in a seeded order; when nothing is, time jumps to the next timer.

    It overrides `_run_once`, the one method in which `asyncio` meets the operating system.
    """

    _ready: Any
    _scheduled: Any
    _stopping: bool

    def __init__(self, seed: int, steps_max: int = STEPS_MAX) -> None:
        self._now_s = 0.0
        super().__init__()
        self._selector = NoSelector()
        self._random = random.Random(seed).random  # noqa: S311  (an interleaving, not a secret)
        self._tasks_made = 0
        self._steps_left = steps_max
        self._steps_max = steps_max
        self.unhandled: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.unhandled.append(context))

    def grant(self, steps: int) -> None:
        """Let it go on for so many steps, for its tasks to end."""
        self._steps_left = max(self._steps_left, 0) + steps
        self._steps_max += steps

    @property
    def steps(self) -> int:
        """Callbacks run so far."""
        return self._steps_max - self._steps_left

    def time(self) -> float:
        """Virtual seconds since the world began."""
        return self._now_s

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> Any:
        """Make a task and file it under the process it belongs to, so that it can die with it."""
        self._tasks_made += 1
        task = NumberedTask(self._tasks_made, coro, loop=self, context=context)
        if name is not None:
            task.set_name(str(name))
        process = process_of(context)
        if process is not None:
            process.adopt(task)
        return task

    def run_in_executor(
        self,
        executor: Executor | None,  # noqa: ARG002  (the base class names them)
        func: Callable[[*Args], T],
        *args: *Args,
    ) -> asyncio.Future[T]:
        """Do here and now what a thread was meant to do: a thread would bring real time into the world."""
        process = process_of(None)
        if process is not None:
            process.check()
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  (whatever it raises is for who waits for it)
            future.set_exception(error)
        return future

    def _write_to_self(self) -> None:
        """Nothing waits in a selector, so nothing needs waking."""

    def _process_events(self, event_list: Any) -> None:
        """There are no file descriptors."""

    def _run_once(self) -> None:
        ready = self._ready
        scheduled = self._scheduled
        while scheduled and scheduled[0]._cancelled:  # noqa: SLF001  (the base class does the same)
            heapq.heappop(scheduled)._scheduled = False  # noqa: SLF001
        if not ready and not self._stopping:
            if not scheduled:
                raise Deadlock(f"nothing is scheduled at {self._now_s:.3f} s: {self._waiting()}")
            self._now_s = max(self._now_s, scheduled[0]._when)  # noqa: SLF001
        while scheduled and scheduled[0]._when <= self._now_s:  # noqa: SLF001
            handle = heapq.heappop(scheduled)
            handle._scheduled = False  # noqa: SLF001
            ready.append(handle)
        if self._steps_left < len(ready):  # they stay, for their tasks to end
            raise TooManySteps(f"{self._steps_max} steps at {self._now_s:.3f} s: {self._waiting()}")
        batch = list(ready)
        ready.clear()
        self._shuffle(batch)
        self._steps_left -= len(batch)
        for handle in batch:
            if not handle._cancelled:  # noqa: SLF001
                handle._run()  # noqa: SLF001

    def _shuffle(self, batch: list[Any]) -> None:
        random_below_one = self._random
        for last in range(len(batch) - 1, 0, -1):
            other = int(random_below_one() * (last + 1))
            batch[last], batch[other] = batch[other], batch[last]

    def _waiting(self) -> str:
        names = sorted(task.get_name() + " at " + _place(task) for task in asyncio.all_tasks(self))
        return "; ".join(names[:20]) or "no task is left"


def _place(task: "asyncio.Task[Any]") -> str:
    frames = task.get_stack(limit=1)
    return f"{frames[-1].f_code.co_filename.rsplit('/', 1)[-1]}:{frames[-1].f_lineno}" if frames else "its end"

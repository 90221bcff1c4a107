"""Simulated operating-system processes: a set of tasks that die together, and ports that die with them."""

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final

_PROCESS: Final[ContextVar["Process | None"]] = ContextVar("torpor-simulated-process", default=None)
"""The process that the running task belongs to; inherited by every task and callback it makes."""

_PRUNE_AT: Final = 64


class ProcessKilled(asyncio.CancelledError):
    """Raised by each port that a dying process still calls, so that no clean-up of its reaches the world.

    It is a `CancelledError` (a `BaseException`): no error handling of the production code can take it for a failure.
    """


class Process:
    """One run of a program, from its start to its death; a restart is another `Process`.

    A kill cancels every task it has. Real processes run no `finally` when killed: those of a killed `Process` do
    run, but `check` refuses them every port, so nothing they do can be seen from outside.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self._tasks: list[asyncio.Task[Any]] = []
        self._prune_at = _PRUNE_AT
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def adopt(self, task: "asyncio.Task[Any]") -> None:
        """File a task under this process; one that was born after the kill dies at once."""
        if not self.alive:
            task.cancel()
        self._tasks.append(task)
        if len(self._tasks) > self._prune_at:
            self._tasks = [known for known in self._tasks if not known.done()]
            self._prune_at = max(_PRUNE_AT, 2 * len(self._tasks))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Run a coroutine as a task of this process, whoever asks for it."""
        context = copy_context()
        context.run(_PROCESS.set, self)
        return asyncio.get_running_loop().create_task(work, name=f"{self.name}/{name}", context=context)

    def check(self) -> None:
        """Raise `ProcessKilled` once the process is dead; every port calls this first, and again after each wait."""
        if not self.alive:
            raise ProcessKilled(self.name)

    def kill(self) -> None:
        """Die now. The tasks see it at their next step; every port refuses from this moment on."""
        if not self.alive:
            return
        self.alive = False
        for task in self._tasks:
            task.cancel()
        if not self._ended.done():
            self._ended.set_result(None)

    async def ended(self) -> None:
        """Wait for the death of this process."""
        await asyncio.shield(self._ended)

    @property
    def running(self) -> "list[asyncio.Task[Any]]":
        """Its tasks that have not ended yet."""
        return [task for task in self._tasks if not task.done()]


def process_of(context: Context | None) -> Process | None:
    """The process a context belongs to; the running one's when `context` is None."""
    return _PROCESS.get() if context is None else context.get(_PROCESS)

"""Tasks that belong to somebody: kept while they run, their errors seen, all of them ended together."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from torpor_contracts.errors import InvariantViolation

_log: Final = logging.getLogger(__name__)


class Workers:
    """A set of tasks. An `InvariantViolation` of one is kept for `check`, so that the process dies of it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: InvariantViolation | None = None

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run `work` until it ends or `stop` is called."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def check(self) -> None:
        """Raise the first `InvariantViolation` that a task has ended with."""
        if self._broken is not None:
            raise self._broken

    async def stop(self) -> None:
        """Cancel all tasks and wait for their ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, InvariantViolation):
            self._broken = self._broken or error
        elif error is not None:
            _log.error("%s ended: %s", task.get_name(), error, exc_info=error)

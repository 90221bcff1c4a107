"""Where blocking file work runs: in a thread in production, at once where nothing may use a thread."""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Offload(Protocol):
    """Runs blocking work without holding up the event loop."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """The result of `work`; what it raises is raised."""
        ...


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of the loop's pool. A cancelled caller waits for its end: no write goes on unwatched."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def inline(work: Callable[[], T]) -> T:
    """Run `work` here and now, for worlds that may have no second thread."""
    return work()

"""What all followers of the log share: restarts with bounded back-off, progress that can be waited for, a wake-up."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from torpor_contracts.errors import InvariantViolation, Transient
from torpor_eventlog.port import Recorded
from torpor_eventlog.views_port import Feed

Dead = Callable[[str, Recorded, Exception], Awaitable[None]]
"""Where an event goes that a consumer cannot handle: (consumer, row, why). It must be stored when this returns."""

_log: Final = logging.getLogger(__name__)


class Wake:
    """Tells any number of waiters that something moved; a waiter misses nothing notified since it last looked."""

    def __init__(self) -> None:
        self.ticks = 0
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake everybody who waits."""
        self.ticks += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seen: int, timeout_s: float | None = None) -> int:
        """Wait until `ticks` is beyond `seen`, at most `timeout_s`; answers the present `ticks`."""
        if self.ticks == seen:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return self.ticks


class Progress:
    """How far a follower has come."""

    def __init__(self, follower: str) -> None:
        self.position = 0
        self.moved = Wake()
        self._follower = follower

    def move_to(self, position: int) -> None:
        """Set the position; it goes back when a view was dropped to be folded afresh."""
        if position != self.position:
            self.position = position
            self.moved.notify()

    async def wait_for(self, position: int, timeout_s: float) -> None:
        """Return once everything up to `position` is done; raises `Transient` after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.position < position:
                    await self.moved.wait(self.moved.ticks)
        except TimeoutError:
            raise Transient(
                f"{self._follower} is at position {self.position}, not yet at {position}", retry_after_s=timeout_s
            ) from None


@dataclass
class Backoff:
    """Pauses that double from `first_s` to `max_s`, and start afresh once something worked."""

    first_s: float = 0.1
    max_s: float = 10.0
    _next_s: float = field(default=0.0, init=False)

    def worked(self) -> None:
        """The next failure is a first one."""
        self._next_s = 0.0

    def failed(self) -> float:
        """How long to pause now."""
        pause_s = self._next_s or self.first_s
        self._next_s = min(pause_s * 2, self.max_s)
        return pause_s


async def keep_following(
    follower: str,
    feed: Feed,
    start: Callable[[], Awaitable[int]],
    handle: Callable[[list[Recorded]], Awaitable[None]],
) -> None:
    """Hand every batch above `start()` to `handle`; begin again, after a pause, when the feed or the handling fails.

    It goes on until it is cancelled: a follower that gave up would be a view that silently grows old. Only the pause
    is bounded, and every failure is logged. `InvariantViolation` passes: the process must die of it.
    """
    backoff = Backoff()
    while True:
        reason = "the feed ended"
        try:
            async with aclosing(feed.follow(await start())) as batches:
                async for rows in batches:
                    await handle(rows)
                    backoff.worked()
        except InvariantViolation:
            raise
        except Transient as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001  (whatever the feed's library raises; nothing is lost by starting again)
            reason = f"{type(error).__name__}: {error}"
        pause_s = backoff.failed()
        _log.warning("%s stopped following: %s; again in %.1f s", follower, reason, pause_s)
        await asyncio.sleep(pause_s)


async def bury(dead: Dead, follower: str, recorded: Recorded, error: Exception) -> None:
    """Hand an event to `dead`, again and again until it is taken: moving on without that would lose it silently."""
    _log.error(
        "%s cannot handle %s at position %d: %s: %s",
        follower,
        recorded.tag,
        recorded.position,
        type(error).__name__,
        error,
    )
    backoff = Backoff()
    while True:
        try:
            await dead(follower, recorded, error)
        except Exception as failure:  # noqa: BLE001  (any failure to bury is one to try again)
            pause_s = backoff.failed()
            _log.warning(
                "%s: position %d is not buried: %s; again in %.1f s", follower, recorded.position, failure, pause_s
            )
            await asyncio.sleep(pause_s)
        else:
            return

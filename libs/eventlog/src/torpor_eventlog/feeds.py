"""Live sources of the log's rows: the log itself, and one feed shared by all followers of a process."""

from collections import deque
from collections.abc import AsyncGenerator
from itertools import islice
from typing import Final

from torpor_eventlog.following import Wake, keep_following
from torpor_eventlog.port import EventLog, Recorded
from torpor_eventlog.views_port import Feed

READ_MAX: Final = 500
"""Rows a follower is handed at a time."""


class LogFeed:
    """Follows the log by reading it: at a wake-up, and every `poll_s` in case none came."""

    def __init__(self, log: EventLog, wake: Wake | None = None, poll_s: float = 0.25, read_max: int = READ_MAX) -> None:
        self._log = log
        self._wake = wake or Wake()
        self._poll_s = poll_s
        self._read_max = read_max

    async def follow(self, after_position: int) -> AsyncGenerator[list[Recorded], None]:
        """See `Feed.follow`."""
        position = after_position
        while True:
            ticks = self._wake.ticks
            rows = await self._log.read(position, self._read_max)
            if rows:
                position = rows[-1].position
                yield rows
            else:
                await self._wake.wait(ticks, self._poll_s)


class SharedFeed:
    """One live feed for all followers of a process: each row is received, decoded and checked once.

    The newest `keep_max` rows are kept; who is further behind reads the log until it has caught up. `run` drives it:
    without it, followers that have caught up wait.
    """

    def __init__(self, log: EventLog, live: Feed, keep_max: int = 2048, read_max: int = READ_MAX) -> None:
        self._log = log
        self._live = live
        self._read_max = read_max
        self._kept: deque[Recorded] = deque(maxlen=keep_max)
        self._arrived = Wake()

    async def run(self) -> None:
        """Receive rows until cancelled; a live feed that ends or fails is followed again after a pause."""
        await keep_following("shared feed", self._live, self._start, self._receive)

    async def follow(self, after_position: int) -> AsyncGenerator[list[Recorded], None]:
        """See `Feed.follow`."""
        position = after_position
        while True:
            ticks = self._arrived.ticks
            rows = self._newer(position) if self._keeps(position) else await self._log.read(position, self._read_max)
            if rows:
                position = rows[-1].position
                yield rows
            else:
                await self._arrived.wait(ticks)

    async def _start(self) -> int:
        position = self._kept[-1].position if self._kept else (await self._log.head()).position
        # A follower that looked before the head was read must look again: what came in between is in the log only.
        self._arrived.notify()
        return position

    async def _receive(self, rows: list[Recorded]) -> None:
        self._kept.extend(rows)
        self._arrived.notify()

    def _keeps(self, position: int) -> bool:
        """Whether the row after `position` is among the kept ones, or will be when it arrives."""
        return bool(self._kept) and position >= self._kept[0].position - 1

    def _newer(self, position: int) -> list[Recorded]:
        first = position + 1 - self._kept[0].position
        return list(islice(self._kept, first, first + self._read_max))

"""Feeds hand over every row once and in order, however they are woken and however far behind a follower is."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime

import pytest

from torpor_contracts.errors import Transient
from torpor_contracts.host import HostUndrained
from torpor_contracts.ids import HostId
from torpor_eventlog.feeds import LogFeed, SharedFeed
from torpor_eventlog.following import Wake
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Recorded
from torpor_eventlog.views_port import Feed

pytestmark = pytest.mark.anyio
Grow = Callable[..., Awaitable[None]]
BOUND_S = 5.0
EVENT = HostUndrained(host_id=HostId("host-a"), requested_at=datetime(2026, 1, 1, tzinfo=UTC))


async def take(feed: Feed, after_position: int, count: int) -> list[int]:
    positions: list[int] = []
    async with asyncio.timeout(BOUND_S), aclosing(feed.follow(after_position)) as batches:
        async for rows in batches:
            positions += [row.position for row in rows]
            if len(positions) >= count:
                break
    return positions


async def test_the_log_is_read_in_batches_from_anywhere(grow: Grow) -> None:
    log = MemoryLog()
    await grow(log, "host-a", *[EVENT] * 7)
    assert await take(LogFeed(log, read_max=3), 0, 7) == [1, 2, 3, 4, 5, 6, 7]
    assert await take(LogFeed(log, read_max=3), 5, 2) == [6, 7]


async def test_a_wake_up_brings_what_was_appended(grow: Grow) -> None:
    log, wake = MemoryLog(), Wake()
    waiting = asyncio.create_task(take(LogFeed(log, wake, poll_s=3600), 0, 1))
    await asyncio.sleep(0)
    await grow(log, "host-a", EVENT)
    wake.notify()
    assert await waiting == [1]


async def test_a_lost_wake_up_only_costs_the_poll(grow: Grow) -> None:
    log = MemoryLog()
    waiting = asyncio.create_task(take(LogFeed(log, poll_s=0.01), 0, 1))
    await asyncio.sleep(0)
    await grow(log, "host-a", EVENT)
    assert await waiting == [1]


class CountedFeed:
    """A log feed that counts its followers, and fails the first time after two rows."""

    def __init__(self, feed: LogFeed) -> None:
        self._feed = feed
        self.starts: list[int] = []

    async def follow(self, after_position: int) -> AsyncGenerator[list[Recorded], None]:
        self.starts.append(after_position)
        async with aclosing(self._feed.follow(after_position)) as batches:
            async for rows in batches:
                yield rows
                if len(self.starts) == 1 and rows[-1].position >= 6:
                    raise Transient("connection lost")


async def test_one_live_feed_serves_all_followers_wherever_they_stand(grow: Grow) -> None:
    log, wake = MemoryLog(), Wake()
    await grow(log, "host-a", *[EVENT] * 4)
    live = CountedFeed(LogFeed(log, wake, poll_s=60))
    shared = SharedFeed(log, live, keep_max=3, read_max=2)
    followers = [asyncio.create_task(take(shared, after, 30 - after)) for after in (0, 2, 4)]
    running = asyncio.create_task(shared.run())
    for _ in range(26):
        await grow(log, "host-a", EVENT)
        wake.notify()
        await asyncio.sleep(0)
    assert await asyncio.gather(*followers) == [list(range(after + 1, 31)) for after in (0, 2, 4)]
    assert await take(shared, 29, 1) == [30]
    assert await take(shared, 0, 30) == list(range(1, 31))
    running.cancel()
    await asyncio.wait({running})
    assert live.starts[0] <= 6
    assert len(live.starts) == 2, "after the failure it goes on where it was"


async def test_what_came_before_the_shared_feed_ran_is_not_waited_for(grow: Grow) -> None:
    log, wake = MemoryLog(), Wake()
    shared = SharedFeed(log, LogFeed(log, wake, poll_s=60))
    waiting = asyncio.create_task(take(shared, 0, 1))
    await asyncio.sleep(0)
    await grow(log, "host-a", EVENT)  # nobody follows live yet, and nothing else will come
    running = asyncio.create_task(shared.run())
    assert await waiting == [1]
    running.cancel()
    await asyncio.wait({running})

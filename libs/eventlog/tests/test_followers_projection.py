"""A projection's follower: exactly once, past what cannot be folded, and never stopped for good."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from torpor_contracts.errors import Poison, Transient
from torpor_contracts.host import HostDraining, HostUndrained
from torpor_contracts.ids import HostId
from torpor_eventlog.codec import UnknownTag
from torpor_eventlog.feeds import LogFeed
from torpor_eventlog.followers import ProjectionFollower
from torpor_eventlog.following import Wake
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import NewEvent, Recorded
from torpor_eventlog.views_memory import MemoryViewStore
from torpor_eventlog.views_port import Feed, Table, WritableRows

pytestmark = pytest.mark.anyio
Grow = Callable[..., Awaitable[None]]
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
BOUND_S = 5.0


class HostRow(msgspec.Struct, frozen=True, kw_only=True):
    host_id: str
    drains: int
    positions: list[int]


HOSTS = Table(name="hosts", row=HostRow, key="host_id", indexed=("drains",))


class Hosts:
    """Counts drains; `poison` and `halfway` break it at one reason, before or after it has put a row."""

    name = "hosts"
    tables = (HOSTS,)

    def __init__(self) -> None:
        self.poison = ""
        self.halfway = ""

    async def fold(self, rows: WritableRows, event: Any, recorded: Recorded) -> None:
        if not isinstance(event, HostDraining):
            return
        if event.reason == self.poison:
            raise Poison("cannot be folded")
        row = await rows.get(HOSTS, event.host_id) or HostRow(host_id=event.host_id, drains=0, positions=[])
        await rows.put(
            HOSTS,
            HostRow(host_id=row.host_id, drains=row.drains + 1, positions=[*row.positions, recorded.position]),
        )
        if event.reason == self.halfway:
            raise KeyError(event.reason)


class Buried:
    """A `dead` that may fail a number of times first."""

    def __init__(self, failures: int = 0) -> None:
        self.events: list[tuple[str, int, str]] = []
        self.failures = failures

    async def __call__(self, consumer: str, recorded: Recorded, error: Exception) -> None:
        if self.failures:
            self.failures -= 1
            raise Transient("the dead stream is away")
        self.events.append((consumer, recorded.position, type(error).__name__))


def drain(reason: str, host: str = "host-a") -> HostDraining:
    return HostDraining(host_id=HostId(host), reason=reason, requested_at=NOON)


@asynccontextmanager
async def running(follower: ProjectionFollower) -> AsyncIterator[None]:
    task = asyncio.create_task(follower.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def row_of(store: MemoryViewStore, host: str = "host-a") -> HostRow | None:
    async with store.reading() as rows:
        row: HostRow | None = await rows.get(HOSTS, host)
        return row


async def test_folds_what_is_there_and_what_comes(grow: Grow) -> None:
    log, store, wake, dead = MemoryLog(), MemoryViewStore(), Wake(), Buried()
    follower = ProjectionFollower(Hosts(), store, LogFeed(log, wake, poll_s=60), dead=dead, batch_max=2)
    await grow(log, "host-a", *[drain(str(n)) for n in range(5)])
    async with running(follower):
        await follower.wait_for(5, BOUND_S)
        await grow(log, "host-a", drain("late"))
        wake.notify()
        await follower.wait_for(6, BOUND_S)
    assert await row_of(store) == HostRow(host_id="host-a", drains=6, positions=[1, 2, 3, 4, 5, 6])
    assert await store.position("hosts") == follower.position == 6
    assert dead.events == []


async def test_goes_on_from_the_committed_position(grow: Grow) -> None:
    log, store, dead = MemoryLog(), MemoryViewStore(), Buried()
    await grow(log, "host-a", *[drain(str(n)) for n in range(3)])
    for _ in range(3):
        follower = ProjectionFollower(Hosts(), store, LogFeed(log), dead=dead)
        async with running(follower):
            await follower.wait_for(3, BOUND_S)
    assert await row_of(store) == HostRow(host_id="host-a", drains=3, positions=[1, 2, 3])


async def test_rows_delivered_again_are_passed_over(grow: Grow) -> None:
    log, store = MemoryLog(), MemoryViewStore()
    await grow(log, "host-a", *[drain(str(n)) for n in range(4)])
    follower = ProjectionFollower(Hosts(), store, LogFeed(log), dead=Buried())
    rows = await log.read(0, 10)
    await follower.fold(rows[:3])
    await follower.fold(rows)
    assert await row_of(store) == HostRow(host_id="host-a", drains=4, positions=[1, 2, 3, 4])


async def test_two_replicas_fold_one_view_once(grow: Grow) -> None:
    log, store = MemoryLog(), MemoryViewStore()
    await grow(log, "host-a", *[drain(str(n)) for n in range(50)])
    replicas = [ProjectionFollower(Hosts(), store, LogFeed(log), dead=Buried(), batch_max=3) for _ in range(2)]
    async with running(replicas[0]), running(replicas[1]):
        await replicas[0].wait_for(50, BOUND_S)
        await replicas[1].wait_for(50, BOUND_S)
    assert await row_of(store) == HostRow(host_id="host-a", drains=50, positions=list(range(1, 51)))


@pytest.mark.parametrize("breaks", ["poison", "halfway"])
@pytest.mark.parametrize("bad", [0, 2, 4])
async def test_an_event_that_cannot_be_folded_is_buried_and_leaves_no_trace(grow: Grow, breaks: str, bad: int) -> None:
    log, store, dead, hosts = MemoryLog(), MemoryViewStore(), Buried(), Hosts()
    setattr(hosts, breaks, f"r{bad}")
    await grow(log, "host-a", *[drain(f"r{n}") for n in range(5)])
    follower = ProjectionFollower(hosts, store, LogFeed(log), dead=dead)
    await follower.fold(await log.read(0, 10))
    sound = [n + 1 for n in range(5) if n != bad]
    assert await row_of(store) == HostRow(host_id="host-a", drains=4, positions=sound)
    assert dead.events == [("hosts", bad + 1, "Poison" if breaks == "poison" else "KeyError")]
    assert follower.position == 5


async def test_an_unknown_tag_is_buried_and_passed_by(grow: Grow) -> None:
    log, store, dead = MemoryLog(), MemoryViewStore(), Buried()
    unknown = NewEvent(stream="host-a", tag="host-painted.v9", data=b'{"type":"host-painted.v9"}')
    await grow(log, "host-a", drain("a"), unknown, unknown, drain("b"))
    follower = ProjectionFollower(Hosts(), store, LogFeed(log), dead=dead)
    await follower.fold(await log.read(0, 10))
    assert dead.events == [("hosts", 2, UnknownTag.__name__), ("hosts", 3, UnknownTag.__name__)]
    assert await row_of(store) == HostRow(host_id="host-a", drains=2, positions=[1, 4])


async def test_nothing_is_passed_by_before_it_is_buried(grow: Grow) -> None:
    log, store, dead, hosts = MemoryLog(), MemoryViewStore(), Buried(failures=2), Hosts()
    hosts.poison = "a"
    await grow(log, "host-a", drain("a"))
    positions = []

    async def burying(consumer: str, recorded: Recorded, error: Exception) -> None:
        positions.append(await store.position("hosts"))
        await dead(consumer, recorded, error)

    follower = ProjectionFollower(hosts, store, LogFeed(log), dead=burying)
    await follower.fold(await log.read(0, 10))
    assert positions == [0, 0, 0]
    assert dead.events == [("hosts", 1, "Poison")]
    assert await store.position("hosts") == 1


class BrittleFeed:
    """Ends, fails and skips before it behaves."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.follows = 0

    async def follow(self, after_position: int) -> AsyncGenerator[list[Recorded], None]:
        self.follows += 1
        if self.follows == 1:
            raise OSError("connection lost")
        async for rows in self._feed.follow(after_position):
            if self.follows == 2:
                yield rows[:1]
                return
            if self.follows == 3:
                yield rows[1:]
            yield rows


async def test_survives_a_feed_that_fails_ends_and_skips(grow: Grow) -> None:
    log, store = MemoryLog(), MemoryViewStore()
    await grow(log, "host-a", *[drain(str(n)) for n in range(4)])
    feed = BrittleFeed(LogFeed(log))
    follower = ProjectionFollower(Hosts(), store, feed, dead=Buried())
    async with running(follower):
        await follower.wait_for(4, BOUND_S)
    assert feed.follows == 4
    assert await row_of(store) == HostRow(host_id="host-a", drains=4, positions=[1, 2, 3, 4])


async def test_a_view_dropped_under_a_running_follower_is_folded_again(grow: Grow) -> None:
    log, store, wake = MemoryLog(), MemoryViewStore(), Wake()
    await grow(log, "host-a", drain("a"), drain("b"))
    follower = ProjectionFollower(Hosts(), store, LogFeed(log, wake), dead=Buried())
    async with running(follower):
        await follower.wait_for(2, BOUND_S)
        await store.drop("hosts", [HOSTS])
        await grow(log, "host-a", drain("c"))
        wake.notify()
        await follower.wait_for(3, BOUND_S)
    assert await row_of(store) == HostRow(host_id="host-a", drains=3, positions=[1, 2, 3])


async def test_waiting_for_a_position_has_an_end() -> None:
    follower = ProjectionFollower(Hosts(), MemoryViewStore(), LogFeed(MemoryLog()), dead=Buried())
    async with running(follower):
        with pytest.raises(Transient, match="is at position 0, not yet at 1"):
            await follower.wait_for(1, 0.01)


async def test_events_of_other_kinds_move_the_position_only(grow: Grow) -> None:
    log, store = MemoryLog(), MemoryViewStore()
    await grow(log, "host-a", HostUndrained(host_id=HostId("host-a"), requested_at=NOON))
    follower = ProjectionFollower(Hosts(), store, LogFeed(log), dead=Buried())
    await follower.fold(await log.read(0, 10))
    assert await row_of(store) is None
    assert await store.position("hosts") == 1

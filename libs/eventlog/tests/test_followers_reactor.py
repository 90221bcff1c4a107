"""A reactor's follower: at least once, in order per stream, streams in parallel, and nothing lost silently."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from torpor_contracts.errors import Poison, Transient
from torpor_contracts.host import HostDraining, HostUndrained
from torpor_contracts.ids import HostId
from torpor_contracts.session import RetryRule
from torpor_eventlog.feeds import LogFeed
from torpor_eventlog.followers import ReactorFollower
from torpor_eventlog.following import Wake
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import NewEvent, Recorded
from torpor_eventlog.views_memory import MemoryViewStore

pytestmark = pytest.mark.anyio
Grow = Callable[..., Awaitable[None]]
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
BOUND_S = 5.0
QUICK = RetryRule(attempts_max=3, backoff_s=0.001, backoff_s_max=0.002, deadline_s=5.0)


def drain(host: str, reason: str) -> HostDraining:
    return HostDraining(host_id=HostId(host), reason=reason, requested_at=NOON)


class World:
    """A log, a store and a reactor whose reactions can be held, refused and broken, by the event's reason."""

    def __init__(self, **options: Any) -> None:
        self.log = MemoryLog()
        self.store = MemoryViewStore()
        self.wake = Wake()
        self.reacted: list[tuple[str, str]] = []
        self.held: dict[str, asyncio.Event] = {}
        self.errors: dict[str, list[Exception]] = {}
        self.changed = Wake()
        self.buried: list[tuple[int, str]] = []
        self.inside = 0
        self.inside_max = 0
        self.options = options

    def follower(self) -> ReactorFollower:
        options: dict[str, Any] = {"retry": QUICK, "save_every_s": 0.001} | self.options
        feed = LogFeed(self.log, self.wake, poll_s=60)
        return ReactorFollower("porter", (HostDraining,), self.react, self.store, feed, dead=self.bury, **options)

    async def react(self, event: HostDraining, recorded: Recorded) -> None:
        self.inside += 1
        self.inside_max = max(self.inside, self.inside_max)
        try:
            if event.reason in self.held:
                await self.held[event.reason].wait()
            await asyncio.sleep(0)
            if self.errors.get(event.reason):
                raise self.errors[event.reason].pop()
            self.reacted.append((recorded.stream, event.reason))
            self.changed.notify()
        finally:
            self.inside -= 1

    async def has_reacted(self, times: int) -> None:
        async with asyncio.timeout(BOUND_S):
            while len(self.reacted) < times:
                await self.changed.wait(self.changed.ticks)

    async def bury(self, consumer: str, recorded: Recorded, error: Exception) -> None:
        assert consumer == "porter"
        self.buried.append((recorded.position, type(error).__name__))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ReactorFollower]:
        follower = self.follower()
        task = asyncio.create_task(follower.run())
        try:
            yield follower
        finally:
            task.cancel()
            await asyncio.wait({task})


async def test_reacts_in_order_per_stream_and_streams_do_not_wait_for_each_other(grow: Grow) -> None:
    world = World()
    world.held["a1"] = asyncio.Event()
    for n in range(1, 4):
        await grow(world.log, "host-a", drain("host-a", f"a{n}"))
        await grow(world.log, "host-b", drain("host-b", f"b{n}"))
    async with world.running() as follower:
        await world.has_reacted(3)
        assert world.reacted == [("host-b", "b1"), ("host-b", "b2"), ("host-b", "b3")]
        assert follower.position == 0, "the held reaction is the first: nothing may be saved"
        world.held["a1"].set()
        await follower.wait_for(6, BOUND_S)
    assert world.reacted[3:] == [("host-a", "a1"), ("host-a", "a2"), ("host-a", "a3")]
    assert await world.store.position("porter") == 6


async def test_other_events_move_the_position_without_a_reaction(grow: Grow) -> None:
    world = World()
    await grow(world.log, "host-a", HostUndrained(host_id=HostId("host-a"), requested_at=NOON))
    await grow(world.log, "host-a", HostUndrained(host_id=HostId("host-a"), requested_at=NOON))
    async with world.running() as follower:
        await follower.wait_for(2, BOUND_S)
    assert world.reacted == []
    assert await world.store.position("porter") == 2


async def test_what_was_not_settled_happens_again(grow: Grow) -> None:
    world = World()
    world.held["a2"] = asyncio.Event()
    await grow(world.log, "host-a", drain("host-a", "a1"), drain("host-a", "a2"))
    await grow(world.log, "host-b", drain("host-b", "b1"))
    async with world.running() as follower:
        await follower.wait_for(1, BOUND_S)
        await world.has_reacted(2)
    assert await world.store.position("porter") == 1
    world.held.clear()
    async with world.running() as follower:
        await follower.wait_for(3, BOUND_S)
    assert world.reacted.count(("host-a", "a1")) == 1
    assert world.reacted.count(("host-a", "a2")) == 1
    assert world.reacted.count(("host-b", "b1")) == 2


async def test_a_transient_error_is_tried_again_in_place(grow: Grow) -> None:
    world = World()
    world.errors["a1"] = [Transient("away", retry_after_s=0.001), Transient("away", retry_after_s=0.001)]
    await grow(world.log, "host-a", drain("host-a", "a1"), drain("host-a", "a2"))
    async with world.running() as follower:
        await follower.wait_for(2, BOUND_S)
    assert world.reacted == [("host-a", "a1"), ("host-a", "a2")]
    assert world.buried == []


async def test_after_the_last_attempt_the_event_is_buried_and_the_stream_goes_on(grow: Grow) -> None:
    world = World()
    world.errors["a1"] = [Transient("away", retry_after_s=0.001)] * 3
    await grow(world.log, "host-a", drain("host-a", "a1"), drain("host-a", "a2"))
    async with world.running() as follower:
        await follower.wait_for(2, BOUND_S)
    assert world.buried == [(1, "Transient")]
    assert world.reacted == [("host-a", "a2")]


async def test_the_deadline_ends_the_attempts_too(grow: Grow) -> None:
    world = World(retry=RetryRule(attempts_max=1000, backoff_s=0.5, backoff_s_max=0.5, deadline_s=0.1))
    world.errors["a1"] = [Transient("away")] * 1000
    await grow(world.log, "host-a", drain("host-a", "a1"))
    async with world.running() as follower:
        await follower.wait_for(1, BOUND_S)
    assert world.buried == [(1, "Transient")]
    assert len(world.errors["a1"]) == 999


@pytest.mark.parametrize("error", [Poison("never"), KeyError("a bug")])
async def test_poison_and_bugs_are_buried_at_once(grow: Grow, error: Exception) -> None:
    world = World()
    world.errors["a1"] = [error]
    await grow(world.log, "host-a", drain("host-a", "a1"), drain("host-a", "a2"))
    async with world.running() as follower:
        await follower.wait_for(2, BOUND_S)
    assert world.buried == [(1, type(error).__name__)]
    assert world.reacted == [("host-a", "a2")]


async def test_an_unknown_tag_is_buried_in_its_turn(grow: Grow) -> None:
    world = World()
    world.held["a1"] = asyncio.Event()
    unknown = NewEvent(stream="host-a", tag="host-painted.v9", data=b'{"type":"host-painted.v9"}')
    await grow(world.log, "host-a", drain("host-a", "a1"), unknown, drain("host-a", "a3"))
    async with world.running() as follower:
        await asyncio.sleep(0)
        assert world.buried == []
        world.held["a1"].set()
        await follower.wait_for(3, BOUND_S)
    assert world.buried == [(2, "UnknownTag")]
    assert world.reacted == [("host-a", "a1"), ("host-a", "a3")]


async def test_reactions_in_parallel_and_waiting_are_bounded(grow: Grow) -> None:
    world = World(parallel_max=3, pending_max=10)
    for n in range(40):
        await grow(world.log, f"host-{n}", drain(f"host-{n}", f"r{n}"))
    async with world.running() as follower:
        await follower.wait_for(40, BOUND_S)
    assert world.inside_max == 3
    assert len(world.reacted) == 40


async def test_a_stream_that_waits_for_its_next_attempt_holds_no_slot(grow: Grow) -> None:
    world = World(parallel_max=1, retry=RetryRule(attempts_max=9, backoff_s=60.0, backoff_s_max=60.0, deadline_s=900.0))
    world.errors["a1"] = [Transient("away")]
    await grow(world.log, "host-a", drain("host-a", "a1"))
    await grow(world.log, "host-b", drain("host-b", "b1"))
    async with world.running():
        await world.has_reacted(1)
    assert world.reacted == [("host-b", "b1")]

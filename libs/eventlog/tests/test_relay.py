"""The relay: sequence equals position after any crash, with any number of relays, and never on a foreign stream."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest

from tests.support.event_stream import FakeStream, KilledError
from torpor_contracts.host import HostUndrained
from torpor_contracts.ids import HostId
from torpor_eventlog.following import Wake
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.relay import Relay, StreamEnd, StreamMismatch

pytestmark = pytest.mark.anyio
Grow = Callable[..., Awaitable[None]]
BOUND_S = 5.0
EVENT = HostUndrained(host_id=HostId("host-a"), requested_at=datetime(2026, 1, 1, tzinfo=UTC))


@asynccontextmanager
async def running(*relays: Relay) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(relay.run()) for relay in relays]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def stored(stream: FakeStream, count: int) -> None:
    async with asyncio.timeout(BOUND_S):
        while len(stream.stored) < count:
            await stream.changed.wait(stream.changed.ticks)


async def test_copies_what_is_there_and_what_comes(grow: Grow) -> None:
    log, stream, wake = MemoryLog(), FakeStream(), Wake()
    await grow(log, "host-a", *[EVENT] * 7)
    relay = Relay(log, stream, wake, poll_s=3600, window_max=3)
    async with running(relay):
        await relay.wait_for(7, BOUND_S)
        await grow(log, "host-a", EVENT)
        wake.notify()
        await relay.wait_for(8, BOUND_S)
    assert stream.stored == await log.read(0, 100)


async def test_a_lost_hint_only_costs_the_poll(grow: Grow) -> None:
    log, stream = MemoryLog(), FakeStream()
    async with running(Relay(log, stream, poll_s=0.01)):
        await asyncio.sleep(0)
        await grow(log, "host-a", EVENT)
        await stored(stream, 1)


async def test_a_tail_that_the_stream_lost_is_put_back_though_nothing_new_comes(grow: Grow) -> None:
    log, stream = MemoryLog(), FakeStream()
    await grow(log, "host-a", *[EVENT] * 6)
    async with running(Relay(log, stream, poll_s=0.01, look_s=0.01)):
        await stored(stream, 6)
        del stream.stored[3:]
        await stored(stream, 6)
    assert stream.stored == await log.read(0, 100)


async def test_killed_at_every_step_it_resumes_without_gap_or_double(grow: Grow) -> None:
    log = MemoryLog()
    await grow(log, "host-a", *[EVENT] * 6)
    clean = FakeStream()
    async with running(Relay(log, clean, window_max=2)):
        await stored(clean, 6)
    for kill_at in range(1, clean.steps + 1):
        stream = FakeStream()
        stream.kill_at = kill_at
        with pytest.raises(KilledError):
            async with asyncio.timeout(BOUND_S):
                await Relay(log, stream, window_max=2, poll_s=0.001).run()
        async with running(Relay(log, stream, window_max=2)):
            await stored(stream, 6)
        assert stream.stored == await log.read(0, 100), f"killed at step {kill_at}"


async def test_an_unanswered_publish_is_not_repeated(grow: Grow) -> None:
    log, stream = MemoryLog(), FakeStream()
    await grow(log, "host-a", *[EVENT] * 6)
    stream.lose_answer_at = 4
    relay = Relay(log, stream)
    async with running(relay):
        await relay.wait_for(6, BOUND_S)
    assert stream.stored == await log.read(0, 100)


async def test_it_outlasts_a_server_that_is_away(grow: Grow) -> None:
    log, stream = MemoryLog(), FakeStream()
    await grow(log, "host-a", *[EVENT] * 3)
    stream.away = 3
    relay = Relay(log, stream)
    async with running(relay):
        await relay.wait_for(3, BOUND_S)
    assert stream.stored == await log.read(0, 100)


async def test_a_zombie_is_refused_and_both_relays_keep_the_stream_right(grow: Grow) -> None:
    log, stream = MemoryLog(), FakeStream()
    await grow(log, "host-a", *[EVENT] * 20)
    relays = [Relay(log, stream, window_max=3, poll_s=0.001) for _ in range(3)]
    async with running(*relays):
        for relay in relays:
            await relay.wait_for(20, BOUND_S)
        await grow(log, "host-a", *[EVENT] * 20)
        for relay in relays:
            await relay.wait_for(40, BOUND_S)
    assert stream.stored == await log.read(0, 100)


async def test_a_stream_made_afresh_under_a_running_relay_is_filled_again(grow: Grow) -> None:
    log, stream, wake = MemoryLog(), FakeStream(), Wake()
    await grow(log, "host-a", *[EVENT] * 5)
    relay = Relay(log, stream, wake)
    async with running(relay):
        await relay.wait_for(5, BOUND_S)
        stream.stored.clear()
        await grow(log, "host-a", EVENT)
        wake.notify()
        await stored(stream, 6)
    assert stream.stored == await log.read(0, 100)


async def test_a_stream_with_more_than_the_log_is_refused(grow: Grow) -> None:
    log, other, stream = MemoryLog(), MemoryLog(), FakeStream()
    await grow(other, "host-a", *[EVENT] * 5)
    stream.stored = await other.read(0, 100)
    await grow(log, "host-a", *[EVENT] * 3)
    with pytest.raises(StreamMismatch, match="the log ends at 3 already") as refused:
        await Relay(log, stream).run()
    assert refused.value.position == 5


async def test_the_stream_of_another_log_is_refused_and_nothing_is_published(grow: Grow) -> None:
    log, other, stream = MemoryLog(), MemoryLog(), FakeStream()
    await grow(other, "host-b", *[EVENT] * 3)
    stream.stored = await other.read(0, 100)
    await grow(log, "host-a", *[EVENT] * 5)
    with pytest.raises(StreamMismatch, match="torpor audit rebuild --stream") as refused:
        await Relay(log, stream).run()
    assert refused.value.position == 3
    assert len(stream.stored) == 3


async def test_a_stream_whose_end_cannot_be_read_is_refused(grow: Grow) -> None:
    class Unreadable(FakeStream):
        async def last(self) -> StreamEnd:
            return StreamEnd(2, None)

    log = MemoryLog()
    await grow(log, "host-a", *[EVENT] * 5)
    with pytest.raises(StreamMismatch, match="cannot be read"):
        await Relay(log, Unreadable()).run()

"""A healing feed hands over the log's own rows, whatever the stream lost, changed, repeated or made up."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor_contracts.errors import Poison
from torpor_contracts.host import HostUndrained
from torpor_contracts.ids import HostId
from torpor_eventlog.healing import Carried, Damage, HealingFeed
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Recorded

pytestmark = pytest.mark.anyio
Grow = Callable[..., Awaitable[None]]
BOUND_S = 5.0
EVENT = HostUndrained(host_id=HostId("host-a"), requested_at=datetime(2026, 1, 1, tzinfo=UTC))


class Messages:
    """A stream whose stored messages are given; after the last it is silent."""

    def __init__(self, messages: Sequence[Carried], batch: int = 3) -> None:
        self.messages = list(messages)
        self._batch = batch
        self.more = asyncio.Event()

    async def follow(self, after_sequence: int) -> AsyncGenerator[list[Carried], None]:
        sent = 0
        while True:
            fresh = self.messages[sent:]
            sent = len(self.messages)
            wanted = [carried for carried in fresh if carried.sequence > after_sequence]
            for start in range(0, len(wanted), self._batch):
                yield wanted[start : start + self._batch]
            await self.more.wait()
            self.more.clear()


async def copies(log: MemoryLog) -> list[Carried]:
    return [Carried(row.position, row) for row in await log.read(0, 100)]


async def take(
    log: MemoryLog, source: Messages, after: int, count: int, *, idle_look_s: float = 3600
) -> tuple[list[Recorded], list[tuple[str, int]]]:
    damages: list[Damage] = []
    feed = HealingFeed(log, source, damages.append, idle_look_s=idle_look_s, read_max=4)
    taken: list[Recorded] = []
    async with asyncio.timeout(BOUND_S), aclosing(feed.follow(after)) as batches:
        async for rows in batches:
            taken += rows
            if len(taken) >= count:
                break
    return taken, [(damage.kind, damage.position) for damage in damages]


@pytest.fixture
async def log(grow: Grow) -> MemoryLog:
    log = MemoryLog()
    await grow(log, "host-a", *[EVENT] * 10)
    return log


@pytest.mark.parametrize("after", [0, 1, 6, 9])
async def test_a_sound_stream_is_passed_on_as_it_is(log: MemoryLog, after: int) -> None:
    rows, damages = await take(log, Messages(await copies(log)), after, 10 - after)
    assert rows == await log.read(after, 100)
    assert damages == []


async def test_a_gap_is_filled_from_the_log(log: MemoryLog) -> None:
    stream = await copies(log)
    rows, damages = await take(log, Messages(stream[:3] + stream[8:]), 0, 10)
    assert rows == await log.read(0, 100)
    assert damages == [("missing", 4)]


@pytest.mark.parametrize("field", ["data", "stream", "tenant_id", "tag", "digest", "occurred_at_us", "version"])
async def test_a_changed_message_is_replaced_from_the_log(log: MemoryLog, field: str) -> None:
    stream = await copies(log)
    row = stream[4].row
    assert row is not None
    change = {"data": b"{}", "digest": bytes(32), "occurred_at_us": 1, "version": -1}.get(field, "changed")
    stream[4] = Carried(5, msgspec.structs.replace(row, **{field: change}))
    rows, damages = await take(log, Messages(stream), 0, 10)
    assert rows == await log.read(0, 100)
    assert damages == [("changed", 5)]


async def test_an_unreadable_message_is_replaced_from_the_log(log: MemoryLog) -> None:
    stream = await copies(log)
    stream[4] = Carried(5, None)
    rows, damages = await take(log, Messages(stream), 0, 10)
    assert rows == await log.read(0, 100)
    assert damages == [("unreadable", 5)]


async def test_a_message_published_twice_is_found_and_what_follows_is_healed_as_one_damage(log: MemoryLog) -> None:
    stream = await copies(log)
    shifted = stream[:5] + [Carried(row.sequence + 1, row.row) for row in stream[4:9]]
    rows, damages = await take(log, Messages(shifted), 0, 10)
    assert rows == await log.read(0, 100)
    assert damages == [("misplaced", 6)]


async def test_a_message_delivered_twice_is_passed_on_once(log: MemoryLog) -> None:
    stream = await copies(log)
    rows, damages = await take(log, Messages(stream[:5] + stream[3:]), 0, 10)
    assert rows == await log.read(0, 100)
    assert damages == [("duplicate", 4)]


async def test_each_damage_is_told_once(log: MemoryLog) -> None:
    stream = await copies(log)
    stream[1], stream[2], stream[7] = Carried(2, None), Carried(3, None), Carried(8, None)
    rows, damages = await take(log, Messages(stream), 0, 10)
    assert rows == await log.read(0, 100)
    assert damages == [("unreadable", 2), ("unreadable", 8)]


async def test_a_message_that_the_log_does_not_have_is_never_passed_on(log: MemoryLog, grow: Grow) -> None:
    stream = await copies(log)
    assert stream[9].row is not None
    invented = msgspec.structs.replace(stream[9].row, position=11, version=11)
    source = Messages([*stream, Carried(11, invented)])
    rows, damages = await take(log, source, 0, 10)
    assert rows == await log.read(0, 100)
    told: asyncio.Queue[Damage] = asyncio.Queue()
    feed = HealingFeed(log, source, told.put_nowait, idle_look_s=0.01)
    async with asyncio.timeout(BOUND_S), aclosing(feed.follow(10)) as batches:
        coming = asyncio.ensure_future(anext(batches))
        damage = await told.get()
        await grow(log, "host-a", EVENT)
        assert await coming == (await log.read(10, 100))
    assert damages == []
    assert (damage.kind, damage.position) == ("extra", 11)
    assert told.empty()


async def test_a_silent_stream_is_helped_out_by_the_log_and_may_come_later(log: MemoryLog, grow: Grow) -> None:
    stream = await copies(log)
    source = Messages(stream[:6])
    damage: list[Damage] = []
    feed = HealingFeed(log, source, damage.append, idle_look_s=0.01)
    taken: list[Recorded] = []
    async with asyncio.timeout(BOUND_S), aclosing(feed.follow(0)) as batches:
        async for rows in batches:
            taken += rows
            if len(taken) == 10:
                await grow(log, "host-a", EVENT)
                source.messages += await copies(log)  # all of it, late: 7 to 10 were read from the log
                source.messages = source.messages[:6] + source.messages[12:]
                source.more.set()
            if len(taken) == 11:
                break
    assert taken == await log.read(0, 100)
    assert damage == []


async def test_a_cursor_beyond_the_log_is_an_error_that_says_what_to_do(log: MemoryLog) -> None:
    with pytest.raises(Poison, match="torpor audit rebuild"):
        await take(log, Messages([]), 11, 1)


async def test_the_feed_ends_when_the_stream_does(log: MemoryLog) -> None:
    class Ending:
        async def follow(self, after_sequence: int) -> AsyncGenerator[list[Carried], None]:
            yield (await copies(log))[after_sequence:]

    feed = HealingFeed(log, Ending(), lambda _: None)
    async with aclosing(feed.follow(0)) as batches:
        assert [len(rows) async for rows in batches] == [10]


def test_any_mixture_of_damages_leaves_the_log_as_it_is(grow: Grow) -> None:
    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        async def scenario() -> None:
            log = MemoryLog()
            await grow(log, "host-a", *[EVENT] * 10)
            stream = await copies(log)
            mixed: list[Carried] = []
            for carried in stream:
                what = data.draw(st.sampled_from(["sound", "sound", "lost", "blank", "twice", "other"]))
                if what == "other":
                    mixed.append(Carried(carried.sequence, data.draw(st.sampled_from(stream)).row))
                elif what != "lost":
                    mixed.append(Carried(carried.sequence, None if what == "blank" else carried.row))
                if what == "twice":
                    mixed.append(carried)
            after = data.draw(st.integers(0, 9))
            source = Messages(mixed, batch=data.draw(st.integers(1, 5)))
            rows, _ = await take(log, source, after, 10 - after, idle_look_s=0.001)
            assert rows == await log.read(after, 100)

        asyncio.run(scenario())

    check()

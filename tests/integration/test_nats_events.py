"""The stream EVENTS on a real server: fenced, followed through every restart, and read as it is."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from hashlib import sha256

import pytest

from tests.support.nats import NatsServer
from torpor_contracts.errors import Transient
from torpor_contracts.host import HostDraining
from torpor_contracts.ids import CommandId, HostId, TenantId
from torpor_eventlog.codec import encode_event
from torpor_eventlog.healing import Carried, Damage, HealingFeed
from torpor_eventlog.instants import from_us
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Commit, Recorded
from torpor_eventlog.relay import FencedOut, Relay, StreamMismatch
from torpor_messaging.nats_events import NatsEventSource, NatsEventStream
from torpor_messaging.nats_link import Link

pytestmark = pytest.mark.anyio
BOUND_S = 20.0
Connect = Callable[[str], Awaitable[Link]]


@pytest.fixture
async def connect(nats_server: NatsServer) -> AsyncIterator[Connect]:
    links: list[Link] = []

    async def open_link(user: str) -> Link:
        links.append(await nats_server.link(user))
        return links[-1]

    yield open_link
    for link in links:
        await link.close()


async def grow(log: MemoryLog, count: int) -> list[Recorded]:
    """Append `count` events and answer all rows of the log."""
    start = (await log.head()).position
    for number in range(start, start + count):
        stream = f"host-{number % 7}"
        event = HostDraining(host_id=HostId(stream), reason=f"n° {number}", requested_at=from_us(number))
        await log.append(
            Commit(
                command_id=CommandId(f"system/c-{number}"),
                tenant_id=TenantId("system"),
                causation_id=f"system/c-{number}",
                correlation_id="a goal",
                request_digest=sha256(str(number).encode()).digest(),
                occurred_at_us=number,
                expected={stream: len(await log.load(stream))},
                events=[encode_event(stream, event)],
            )
        )
    return await log.read(0, start + count)


async def take(source: AsyncGenerator[list[Carried], None], count: int) -> list[Carried]:
    taken: list[Carried] = []
    async with asyncio.timeout(BOUND_S):
        while len(taken) < count:
            taken += await anext(source)
    return taken


async def test_rows_come_out_as_they_went_in(connect: Connect) -> None:
    rows = await grow(MemoryLog(), 1200)
    stream = NatsEventStream(await connect("log-relay"))
    assert await stream.last() == (0, None)
    await stream.publish(rows[:700])
    await stream.publish(rows[700:])
    assert await stream.last() == (1200, rows[-1].digest)
    async with aclosing(NatsEventSource(await connect("billing")).follow(0)) as source:
        assert await take(source, 1200) == [(row.position, row) for row in rows]
    async with aclosing(NatsEventSource(await connect("billing")).follow(1195)) as source:
        assert [sequence for sequence, _ in await take(source, 5)] == [1196, 1197, 1198, 1199, 1200]
    auditor = NatsEventStream(await connect("operator"))
    assert await auditor.read(0, 1000) == [(row.position, row) for row in rows[:1000]]
    assert await auditor.read(1000, 1000) == [(row.position, row) for row in rows[1000:]]
    assert await auditor.read(1200, 1000) == []


async def test_a_zombie_relay_is_refused(connect: Connect) -> None:
    rows = await grow(MemoryLog(), 30)
    new, zombie = NatsEventStream(await connect("log-relay")), NatsEventStream(await connect("log-relay"))
    await zombie.publish(rows[:10])
    await new.publish(rows[10:20])
    with pytest.raises(FencedOut):
        await zombie.publish(rows[10:15])
    with pytest.raises(FencedOut):
        await zombie.publish(rows[25:])
    assert await new.last() == (20, rows[19].digest)


async def test_what_takes_a_rows_place_is_no_other_relay(connect: Connect) -> None:
    rows = await grow(MemoryLog(), 3)
    admin = await connect("admin")
    stream = NatsEventStream(admin)
    await stream.publish(rows[:1])
    await admin.request("relay.system.host-draining.host-1", b"rubbish", BOUND_S)
    with pytest.raises(StreamMismatch) as found:
        await stream.publish(rows[1:])
    assert found.value.position == 2


async def test_followers_wait_for_what_comes(connect: Connect) -> None:
    log = MemoryLog()
    stream = NatsEventStream(await connect("log-relay"))
    async with aclosing(NatsEventSource(await connect("scheduler")).follow(0)) as source:
        coming = asyncio.ensure_future(take(source, 1))
        rows = await grow(log, 1)
        await stream.publish(rows)
        assert await coming == [(1, rows[0])]


async def test_a_follower_is_told_when_the_server_was_away(connect: Connect, nats_server: NatsServer) -> None:
    rows = await grow(MemoryLog(), 3)
    await NatsEventStream(await connect("log-relay")).publish(rows)
    async with aclosing(NatsEventSource(await connect("scheduler")).follow(0)) as source:
        await take(source, 3)
        coming = asyncio.ensure_future(anext(source))
        await asyncio.to_thread(nats_server.kill)
        await asyncio.to_thread(nats_server.start)
        with pytest.raises(Transient):
            await asyncio.wait_for(coming, BOUND_S)


async def test_a_follower_is_told_when_the_stream_is_made_anew(connect: Connect) -> None:
    rows = await grow(MemoryLog(), 3)
    stream = NatsEventStream(await connect("admin"))
    await stream.publish(rows)
    async with aclosing(NatsEventSource(await connect("scheduler")).follow(0)) as source:
        await take(source, 3)
        coming = asyncio.ensure_future(anext(source))
        await stream.recreate()
        assert await stream.last() == (0, None)
        with pytest.raises(Transient):
            await asyncio.wait_for(coming, BOUND_S)
    await stream.publish(rows)
    async with aclosing(NatsEventSource(await connect("scheduler")).follow(2)) as source:
        assert await take(source, 1) == [(3, rows[2])]


async def test_a_stream_that_is_not_there_is_waited_for(bare_nats: NatsServer) -> None:
    link = await bare_nats.link("log-relay")
    stream = NatsEventStream(link)
    with pytest.raises(Transient):
        await stream.last()
    with pytest.raises(Transient):
        await stream.publish(await grow(MemoryLog(), 1))
    with pytest.raises(Transient):
        await anext(NatsEventSource(link).follow(0))
    await link.close()


async def test_what_is_no_row_is_carried_as_none(connect: Connect) -> None:
    rows = await grow(MemoryLog(), 2)
    admin = await connect("admin")
    stream = NatsEventStream(admin)
    await stream.publish(rows[:1])
    await admin.request("relay.system.host-draining.host-1", b"rubbish", BOUND_S)
    assert await stream.last() == (2, None)
    assert await stream.read(0, 10) == [(1, rows[0]), (2, None)]
    async with aclosing(NatsEventSource(admin).follow(0)) as source:
        assert await take(source, 2) == [(1, rows[0]), (2, None)]


async def test_the_relay_goes_on_through_a_kill_of_the_server(connect: Connect, nats_server: NatsServer) -> None:
    log = MemoryLog()
    await grow(log, 300)
    relay = Relay(log, NatsEventStream(await connect("log-relay")), window_max=50)
    running = asyncio.ensure_future(relay.run())
    await relay.wait_for(300, BOUND_S)
    await asyncio.to_thread(nats_server.kill)
    rows = await grow(log, 300)
    await asyncio.to_thread(nats_server.start)
    await relay.wait_for(600, BOUND_S)
    running.cancel()
    assert await NatsEventStream(await connect("operator")).read(0, 1000) == [(row.position, row) for row in rows]


async def test_the_relay_refuses_a_stream_of_another_log(connect: Connect) -> None:
    stream = NatsEventStream(await connect("log-relay"))
    await stream.publish(await grow(MemoryLog(), 3))
    other = MemoryLog()
    await grow(other, 2)
    with pytest.raises(StreamMismatch) as found:
        await asyncio.wait_for(Relay(other, stream).run(), BOUND_S)
    assert found.value.position == 3


async def test_a_healing_feed_outlives_restart_and_rebuild(connect: Connect, nats_server: NatsServer) -> None:
    log = MemoryLog()
    relay = Relay(log, NatsEventStream(await connect("log-relay")))
    admin, reader = NatsEventStream(await connect("admin")), NatsEventSource(await connect("reaper"))
    running = asyncio.ensure_future(relay.run())
    damages: list[Damage] = []
    position = 0

    async def follow(count: int) -> list[int]:
        nonlocal position
        seen: list[int] = []
        async with asyncio.timeout(BOUND_S):
            while len(seen) < count:
                try:
                    async with aclosing(HealingFeed(log, reader, damages.append).follow(position)) as feed:
                        async for rows in feed:
                            seen += [row.position for row in rows]
                            position = seen[-1]
                            if len(seen) >= count:
                                break
                except Transient:
                    await asyncio.sleep(0.05)
        return seen

    await grow(log, 20)
    assert await follow(20) == list(range(1, 21))
    following = asyncio.ensure_future(follow(20))
    await asyncio.to_thread(nats_server.kill)
    await grow(log, 20)
    await asyncio.to_thread(nats_server.start)
    assert await following == list(range(21, 41))
    await admin.recreate()
    running.cancel()
    following = asyncio.ensure_future(follow(20))
    running = asyncio.ensure_future(Relay(log, NatsEventStream(await connect("log-relay"))).run())
    await grow(log, 20)
    assert await following == list(range(41, 61))
    running.cancel()
    assert not damages


async def test_what_tenants_see_live_is_what_is_stored(connect: Connect) -> None:
    log = MemoryLog()
    tenant, admin = await connect("tenant-default"), await connect("admin")
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def note(message: object) -> None:
        headers = getattr(message, "headers", {})
        heard.put_nowait((getattr(message, "subject", ""), headers["ce-id"]))

    await tenant.client.subscribe("evt.default.>", cb=note)
    await tenant.client.flush()
    event = HostDraining(host_id=HostId("host-1"), reason="", requested_at=from_us(0))
    await log.append(
        Commit(
            command_id=CommandId("c"),
            tenant_id=TenantId("default"),
            causation_id="c",
            correlation_id="c",
            request_digest=sha256(b"").digest(),
            occurred_at_us=0,
            expected={"host-1": 0},
            events=[encode_event("host-1", event)],
        )
    )
    await NatsEventStream(await connect("log-relay")).publish(await log.read(0, 1))
    assert await asyncio.wait_for(heard.get(), BOUND_S) == ("evt.default.host-draining.host-1", "1")
    stored = await admin.api("STREAM.MSG.GET.EVENTS", {"seq": 1})
    assert stored["message"]["subject"] == "evt.default.host-draining.host-1"

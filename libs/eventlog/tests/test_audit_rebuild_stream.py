"""The stream is made afresh from the log, beside a running relay, and whatever fails on the way."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import pytest

from tests.support.event_stream import FakeStream
from torpor_contracts.errors import Transient
from torpor_contracts.host import HostUndrained
from torpor_contracts.ids import HostId
from torpor_eventlog.audit.rebuild_stream import rebuild_stream
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Recorded
from torpor_eventlog.relay import Relay, StreamMismatch

pytestmark = pytest.mark.anyio
Grow = Callable[..., Awaitable[None]]
EVENT = HostUndrained(host_id=HostId("host-a"), requested_at=datetime(2026, 1, 1, tzinfo=UTC))


@pytest.fixture
async def log(grow: Grow) -> MemoryLog:
    log = MemoryLog()
    await grow(log, "host-a", *[EVENT] * 2500)
    return log


async def test_the_stream_is_the_log_again(log: MemoryLog) -> None:
    stream = FakeStream()
    stream.stored = (await log.read(0, 10))[::-1]
    told: list[tuple[str, int, int]] = []
    rebuilt = await rebuild_stream(log, stream, lambda *step: told.append(step))
    assert stream.stored == await log.read(0, 10_000)
    assert (rebuilt.position, rebuilt.published) == (2500, 2500)
    assert told[-1] == ("stream", 2500, 2500)
    assert told == sorted(told)


async def test_an_empty_log_makes_an_empty_stream(log: MemoryLog) -> None:
    stream = FakeStream()
    stream.stored = await log.read(0, 10)
    assert (await rebuild_stream(MemoryLog(), stream)).position == 0
    assert stream.stored == []


async def test_failures_on_the_way_are_outlasted(log: MemoryLog) -> None:
    stream = FakeStream()
    stream.away, stream.lose_answer_at = 0, 1500
    await rebuild_stream(log, stream)
    assert stream.stored == await log.read(0, 10_000)


async def test_a_server_that_stays_away_ends_it(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor_eventlog.audit.rebuild_stream.FAILURES_MAX", 2)

    class Deaf(FakeStream):
        async def publish(self, rows: Sequence[Recorded]) -> None:
            raise Transient(f"no answer for {len(rows)} messages")

    with pytest.raises(Transient, match="no answer for 1000"):
        await rebuild_stream(log, Deaf())


async def test_a_running_relay_helps(log: MemoryLog) -> None:
    stream = FakeStream()
    stream.stored = await log.read(0, 10_000)
    relaying = asyncio.create_task(Relay(log, stream, poll_s=0.001).run())
    await asyncio.sleep(0)
    rebuilt = await rebuild_stream(log, stream)
    relaying.cancel()
    await asyncio.wait({relaying})
    assert rebuilt.position == 2500
    assert stream.stored == await log.read(0, 10_000)


async def test_somebody_who_publishes_something_else_is_noticed(log: MemoryLog, grow: Grow) -> None:
    other = MemoryLog()
    await grow(other, "host-b", *[EVENT] * 2500)

    class Contested(FakeStream):
        async def recreate(self) -> None:
            self.stored = await other.read(0, 10_000)

    with pytest.raises(StreamMismatch, match="somebody else publishes"):
        await rebuild_stream(log, Contested())

"""A replay gives the state after each event, and refuses to guess at one it cannot read."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from torpor_contracts.host import HostDraining
from torpor_contracts.ids import HostId
from torpor_eventlog.audit.replay import replay
from torpor_eventlog.codec import UnknownTag
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import NewEvent

pytestmark = pytest.mark.anyio
Grow = Callable[..., Awaitable[None]]


def drain(host: str, reason: str) -> HostDraining:
    return HostDraining(host_id=HostId(host), reason=reason, requested_at=datetime(2026, 1, 1, tzinfo=UTC))


def joined(state: str, event: Any) -> str:
    return state + str(event.reason)


@pytest.fixture
async def log(grow: Grow) -> MemoryLog:
    log = MemoryLog()
    for letter in "abc":
        await grow(log, "host-a", drain("host-a", letter))
        await grow(log, "host-b", drain("host-b", letter.upper()))
    return log


async def walk(log: MemoryLog, **until: Any) -> list[tuple[int, int, str]]:
    steps = replay(log, "host-a", "", joined, **until)
    return [(step.recorded.version, step.recorded.position, step.state) async for step in steps]


async def test_the_state_after_each_event(log: MemoryLog) -> None:
    assert await walk(log) == [(1, 1, "a"), (2, 3, "ab"), (3, 5, "abc")]


async def test_up_to_a_version_or_a_position(log: MemoryLog) -> None:
    assert await walk(log, up_to_version=2) == [(1, 1, "a"), (2, 3, "ab")]
    assert await walk(log, up_to_position=4) == [(1, 1, "a"), (2, 3, "ab")]
    assert await walk(log, up_to_position=0) == []


async def test_an_unknown_event_stops_the_replay(log: MemoryLog, grow: Grow) -> None:
    await grow(log, "host-a", NewEvent(stream="host-a", tag="painted.v9", data=b'{"type":"painted.v9"}'))
    with pytest.raises(UnknownTag):
        await walk(log)
    assert len(await walk(log, up_to_version=3)) == 3

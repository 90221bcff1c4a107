"""What the scheduler keeps in memory is bounded: sessions that sleep by the ten thousand do not add up there."""

import asyncio

import pytest

from tests.support.fakes import Outside, SettableClock
from tests.support.histories import NOON
from tests.support.scheduler_world import SchedulerWorld
from torpor_contracts.host import HostHeartbeat
from torpor_contracts.ids import HostId, SessionId, VmId
from torpor_contracts.session import CreateSession, MachineSpec, SuspendSession, VmStartRequested
from torpor_scheduler import fleet, spacing, watch
from torpor_scheduler.fleet import Fleet
from torpor_scheduler.projections import SESSIONS, TIMERS
from torpor_scheduler.spacing import Spacing
from torpor_scheduler.streams import SESSIONS_KEPT, Streams
from torpor_scheduler.watch import HostWatch


def test_folded_sessions_are_kept_within_a_bound() -> None:
    async def main() -> None:
        one = SchedulerWorld()
        streams = Streams(one.outside.ports())
        for number in range(SESSIONS_KEPT + 50):
            await one.command(f"s-{number}", CreateSession())
            assert await streams.session(SessionId(f"s-{number}")) is not None
        assert len(streams._sessions._kept) == SESSIONS_KEPT

    asyncio.run(main())


def test_a_sleeping_session_is_a_row_and_nothing_else() -> None:
    async def main() -> None:
        one = SchedulerWorld()
        await one.host()
        for number in range(20):
            await one.create(f"s-{number}")
            await one.command(f"s-{number}", SuspendSession())
            await one.passes(1)
        async with one.outside.views.reading() as rows:
            asleep = await rows.find(SESSIONS, {"phase": "suspended"})
            assert len(asleep) == 20
            assert {(row.host_id, row.waits_us, row.runs_us) for row in asleep} == {(None, None, None)}
            assert not await rows.find(TIMERS)
        await one.passes(60)
        assert not one.outside.bus.sent

    asyncio.run(main())


def test_hosts_that_are_heard_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "HOSTS_MAX", 10)
    heard = HostWatch(SettableClock(), 1.0)
    for number in range(50):
        heartbeat = HostHeartbeat(host_id=HostId(f"host-{number}"), boot_id="boot-1", observed_at=NOON, vms=[])
        heard.heard(heartbeat)
    assert len(heard._hosts) == 10
    assert heard.seen_at(HostId("host-49"), "boot-1") == NOON


def test_tries_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spacing, "KEPT_MAX", 10)
    tried = Spacing(1.0)
    for number in range(50):
        assert tried.due(f"session-{number}", 1.0) == 0
    assert len(tried._tried) == 10


def test_placements_on_their_way_are_counted_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "PLACED_MAX", 10)
    outside = Outside()
    placing = Fleet(outside.views, outside.clock)
    for number in range(50):
        placing.claim(
            VmStartRequested(
                session_id=SessionId("s-1"),
                host_id=HostId("host-a"),
                vm_id=VmId(f"vm-{number}"),
                incarnation=1,
                attempt=1,
                machine=MachineSpec(),
                checkpoint_id=None,
                fingerprint="simulated-1",
                requested_at=NOON,
                deadline_at=NOON,
            )
        )
    assert len(placing._placed) == 10

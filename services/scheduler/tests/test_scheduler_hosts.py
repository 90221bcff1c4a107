"""Hosts: registered, drained, silent, lost, back; and what that makes of the sessions on them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tests.support.histories import NOON, at
from tests.support.scheduler_world import CAPACITY, SchedulerWorld
from tests.support.sessions import program
from torpor_contracts.errors import InvariantViolation, Rejected
from torpor_contracts.host import (
    DeclareHostLost,
    DrainHost,
    HostCapacity,
    HostDraining,
    HostLost,
    HostRegistered,
    HostUndrained,
    RegisterHost,
    UndrainHost,
)
from torpor_contracts.ids import SYSTEM_TENANT, HostId
from torpor_contracts.session import CreateSession, ResumeSession, SuspendSession
from torpor_contracts.vm import SuspendVm
from torpor_scheduler.domain.host import ABSENT_HOST, Host, HostContext, decide_host, evolve_host

HOST = HostId("host-a")
REGISTER = RegisterHost(boot_id="boot-1", driver="simulated", fingerprint="simulated-1", capacity=CAPACITY)
LOST = DeclareHostLost(boot_id="boot-1", last_seen_at=at(5))
NEVER_SEEN = HostContext(now=NOON, seen_at=None)


def given(*commands: Any) -> Host:
    host = ABSENT_HOST
    for command in commands:
        for event in decide_host(host, command, HOST, NEVER_SEEN):
            host = evolve_host(host, event)
    return host


def when(host: Host, command: Any, context: HostContext = NEVER_SEEN) -> list[type]:
    return [type(event) for event in decide_host(host, command, HOST, context)]


def test_register_happens_and_is_ignored_when_repeated() -> None:
    assert when(ABSENT_HOST, REGISTER) == [HostRegistered]
    assert when(given(REGISTER), REGISTER) == []


@pytest.mark.parametrize("change", [{"boot_id": "boot-2"}, {"fingerprint": "simulated-2"}, {"driver": "qemu"}])
def test_register_happens_again_for_another_boot_or_offer(change: dict[str, str]) -> None:
    assert when(given(REGISTER), msgspec.structs.replace(REGISTER, **change)) == [HostRegistered]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"capacity": HostCapacity(vcpus=0, memory_mib=1, disk_mib=1, vms_max=1)}, "illegal-capacity"),
        ({"capacity": HostCapacity(vcpus=1, memory_mib=1, disk_mib=2**40, vms_max=1)}, "illegal-capacity"),
        ({"boot_id": "Not A Token"}, "illegal-registration"),
        ({"fingerprint": ""}, "illegal-registration"),
    ],
)
def test_register_is_refused(change: dict[str, Any], code: str) -> None:
    with pytest.raises(Rejected, match=code):
        when(ABSENT_HOST, msgspec.structs.replace(REGISTER, **change))


def test_drain_and_undrain_happen_once() -> None:
    host = given(REGISTER)
    assert when(host, DrainHost(reason="kernel")) == [HostDraining]
    with pytest.raises(Rejected, match="not-draining"):
        when(host, UndrainHost())
    draining = given(REGISTER, DrainHost())
    with pytest.raises(Rejected, match="already-draining"):
        when(draining, DrainHost())
    assert when(draining, UndrainHost()) == [HostUndrained]


@pytest.mark.parametrize("command", [DrainHost(), UndrainHost()])
def test_drain_and_undrain_are_refused_for_a_host_nobody_knows(command: Any) -> None:
    with pytest.raises(Rejected, match="host-not-found"):
        when(ABSENT_HOST, command)


def test_a_host_drains_until_it_is_told_otherwise() -> None:
    assert given(REGISTER, DrainHost(), msgspec.structs.replace(REGISTER, boot_id="boot-2")).draining


def test_lost_happens_and_is_ignored_when_repeated_or_of_another_boot() -> None:
    assert when(given(REGISTER), LOST) == [HostLost]
    assert when(given(REGISTER, LOST), LOST) == []
    assert when(given(msgspec.structs.replace(REGISTER, boot_id="boot-2")), LOST) == []
    assert when(ABSENT_HOST, LOST) == []


def test_lost_is_ignored_when_a_heartbeat_came_in_between() -> None:
    assert when(given(REGISTER), LOST, HostContext(now=at(9), seen_at=at(6))) == []
    assert when(given(REGISTER), LOST, HostContext(now=at(9), seen_at=at(5))) == [HostLost]


def test_a_lost_host_registers_again_under_the_same_boot() -> None:
    assert when(given(REGISTER, LOST), REGISTER) == [HostRegistered]


def test_what_cannot_happen_to_a_host_breaks_the_invariant() -> None:
    (draining,) = decide_host(given(REGISTER), DrainHost(), HOST, NEVER_SEEN)
    with pytest.raises(InvariantViolation):
        evolve_host(ABSENT_HOST, draining)


# --- with sessions on them ----------------------------------------------------------------------------------------


def world(check: Callable[[SchedulerWorld], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        one = SchedulerWorld(**settings)
        await one.host()
        await one.create(create=CreateSession(idle_after_s=None))
        await check(one)

    asyncio.run(main())


async def host_state(one: SchedulerWorld, host_id: str = "host-a") -> Any:
    answer = await one.ask("hosts", tenant=SYSTEM_TENANT)
    return next(host for host in answer.hosts if host.host_id == host_id)


def test_a_host_that_beats_is_kept_for_ever() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.passes(120, beat_s=2.0)
        host = await host_state(one)
        assert (host.state, host.vms, host.last_seen_at) == ("up", 1, one.outside.clock.now())
        assert (await one.show()).state == "running"

    world(check)


def test_a_silent_host_is_lost_in_the_stated_time_and_its_sessions_with_it() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.passes(5)
        one.hosts["host-a"].silent = True
        await one.passes(9)
        assert (await host_state(one)).state == "up"
        await one.passes(3)
        assert (await host_state(one)).state == "lost"
        view = await one.show()
        assert (view.state, view.observed, view.vm_id) == ("lost", "lost", None)
        assert view.lost_since is not None
        await one.host("host-b")
        await one.command("s-1", program())
        await one.settle()
        view = await one.show()
        assert (view.state, view.host_id, view.incarnation) == ("running", "host-b", 2)

    world(check)


def test_a_host_is_given_the_whole_time_again_by_a_scheduler_that_was_restarted() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.passes(5)
        one.hosts["host-a"].silent = True
        await one.passes(8)
        await one.restart()
        await one.passes(8)
        assert (await host_state(one)).state == "up"
        await one.passes(6)
        assert (await host_state(one)).state == "lost"

    world(check)


def test_a_scheduler_that_hears_nothing_calls_nobody_lost() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.passes(5)
        await one.passes(60, hearing=False)
        # It hears itself again before it hears anybody else.
        await one.passes(3, beating=False)
        assert (await host_state(one)).state == "up"
        await one.passes(5)
        assert (await one.show()).state == "running"

    world(check)


def test_a_bus_that_is_away_is_no_failure_of_looking_at_hosts() -> None:
    async def check(one: SchedulerWorld) -> None:
        one.outside.bus.away = True
        for _ in range(30):
            one.outside.clock.pass_by(1)
            await one.service.background[0].run()
        one.outside.bus.away = False
        await one.passes(5)
        assert (await host_state(one)).state == "up"

    world(check)


def test_a_host_that_comes_back_gets_its_sessions_back() -> None:
    async def check(one: SchedulerWorld) -> None:
        host = one.hosts["host-a"]
        await one.passes(5)
        host.silent = True
        await one.passes(15)
        assert (await one.show()).state == "lost"
        host.silent = False
        await one.passes(15)
        assert (await host_state(one)).state == "up"
        view = await one.show()
        assert (view.state, view.incarnation, view.problem) == ("running", 1, None)
        assert await one.events() == [
            "session-requested",
            "vm-start-requested",
            "session-started",
            "session-lost",
            "session-recovered",
        ]

    world(check)


def test_a_host_that_comes_back_loses_what_went_on_without_it() -> None:
    async def check(one: SchedulerWorld) -> None:
        host = one.hosts["host-a"]
        await one.passes(5)
        host.silent = True
        await one.passes(15)
        await one.host("host-b")
        await one.command("s-1", ResumeSession())
        await one.settle()
        host.silent = False
        assert len(host.machines) == 1
        await one.passes(30)
        assert not host.machines
        assert len(one.hosts["host-b"].machines) == 1
        assert (await one.show()).incarnation == 2

    world(check)


def test_a_host_may_be_lost_and_come_back_many_times() -> None:
    async def check(one: SchedulerWorld) -> None:
        host = one.hosts["host-a"]
        for _ in range(3):
            host.silent = True
            await one.passes(15)
            assert (await one.show()).state == "lost"
            host.silent = False
            await one.passes(15)
            assert (await one.show()).state == "running"

    world(check)


def test_a_session_placed_while_its_host_went_is_not_forgotten() -> None:
    async def check(one: SchedulerWorld) -> None:
        one.hosts["host-a"].silent = True
        await one.passes(15)
        lost = await one.command("host-a", DrainHost(), tenant=SYSTEM_TENANT)
        assert lost is not None
        assert (await one.show()).state == "lost"
        await one.host("host-b")
        await one.command("s-2", CreateSession())
        await one.settle()
        one.hosts["host-b"].silent = True
        one.drops = lambda message: message.command_id.endswith("-0")
        await one.passes(15)
        assert (await host_state(one, "host-b")).state == "lost"
        assert (await one.show("s-2")).state == "running"
        await one.passes(10)
        assert (await one.show("s-2")).state == "lost"

    world(check)


def test_a_drained_host_is_left_by_what_runs_there_and_gets_nothing_new() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.command("host-a", DrainHost(), tenant=SYSTEM_TENANT)
        await one.settle()
        assert (await one.show()).state == "suspended"
        host = await host_state(one)
        assert (host.draining, host.vms) == (True, 0)
        await one.command("s-1", program())
        await one.settle()
        assert (await one.show()).state == "resuming"
        await one.command("host-a", UndrainHost(), tenant=SYSTEM_TENANT)
        await one.passes(20)
        assert (await one.show()).state == "running"

    world(check)


def test_a_session_that_could_not_be_suspended_at_once_leaves_the_drained_host_later() -> None:
    async def check(one: SchedulerWorld) -> None:
        one.drops = lambda message: isinstance(message.command, SuspendVm)
        await one.command("host-a", DrainHost(), tenant=SYSTEM_TENANT)
        await one.passes(130)
        assert (await one.show()).problem is not None
        one.drops = lambda _: False
        await one.passes(400, beat_s=2.0)
        assert (await one.show()).state == "suspended"

    world(check)


def test_what_hosts_have_taken_is_the_sum_over_their_sessions() -> None:
    async def check(one: SchedulerWorld) -> None:
        for number in range(2, 5):
            await one.create(f"s-{number}")
        await one.command("s-2", SuspendSession())
        await one.settle()
        host = await host_state(one)
        assert (host.vms, host.vcpus_taken, host.memory_mib_taken, host.disk_mib_taken) == (3, 3, 768, 3072)

    world(check)


def test_a_heartbeat_that_is_none_is_passed_over() -> None:
    async def check(one: SchedulerWorld) -> None:
        for data in (b"", b"{]", b'{"host_id": 1}'):
            await one.service.observations[0].handle("obs.system.vm-host.heartbeat.host-a", data)
        assert (await host_state(one)).last_seen_at is None

    world(check)

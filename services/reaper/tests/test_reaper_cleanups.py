"""Clean-ups: given a log and heartbeats, then these steps are recorded and these commands sent."""

from dataclasses import replace
from typing import Literal

import msgspec
import pytest

from tests.support.histories import Machine, at, host_lost, session_over
from tests.support.reaper_world import FIRST, RUNS, World, given, kinds
from torpor_contracts.cleanup import CleanupCarriedOut, CleanupConfirmed, CleanupProposed, CleanupWithdrawn
from torpor_contracts.host import HostHeartbeat, VmObservation
from torpor_contracts.ids import HostId, SessionId, VmId
from torpor_contracts.vm import QuarantineVm, ReapVm

NEXT = Machine(vm_id=VmId("vm-2"), host_id=HostId("host-b"), incarnation=2)


def test_a_machine_no_claim_explains_is_frozen_left_alone_and_reaped_on_proof() -> None:
    async def check(world: World) -> None:
        await world.beat(100, FIRST.vm_id)
        assert await world.steps() == []
        await world.beat(106, FIRST.vm_id)
        (proposed,) = await world.steps()
        assert isinstance(proposed, CleanupProposed)
        assert (proposed.reason, proposed.action, proposed.attempt) == ("unclaimed", "reap", 1)
        assert (proposed.evidence_position, proposed.checked_position, proposed.grace_s) == (None, 0, 30)
        (freeze,) = world.sent
        assert isinstance(freeze.command, QuarantineVm)
        assert (freeze.tenant_id, freeze.service, freeze.target) == ("system", "vm-host", "host-a.vm-1")
        assert freeze.command_id == "reaper-proposed-1"

        await world.happened(FIRST.quarantined(107))
        await world.beat(130, FIRST.vm_id)
        assert world.commands() == [QuarantineVm]
        await world.beat(138, FIRST.vm_id)
        confirmed = (await world.steps())[-1]
        assert isinstance(confirmed, CleanupConfirmed)
        assert confirmed.checked_position == 2
        reap = world.sent[-1]
        assert isinstance(reap.command, ReapVm)
        assert (reap.command.checked_position, reap.command_id) == (2, "reaper-confirmed-3")

        await world.happened(FIRST.reaped(139))
        await world.beat(140)
        carried_out = (await world.steps())[-1]
        assert isinstance(carried_out, CleanupCarriedOut)
        assert carried_out.evidence_position == 4
        await world.beat(150)
        assert len(await world.steps()) == 3
        assert world.commands() == [QuarantineVm, ReapVm]

    given()(check)


def test_a_machine_that_its_session_holds_is_left_alone() -> None:
    async def check(world: World) -> None:
        for second in range(10, 200, 10):
            await world.beat(second, FIRST.vm_id)
        assert (await world.steps(), world.sent) == ([], [])

    given(*RUNS)(check)


def test_a_machine_claimed_after_it_was_noticed_is_left_alone_though_the_view_lags() -> None:
    async def check(world: World) -> None:
        await world.beat(1, FIRST.vm_id)
        for event in RUNS[1:]:
            await world.happened(event)
        world.outside.clock.time = at(20)
        heartbeat = HostHeartbeat(
            host_id=FIRST.host_id,
            boot_id="boot-1",
            observed_at=at(20),
            vms=[VmObservation(vm_id=FIRST.vm_id, session_id=None, incarnation=None, state="running")],
        )
        await world.hear("obs.system.vm-host.heartbeat.host-a", msgspec.json.encode(heartbeat))
        assert (await world.steps(), world.sent) == ([], [])

    given(("s-1", FIRST.asked_for(0)))(check)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (FIRST.stopped(50), "vm-stopped"),
        (FIRST.suspended(50), "vm-suspended"),
        (FIRST.start_failed(50), "vm-start-failed"),
    ],
)
def test_a_machine_seen_after_its_end_is_nobodys(end: msgspec.Struct, how: str) -> None:
    async def check(world: World) -> None:
        await world.beat(60, FIRST.vm_id)
        await world.beat(70, FIRST.vm_id)
        (proposed,) = await world.steps()
        assert isinstance(proposed, CleanupProposed)
        assert (proposed.reason, proposed.evidence_position, proposed.tenant_id) == ("ended", 4, "acme")
        assert proposed.evidence.startswith(f"{how} at position 4")
        assert (proposed.session_id, proposed.incarnation) == ("s-1", 1)

    given(*RUNS, end, FIRST.released(51))(check)


def test_a_heartbeat_from_before_the_end_proves_nothing() -> None:
    async def check(world: World) -> None:
        await world.beat(60, FIRST.vm_id, observed=40)
        await world.beat(70, FIRST.vm_id, observed=49)
        assert (await world.steps(), world.sent) == ([], [])

    given(*RUNS, FIRST.stopped(50), FIRST.released(51))(check)


def test_a_machine_whose_session_went_on_with_another_is_nobodys() -> None:
    async def check(world: World) -> None:
        await world.beat(100, FIRST.vm_id)
        await world.beat(110, FIRST.vm_id)
        (proposed,) = await world.steps()
        assert isinstance(proposed, CleanupProposed)
        assert (proposed.reason, proposed.evidence_position) == ("superseded", 6)
        assert world.sent[0].tenant_id == "acme"

    given(*RUNS, host_lost(30), ("s-1", FIRST.lost(60)), ("s-1", NEXT.asked_for(61)))(check)


def test_a_machine_lost_from_sight_stays_its_sessions_until_that_has_another() -> None:
    async def check(world: World) -> None:
        for second in range(100, 300, 20):
            await world.beat(second, FIRST.vm_id)
        assert (await world.steps(), world.sent) == ([], [])

    given(*RUNS, host_lost(30), ("s-1", FIRST.lost(60)))(check)


@pytest.mark.parametrize("how", ["terminated", "failed"])
def test_a_machine_of_a_session_that_is_over_is_nobodys(how: Literal["terminated", "failed"]) -> None:
    async def check(world: World) -> None:
        await world.beat(100, FIRST.vm_id)
        await world.beat(110, FIRST.vm_id)
        assert kinds(await world.steps()) == [CleanupProposed]

    given(*RUNS, ("s-1", session_over(60, how)))(check)


def test_a_machine_that_comes_up_after_its_start_was_given_up_is_nobodys() -> None:
    async def check(world: World) -> None:
        await world.beat(100, FIRST.vm_id)
        await world.beat(110, FIRST.vm_id)
        (proposed,) = await world.steps()
        assert isinstance(proposed, CleanupProposed)
        assert "gave up starting vm-1" in proposed.evidence

    given(("s-1", FIRST.asked_for(0)), FIRST.claimed(1), ("s-1", FIRST.start_given_up()), FIRST.started(70))(check)


def test_a_machine_on_another_host_than_it_was_claimed_on_is_shown_and_not_touched() -> None:
    async def check(world: World) -> None:
        await world.beat(100, FIRST.vm_id, host="host-b")
        await world.beat(110, FIRST.vm_id, host="host-b")
        assert (await world.steps(), world.sent) == ([], [])

    given(*RUNS)(check)


def test_a_proposal_is_withdrawn_when_the_machine_is_gone_by_itself() -> None:
    async def check(world: World) -> None:
        await world.beat(100, FIRST.vm_id)
        await world.beat(110, FIRST.vm_id)
        await world.beat(112)
        (_, withdrawn) = await world.steps()
        assert isinstance(withdrawn, CleanupWithdrawn)
        assert withdrawn.cause == "host-a has it no more"

    given()(check)


def test_a_proposal_is_withdrawn_when_the_machine_has_an_owner_after_all() -> None:
    async def check(world: World) -> None:
        await world.beat(100, FIRST.vm_id)
        await world.beat(110, FIRST.vm_id)
        await world.happened(FIRST.asked_for(111), "s-1")
        await world.happened(FIRST.claimed(112))
        await world.happened(FIRST.quarantined(113))
        await world.beat(160, FIRST.vm_id)
        assert kinds(await world.steps()) == [CleanupProposed, CleanupWithdrawn]
        assert world.commands() == [QuarantineVm]

    given()(check)


# --- heartbeats ----------------------------------------------------------------------------------------------------


def test_two_replicas_record_each_step_once() -> None:
    async def check(world: World) -> None:
        other = World(world.outside.log)
        for second in (100, 106, 107):
            await world.beat(second, FIRST.vm_id)
            await other.beat(second, FIRST.vm_id)
        assert kinds(await world.steps()) == [CleanupProposed]
        assert {command.command_id for command in (*world.sent, *other.sent)} == {"reaper-proposed-1"}

    given()(check)


def test_the_same_heartbeat_twice_or_an_older_one_says_nothing_new() -> None:
    async def check(world: World) -> None:
        await world.beat(100, FIRST.vm_id)
        await world.beat(106, FIRST.vm_id, observed=100)
        await world.beat(112, FIRST.vm_id, observed=90)
        assert await world.steps() == []

    given()(check)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"host_id": "host-a"}', b"\xff\xfe"])
def test_what_is_no_heartbeat_is_ignored(data: bytes) -> None:
    async def check(world: World) -> None:
        await world.hear("obs.system.vm-host.heartbeat.host-a", data)
        assert world.sent == []

    given()(check)


def test_a_host_cannot_speak_for_another() -> None:
    async def check(world: World) -> None:
        for second in (100, 110):
            heartbeat = HostHeartbeat(
                host_id=HostId("host-a"),
                boot_id="boot-1",
                observed_at=at(second),
                vms=[VmObservation(vm_id=FIRST.vm_id, session_id=None, incarnation=None, state="unknown")],
            )
            world.outside.clock.time = at(second)
            await world.hear("obs.system.vm-host.heartbeat.host-b", msgspec.json.encode(heartbeat))
        assert (await world.steps(), world.sent) == ([], [])

    given()(check)


def test_a_machine_whose_name_is_no_id_is_left_to_an_operator() -> None:
    async def check(world: World) -> None:
        for second in (100, 110, 120):
            await world.beat(second, VmId("../etc"), VmId("vm-" + "v" * 70), VmId("s-1"))
        assert (await world.outside.log.head()).position == 3
        assert world.sent == []

    given(*RUNS)(check)


def test_many_machines_on_one_host_are_each_judged_by_their_own_claim() -> None:
    machines = [replace(FIRST, vm_id=VmId(f"vm-{n}"), session_id=SessionId(f"s-{n}")) for n in range(700)]
    stray = VmId("vm-stray")
    events = [
        event for machine in machines for event in ((machine.session_id, machine.asked_for(0)), machine.claimed(1))
    ]

    async def check(world: World) -> None:
        seen = [*(machine.vm_id for machine in machines), stray]
        await world.beat(100, *seen)
        await world.beat(110, *seen)
        assert [command.target for command in world.sent] == [f"host-a.{stray}"]

    given(*events)(check)

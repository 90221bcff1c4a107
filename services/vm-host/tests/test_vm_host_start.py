"""StartVm: claim, acquire, look, record; every way in which it comes to nothing; and dying anywhere in between."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.vm_host_world import CKP, HOST, VM, HostWorld, S, claimed_resources, in_virtual_time
from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.ids import SessionId, TenantId
from torpor_contracts.session import MachineSpec
from torpor_contracts.vm import StopVm, VmClaimed, VmReleased, VmStarted, VmStartFailed


def test_a_machine_is_claimed_before_it_exists_and_started(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        there_at_claim: list[Any] = []
        world.points.plans["append vm-claimed"] = lambda: there_at_claim.extend([world.state_of(), world.directories()])
        receipt = await world.command(world.start_vm())
        claimed, started = await world.events()
        assert there_at_claim == [None, []]
        assert receipt is not None
        assert (receipt.stream, receipt.version) == (VM, 1)
        assert isinstance(claimed, VmClaimed)
        assert (claimed.host_id, claimed.tenant_id, claimed.incarnation) == (HOST, "acme", 1)
        assert {one.kind for one in claimed.resources} == {"memory-file", "directory"}
        assert isinstance(started, VmStarted)
        assert started.start_ms >= 100
        assert world.state_of() == "running"

    in_virtual_time(scenario)


def test_the_same_command_is_answered_with_the_same_receipt(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        command = world.start_vm()
        first = await world.command(command, command_id="acme/start")
        assert await world.command(command, command_id="acme/start") == first
        assert await world.command(command) is None
        assert await world.tags() == ["vm-claimed", "vm-started"]

    in_virtual_time(scenario)


@pytest.mark.parametrize("changes", [{"incarnation": 2}, {"session_id": SessionId("s-2")}])
def test_another_incarnation_or_session_under_the_same_id_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        await world.command(world.start_vm())
        with pytest.raises(Rejected, match="stale-incarnation"):
            await world.command(world.start_vm(**changes))

    in_virtual_time(scenario)


@pytest.mark.parametrize("tenant", ["other", "another"])
def test_another_tenant_cannot_name_the_machine(tmp_path: Path, tenant: str) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        await world.command(world.start_vm())
        with pytest.raises(Rejected, match="foreign-tenant"):
            await world.command(world.start_vm(), tenant_id=TenantId(tenant))

    in_virtual_time(scenario)


@pytest.mark.parametrize("target", ["host-b.vm-1", "host-a", "vm-1"])
def test_a_command_for_another_host_is_refused(tmp_path: Path, target: str) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        with pytest.raises(Rejected, match="not-this-host"):
            await world.command(world.start_vm(), target=target)

    in_virtual_time(scenario)


async def failed(world: HostWorld, **changes: Any) -> VmStartFailed:
    """Start a machine that cannot be started; nothing may be left of it."""
    await world.command(world.start_vm(**changes))
    events = await world.events()
    (failure,) = [event for event in events if isinstance(event, VmStartFailed)]
    released = [one for event in events if isinstance(event, VmReleased) for one in event.resources]
    assert released == claimed_resources(events)
    assert world.state_of() is None
    assert world.directories() == []
    return failure


def test_a_start_that_comes_too_late_acquires_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        failure = await failed(world, in_s=-1.0)
        assert (failure.code, failure.retryable) == ("deadline-passed", True)
        assert await world.tags() == ["vm-start-failed"]

    in_virtual_time(scenario)


@pytest.mark.parametrize(
    "machine", [MachineSpec(vcpus=5), MachineSpec(memory_mib=4097), MachineSpec(disk_mib=9000)], ids=str
)
def test_what_does_not_fit_is_refused_with_no_capacity(tmp_path: Path, machine: MachineSpec) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path, vcpus=4, memory_mib=4096, disk_mib=8192)
        await world.boot()
        failure = await failed(world, machine=machine)
        assert (failure.code, failure.retryable) == ("no-capacity", True)

    in_virtual_time(scenario)


def test_room_is_counted_while_starts_run_side_by_side_and_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path, vms_max=2)
        await world.boot()
        work = [
            world.process.spawn(_drop(world.command(world.start_vm(session_id=SessionId(f"s-{n}")), f"vm-{n}")), f"{n}")
            for n in range(5)
        ]
        for one in work:
            await one
        tags = [tuple(await world.tags(f"vm-{n}")) for n in range(5)]
        assert sorted(tags) == [("vm-claimed", "vm-started")] * 2 + [("vm-start-failed",)] * 3
        running = next(n for n in range(5) if len(tags[n]) == 2)
        stop = StopVm(session_id=SessionId(f"s-{running}"), incarnation=1, reason="")
        await world.command(stop, f"vm-{running}")
        await world.command(world.start_vm(session_id=SessionId("s-9")), "vm-9")
        assert await world.tags("vm-9") == ["vm-claimed", "vm-started"]

    in_virtual_time(scenario)


async def _drop(work: Any) -> None:
    await work


def test_an_unknown_image_is_a_final_failure(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        failure = await failed(world, machine=MachineSpec(image="nothing"))
        assert (failure.code, failure.retryable) == ("image-unknown", False)

    in_virtual_time(scenario)


def test_a_driver_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path, driver_start_s=0.05)
        await world.boot()
        failure = await failed(world)
        assert (failure.code, failure.retryable) == ("driver-timed-out", True)

    in_virtual_time(scenario)


def test_a_machine_may_be_claimed_again_after_a_failed_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        await world.command(world.start_vm(machine=MachineSpec(image="nothing")))
        await world.command(world.start_vm())
        assert (await world.tags())[-2:] == ["vm-claimed", "vm-started"]

    in_virtual_time(scenario)


def test_a_checkpoint_nobody_recorded_is_a_final_failure(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        failure = await failed(world, checkpoint_id=CKP)
        assert (failure.code, failure.retryable) == ("checkpoint-missing", False)

    in_virtual_time(scenario)


POINTS = ["append vm-claimed", "appended vm-claimed", "start", "started", "append vm-started", "appended vm-started"]


@pytest.mark.parametrize("point", POINTS)
def test_dying_anywhere_in_a_start_leaves_one_machine_and_one_record(tmp_path: Path, point: str) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        command = world.start_vm()
        await world.killed_by(point, command, command_id="acme/start")
        await world.boot()
        receipt = await world.command(command, command_id="acme/start")
        assert receipt is not None
        assert receipt.version == 1
        assert await world.tags() == ["vm-claimed", "vm-started"]
        assert world.state_of() == "running"
        assert world.points.passed.count("started") <= 2

    in_virtual_time(scenario)


@pytest.mark.parametrize("point", ["started", "append vm-started"])
def test_a_machine_that_is_up_is_taken_over_and_not_started_again(tmp_path: Path, point: str) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        await world.killed_by(point, world.start_vm())
        await world.boot()
        assert await world.tags() == ["vm-claimed", "vm-started"], "recovery alone has seen it running"
        assert world.points.passed.count("start") == 1

    in_virtual_time(scenario)


def test_a_claim_whose_command_never_comes_again_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path, claim_s_max=30.0)
        await world.boot()
        await world.killed_by("start", world.start_vm())
        await world.boot()
        await world.look()
        assert await world.tags() == ["vm-claimed"], "its command is given time to come again"
        await world.clock.sleep(31)
        await world.look()
        failure: VmStartFailed = await world.last(VmStartFailed)
        assert (failure.code, failure.retryable) == ("host-restarted", True)
        assert (await world.tags())[-1] == "vm-released"
        assert world.directories() == []

    in_virtual_time(scenario)


def test_while_the_log_is_away_nothing_is_acquired(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        world.log.away = True
        with pytest.raises(Transient):
            await world.command(world.start_vm(), command_id="acme/start")
        assert world.state_of() is None
        world.log.away = False
        await world.command(world.start_vm(), command_id="acme/start")
        assert world.state_of() == "running"

    in_virtual_time(scenario)


def test_the_id_of_something_else_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        await world.command(world.start_vm())
        await world.command(world.suspend_vm())
        with pytest.raises(Rejected, match="id-taken"):
            await world.command(world.start_vm(session_id=S), vm_id=CKP)

    in_virtual_time(scenario)

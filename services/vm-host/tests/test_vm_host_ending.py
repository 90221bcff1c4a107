"""StopVm, QuarantineVm, ReapVm: first the effect, then the record; nothing of others, nothing on old evidence."""

from pathlib import Path

import pytest

from tests.support.machines import strange_machine
from tests.support.vm_host_world import TENANT, VM, HostWorld, claimed_resources, exec_vm, in_virtual_time, stop_vm
from torpor_contracts.errors import Rejected
from torpor_contracts.ids import SYSTEM_TENANT, TenantId
from torpor_contracts.vm import QuarantineVm, ReapVm, VmReaped, VmReleased, VmStopped


async def running(root: Path) -> HostWorld:
    world = HostWorld(root)
    await world.boot()
    await world.command(world.start_vm())
    return world


def quarantine() -> QuarantineVm:
    return QuarantineVm(evidence="nobody claims it")


def reap(checked_position: int) -> ReapVm:
    return ReapVm(evidence="nobody claims it", checked_position=checked_position)


def test_a_stopped_machine_is_gone_before_that_is_recorded(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        gone: list[object] = []
        world.points.plans["append vm-stopped"] = lambda: gone.append((world.state_of(), world.directories()))
        receipt = await world.command(stop_vm(reason="asked"))
        assert receipt is not None
        assert gone == [(None, [])]
        stopped, released = (await world.events())[-2:]
        assert isinstance(stopped, VmStopped)
        assert (stopped.expected, stopped.cause) == (True, "asked")
        assert isinstance(released, VmReleased)
        assert released.resources == claimed_resources(await world.events())
        assert await world.command(stop_vm()) is None

    in_virtual_time(scenario)


def test_another_incarnation_cannot_stop_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        with pytest.raises(Rejected, match="stale-incarnation"):
            await world.command(stop_vm(2))
        with pytest.raises(Rejected, match="foreign-tenant"):
            await world.command(stop_vm(), tenant_id=TenantId("other"))
        assert world.state_of() == "running"

    in_virtual_time(scenario)


def test_a_stop_under_the_id_of_another_command_ends_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        await world.command(world.start_vm(), command_id="acme/one")
        with pytest.raises(Rejected, match="command-id-reused"):
            await world.command(stop_vm(), command_id="acme/one")
        assert world.state_of() == "running"

    in_virtual_time(scenario)


def test_a_machine_stopped_before_it_was_started_never_starts(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        await world.command(stop_vm())
        stopped: VmStopped = await world.last(VmStopped)
        assert stopped.expected
        with pytest.raises(Rejected, match="vm-ended"):
            await world.command(world.start_vm())
        assert world.state_of() is None

    in_virtual_time(scenario)


@pytest.mark.parametrize("point", ["destroy", "destroyed", "append vm-stopped", "appended vm-stopped"])
def test_dying_anywhere_in_a_stop_ends_the_machine_once(tmp_path: Path, point: str) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.killed_by(point, stop_vm(), command_id="acme/stop")
        await world.boot()
        await world.command(stop_vm(), command_id="acme/stop")
        assert (await world.tags())[2:] == ["vm-stopped", "vm-released"]
        assert world.state_of() is None

    in_virtual_time(scenario)


def test_what_an_ended_machine_holds_still_is_let_go_on_demand(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        world.stuck.append("device or resource busy")
        await world.command(stop_vm())
        world.stuck.clear()
        stopped, released = (await world.events())[-2:]
        assert isinstance(stopped, VmStopped)
        assert [one.kind for one in released.resources] == ["memory-file"], "the directory is there still"
        assert await world.command(stop_vm(reason="let go")) is not None
        assert [one.kind for one in (await world.events())[-1].resources] == ["directory"]
        assert await world.command(stop_vm(reason="let go")) is None

    in_virtual_time(scenario)


def test_an_unknown_machine_is_frozen_then_reaped_on_evidence(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.machines.create(strange_machine("vm-strange"))
        await world.look()
        assert world.state_of("vm-strange") == "running", "nobody but the reaper may decide about it"
        with pytest.raises(Rejected, match="vm-not-quarantined"):
            await world.command(reap(10_000), "vm-strange", tenant_id=SYSTEM_TENANT)
        await world.command(quarantine(), "vm-strange", tenant_id=SYSTEM_TENANT)
        assert world.state_of("vm-strange") == "paused"
        quarantined = (await world.log.head()).position
        with pytest.raises(Rejected, match="evidence-stale"):
            await world.command(reap(quarantined - 1), "vm-strange", tenant_id=SYSTEM_TENANT)
        assert world.state_of("vm-strange") == "paused"
        await world.command(reap(quarantined), "vm-strange", tenant_id=SYSTEM_TENANT)
        assert world.state_of("vm-strange") is None
        reaped: VmReaped = await world.last(VmReaped, "vm-strange")
        assert reaped.checked_position == quarantined
        assert await world.command(reap(quarantined), "vm-strange", tenant_id=SYSTEM_TENANT) is None
        assert world.state_of() == "running"

    in_virtual_time(scenario)


def test_a_claimed_machine_can_be_quarantined_and_then_takes_no_work(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(exec_vm("sleep", "1"))
        await world.command(quarantine(), tenant_id=SYSTEM_TENANT)
        with pytest.raises(Rejected, match="vm-not-running"):
            await world.command(exec_vm("true", exec_id="x-2"))
        await world.clock.sleep(10)
        await world.look()
        assert (await world.tags())[-1] == "vm-quarantined", "what is frozen ends nothing"
        head = (await world.log.head()).position
        recorded = (await world.log.load(VM))[-1]
        assert recorded.tenant_id == TENANT, "what the operator does to it is the tenant's to see"
        await world.command(reap(head), tenant_id=SYSTEM_TENANT)
        assert (await world.tags())[-2:] == ["vm-reaped", "vm-released"]
        assert world.state_of() is None

    in_virtual_time(scenario)


def test_a_machine_that_is_not_there_cannot_be_quarantined(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        with pytest.raises(Rejected, match="vm-not-present"):
            await world.command(quarantine(), "vm-none", tenant_id=SYSTEM_TENANT)

    in_virtual_time(scenario)


@pytest.mark.parametrize("point", ["frozen", "append vm-quarantined", "appended vm-quarantined"])
def test_dying_in_a_quarantine_ends_in_quarantine(tmp_path: Path, point: str) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.machines.create(strange_machine("vm-strange"))
        await world.killed_by(point, quarantine(), "vm-strange", tenant_id=SYSTEM_TENANT, command_id="system/q")
        await world.boot()
        await world.command(quarantine(), "vm-strange", tenant_id=SYSTEM_TENANT, command_id="system/q")
        assert await world.tags("vm-strange") == ["vm-quarantined"]
        assert world.state_of("vm-strange") == "paused"

    in_virtual_time(scenario)


def test_a_stop_ends_a_quarantined_machine_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(quarantine(), tenant_id=SYSTEM_TENANT)
        await world.command(stop_vm())
        assert (await world.tags())[-2:] == ["vm-stopped", "vm-released"]
        assert world.state_of() is None

    in_virtual_time(scenario)

"""What checkpoints build on: in the store before they are registered, and had by a host that has only the store."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.vm_host_world import CKP, HostWorld, exec_vm, in_virtual_time
from torpor_chunks.port import NoSpace
from torpor_contracts.checkpoint import CheckpointRecorded
from torpor_contracts.ids import SYSTEM_TENANT, CheckpointId
from torpor_contracts.vm import VmCheckpointFailed, VmStartFailed, VmSuspendFailed
from torpor_vm_host.adapters.simulated.bases import HostBases
from torpor_vm_host.bases import label_of


async def running(root: Path, **settings: object) -> HostWorld:
    """A host with a machine whose checkpoints build on something."""
    world = HostWorld(root, **settings)
    world.bases = HostBases(root / "bases", b"of the first host")
    await world.boot()
    await world.command(world.start_vm())
    return world


async def elsewhere(world: HostWorld) -> None:
    """The host is replaced: what it had on its disk is gone, and what it makes now is another base."""
    assert world.bases is not None
    world.bases = HostBases(world.root / "bases-of-another", b"of the second host")
    await world.reboot()


async def counted(world: HostWorld, vm_id: str, incarnation: int) -> int:
    """Count one up in the machine's memory."""
    exec_id = f"x-count-{vm_id}"
    await world.command(exec_vm("count", exec_id=exec_id, incarnation=incarnation), vm_id)
    await world.ended(exec_id, vm_id)
    await world.look()
    return int(world.read(exec_id).output)


async def labelled(world: HostWorld) -> int:
    return len(await world.chunks.labelled(SYSTEM_TENANT))


async def refused(world: HostWorld, vm_id: str = "vm-2") -> VmStartFailed:
    """Why the machine cannot be started from the checkpoint; nothing is left of the attempt."""
    await world.command(world.start_vm(2, checkpoint_id=CKP), vm_id)
    failed: VmStartFailed = await world.last(VmStartFailed, vm_id)
    assert world.directories() == []
    assert world.state_of(vm_id) is None
    return failed


def full() -> None:
    raise NoSpace("the disk is full")


def test_a_host_keeps_its_base_once_and_before_the_first_checkpoint(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        assert world.bases is not None
        await world.command(world.suspend_vm())
        points = [point for point in world.points.passed if "put" in point or point == "checkpoint"]
        assert points == ["put base", "base put", "checkpoint", "put"]
        assert await world.chunks.label(SYSTEM_TENANT, label_of(world.bases.own)) is not None
        await world.background("templates")
        await world.reboot()
        await world.background("templates")
        await world.command(world.start_vm(2, checkpoint_id=CKP), "vm-2")
        await world.command(world.checkpoint_vm(2, "ckp-2", parent_id=CKP), "vm-2")
        await world.eventually(lambda event: getattr(event, "checkpoint_id", "") == "ckp-2", "vm-2")
        assert world.points.passed.count("put base") == 1

    in_virtual_time(scenario)


def test_a_checkpoint_of_a_running_machine_waits_for_the_base_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(world.checkpoint_vm())
        await world.eventually(lambda event: isinstance(event, CheckpointRecorded), CKP)
        points = [point for point in world.points.passed if "put" in point or point == "checkpoint-live"]
        assert points == ["put base", "base put", "checkpoint-live", "put"]

    in_virtual_time(scenario)


def test_a_host_that_has_only_the_store_goes_on_with_the_machine(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        assert await counted(world, "vm-1", 1) == 1
        await world.command(world.suspend_vm())
        await elsewhere(world)
        await world.command(world.start_vm(2, checkpoint_id=CKP), "vm-2")
        assert await counted(world, "vm-2", 2) == 2
        assert sorted(path.name for path in (tmp_path / "vms" / "vm-2").iterdir()) == ["restore"]
        await world.command(world.suspend_vm(2, "ckp-2", parent_id=CKP), "vm-2")
        assert await labelled(world) == 1, "it builds on what is in the store already"
        await world.command(world.start_vm(3, checkpoint_id=CheckpointId("ckp-2")), "vm-3")
        assert await counted(world, "vm-3", 3) == 3
        assert world.points.passed.count("fetch base") == 1, "it is had once"

    in_virtual_time(scenario)


def test_machines_that_start_at_once_have_the_base_fetched_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(world.suspend_vm())
        await elsewhere(world)
        starts = [world.command(world.start_vm(2, checkpoint_id=CKP), f"vm-{number}") for number in range(2, 7)]
        await asyncio.gather(*starts)
        for number in range(2, 7):
            assert world.state_of(f"vm-{number}") == "running"
        assert world.points.passed.count("fetch base") == 1

    in_virtual_time(scenario)


@pytest.mark.parametrize("keeping", ["background", "never"])
def test_where_nothing_waits_for_it_the_base_comes_later_or_not_at_all(tmp_path: Path, keeping: str) -> None:
    async def scenario() -> None:
        world = await running(tmp_path, keep_templates=keeping)
        await world.command(world.suspend_vm())
        assert "vm-suspended" in await world.tags()
        assert await labelled(world) == 0
        here = world.bases
        await elsewhere(world)
        failed = await refused(world)
        assert (failed.code, failed.retryable) == ("template-missing", False)
        assert "TORPOR_VM_HOST_KEEP_TEMPLATES" in failed.detail
        world.bases = here
        await world.reboot()
        routes = {route.name: route for route in world.service.background}
        if keeping == "never":
            assert "templates" not in routes
            return
        assert routes["templates"].first_s == 60.0
        await world.background("templates")
        assert await labelled(world) == 1
        await elsewhere(world)
        await world.command(world.start_vm(2, checkpoint_id=CKP), "vm-3")
        assert world.state_of("vm-3") == "running"

    in_virtual_time(scenario)


@pytest.mark.parametrize("live", [False, True])
def test_without_room_for_the_base_the_machine_runs_on_and_nothing_is_registered(tmp_path: Path, live: bool) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        world.points.plans["put base"] = full
        command: Any = world.checkpoint_vm() if live else world.suspend_vm()
        await world.command(command)
        kind: Any = VmCheckpointFailed if live else VmSuspendFailed
        failed = await world.eventually(lambda event: isinstance(event, kind))
        assert failed.code == "no-space"
        assert world.state_of() == "running"
        assert await world.events(CKP) == []
        assert "put" not in world.points.passed
        await world.command(world.suspend_vm(checkpoint_id="ckp-2"))
        assert "vm-suspended" in await world.tags()
        assert await labelled(world) == 1

    in_virtual_time(scenario)


def test_dying_after_the_base_was_put_puts_it_again_under_its_label(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.killed_by("base put", world.suspend_vm(), command_id="acme/suspend")
        assert await labelled(world) == 0
        await world.boot()
        await world.look()
        assert await labelled(world) == 1
        assert "vm-suspended" in await world.tags()
        await elsewhere(world)
        await world.command(world.start_vm(2, checkpoint_id=CKP), "vm-2")
        assert world.state_of("vm-2") == "running"

    in_virtual_time(scenario)


@pytest.mark.parametrize("point", ["fetch base", "receive"])
def test_a_host_without_room_for_the_base_says_so_and_keeps_nothing_of_it(tmp_path: Path, point: str) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(world.suspend_vm())
        await elsewhere(world)
        world.points.plans[point] = full
        failed = await refused(world)
        assert (failed.code, failed.retryable) == ("no-space", True)
        await world.command(world.start_vm(2, checkpoint_id=CKP), "vm-3")
        assert world.state_of("vm-3") == "running"

    in_virtual_time(scenario)


def test_a_base_that_was_damaged_or_lost_in_the_store_is_refused_before_anything_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(world.suspend_vm())
        (address,) = await world.chunks.labelled(SYSTEM_TENANT)
        here = world.chunks.contents[SYSTEM_TENANT, address]
        whole = dict(here)
        await elsewhere(world)
        for digest, content in whole.items():
            here[digest] = bytes([content[0] ^ 1]) + content[1:]
            failed = await refused(world)
            assert (failed.code, failed.retryable) == ("checkpoint-part-corrupt", False)
        pack = world.chunks.packs.pop((SYSTEM_TENANT, address))
        assert (await refused(world, "vm-3")).code == "checkpoint-part-missing"
        world.chunks.packs[SYSTEM_TENANT, address] = pack
        here.update(whole)
        await world.command(world.start_vm(2, checkpoint_id=CKP), "vm-4")
        assert world.state_of("vm-4") == "running"

    in_virtual_time(scenario)

"""Upkeep and presence: what dies is noticed, what is here is known, and nothing is forgotten or done twice."""

from pathlib import Path

import msgspec
import pytest

from tests.support.machines import strange_machine
from tests.support.vm_host_world import HOST, VM, HostWorld, S, exec_vm, fold_view, in_virtual_time, stop_vm
from torpor_chunks.offload import inline
from torpor_contracts.errors import Rejected
from torpor_contracts.host import HostCapacity, HostHeartbeat, HostLost, HostRegistered, RegisterHost
from torpor_contracts.ids import CommandId, HostId, SessionId, VmId
from torpor_contracts.replies import Receipt, Refusal, Reply
from torpor_contracts.vm import QuarantineVm, VmExecEnded, VmStopped
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Recorded
from torpor_vm_host.adapters.workspace import DirectoryWorkspace
from torpor_vm_host.projections import VMS


async def running(root: Path) -> HostWorld:
    world = HostWorld(root)
    await world.boot()
    await world.command(world.start_vm())
    return world


async def heartbeat(world: HostWorld) -> HostHeartbeat:
    await world.background("register")
    await world.background("heartbeat")
    beat = world.bus.published[-1]
    assert beat.subject == f"obs.system.vm-host.heartbeat.{HOST}"
    return msgspec.json.decode(beat.data, type=HostHeartbeat)


def test_a_machine_that_dies_by_itself_is_reported_and_let_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.look()
        await world.machines.delete(VM)
        await world.look()
        stopped: VmStopped = await world.last(VmStopped)
        assert (stopped.expected, stopped.incarnation) == (False, 1)
        assert "by itself" in stopped.cause
        assert (await world.tags())[-1] == "vm-released"
        assert world.directories() == []
        await world.look()
        assert (await world.tags()).count("vm-stopped") == 1

    in_virtual_time(scenario)


def test_a_frozen_machine_that_dies_is_reported_and_let_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(QuarantineVm(evidence="nobody claims it"))
        await world.machines.delete(VM)
        await world.look()
        assert (await world.tags())[-3:] == ["vm-quarantined", "vm-stopped", "vm-released"]
        assert world.directories() == []

    in_virtual_time(scenario)


def test_a_machine_that_can_never_run_again_is_cleared_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.crash()
        world.machines.kept[VM] = b"ruined"
        await world.boot()
        assert (await world.tags())[-2:] == ["vm-stopped", "vm-released"]
        assert world.state_of() is None

    in_virtual_time(scenario)


@pytest.mark.parametrize("folded", [True, False])
def test_machines_gone_while_nobody_looked_are_reported_and_the_rest_adopted(tmp_path: Path, folded: bool) -> None:
    """The view may know all of the log, or nothing of it: the answer is the same."""

    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(world.start_vm(session_id=SessionId("s-2")), "vm-2")
        await world.command(world.start_vm(session_id=SessionId("s-3")), "vm-3")
        await world.command(exec_vm("sh", "-c", "sleep 5; echo done"))
        stop = msgspec.structs.replace(stop_vm(), session_id=SessionId("s-3"))
        await world.command(stop, "vm-3")
        if folded:
            await world.fold()
        await world.crash()
        await world.machines.delete(VmId("vm-2"))
        await world.boot()
        stopped: VmStopped = await world.last(VmStopped, "vm-2")
        assert not stopped.expected
        assert "restart" in stopped.cause
        assert (await world.tags("vm-3")).count("vm-stopped") == 1
        end: VmExecEnded = await world.ended()
        assert end.exit_code == 0
        assert "vm-stopped" not in await world.tags()

    in_virtual_time(scenario)


def test_what_cannot_be_let_go_now_is_let_go_later_less_and_less_often(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        world.stuck.append("device or resource busy")
        await world.command(stop_vm())
        before = world.points.passed.count("destroy")
        for _ in range(300):
            await world.background("upkeep")
            await world.clock.sleep(1)
        assert 8 <= world.points.passed.count("destroy") - before <= 20
        assert (await world.tags())[-2:] == ["vm-stopped", "vm-released"]
        world.stuck.clear()
        await world.clock.sleep(60)
        await world.look()
        released = (await world.events())[-1]
        assert [one.kind for one in released.resources] == ["directory"]
        assert world.directories() == []

    in_virtual_time(scenario)


def test_the_inventory_names_every_machine_as_it_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.machines.create(strange_machine("vm-strange"))
        world.machines.kept[VmId("vm-unreadable")] = b"ruined"
        beat = await heartbeat(world)
        assert (beat.host_id, beat.boot_id) == (HOST, world.bus.registrations[-1].command.boot_id)  # type: ignore[attr-defined]
        assert [(vm.vm_id, vm.session_id, vm.incarnation, vm.state) for vm in beat.vms] == [
            ("vm-1", S, 1, "running"),
            ("vm-strange", "s-strange", 7, "unknown"),
            ("vm-unreadable", None, None, "unknown"),
        ]
        await world.machines.delete(VM)
        assert [vm.vm_id for vm in (await heartbeat(world)).vms] == ["vm-strange", "vm-unreadable"]

    in_virtual_time(scenario)


def test_a_machine_that_starts_or_is_suspended_is_in_the_inventory(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        await world.background("register")
        work = world.process.spawn(_drop(world.command(world.start_vm())), "start")
        await world.clock.sleep(0.05)
        (vm,) = (await heartbeat(world)).vms
        assert (vm.vm_id, vm.state) == (VM, "starting")
        await work
        work = world.process.spawn(_drop(world.command(world.suspend_vm())), "suspend")
        await world.clock.sleep(0.05)
        (vm,) = (await heartbeat(world)).vms
        assert (vm.vm_id, vm.state) == (VM, "suspending")
        await work
        assert (await heartbeat(world)).vms == []

    in_virtual_time(scenario)


async def _drop(work: object) -> None:
    await work  # type: ignore[misc]


def test_a_host_registers_until_it_is_accepted_with_growing_pauses(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        world.bus.answers["scheduler"] = Reply(refusal=Refusal(code="unavailable", message="not now", advice="wait"))
        for _ in range(300):
            await world.background("register")
            await world.background("heartbeat")
            await world.clock.sleep(1)
        asked = world.points.passed.count("call scheduler")
        assert 20 <= asked <= 40, "bounded, but never given up"
        assert world.bus.published == [], "no heartbeat before it is known"
        del world.bus.answers["scheduler"]
        await world.clock.sleep(20)
        await heartbeat(world)
        command = world.bus.registrations[-1].command
        assert isinstance(command, RegisterHost)
        assert (command.driver, command.fingerprint) == ("simulated", "simulated-1")
        before = len(world.bus.registrations)
        await world.background("register")
        assert len(world.bus.registrations) == before

    in_virtual_time(scenario)


def test_while_the_bus_is_away_the_host_lives_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.background("register")
        world.bus.away = True
        for _ in range(10):
            await world.background("heartbeat")
            await world.background("register")
        await world.look()
        assert world.state_of() == "running"

    in_virtual_time(scenario)


def test_a_host_declared_lost_while_alive_registers_again_and_each_boot_is_new(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        boot_id = (await heartbeat(world)).boot_id
        (reactor,) = world.service.reactors
        for lost_boot, host in (("boot-old", HOST), (boot_id, "host-b"), (boot_id, HOST)):
            event = HostLost(
                host_id=HostId(host),
                boot_id=lost_boot,
                last_seen_at=world.clock.now(),
                declared_at=world.clock.now(),
            )
            await reactor.react(event, _recorded(17))
            await world.background("register")
        first, again = world.bus.registrations
        assert first.command_id != again.command_id
        await world.reboot()
        assert (await heartbeat(world)).boot_id != boot_id

    in_virtual_time(scenario)


@pytest.mark.parametrize("news_first", [True, False])
def test_an_earlier_process_that_registers_late_does_not_take_the_hosts_place(tmp_path: Path, news_first: bool) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        (reactor,) = world.service.reactors
        capacity = HostCapacity(vcpus=1, memory_mib=1, disk_mib=1, vms_max=1)
        late = HostRegistered(
            host_id=HostId(HOST),
            boot_id="boot-old",
            driver="simulated",
            fingerprint="f",
            capacity=capacity,
            registered_at=world.clock.now(),
        )
        world.bus.answers["scheduler"] = registered_at(57)
        await reactor.react(late, _recorded(40))
        if news_first:
            await reactor.react(late, _recorded(59))
        await world.background("register")
        if not news_first:
            await reactor.react(late, _recorded(59))
        world.bus.answers["scheduler"] = registered_at(61)
        await world.clock.sleep(1)
        await world.background("register")
        first, again = world.bus.registrations
        assert first.command_id != again.command_id
        await reactor.react(late, _recorded(60))
        await world.background("register")
        assert len(world.bus.registrations) == 2, "what came before is no news"
        moments: list[float] = []
        for position in range(100, 110):
            await reactor.react(late, _recorded(position))
            while len(world.bus.registrations) == 2 + len(moments):
                await world.clock.sleep(1)
                world.bus.answers["scheduler"] = registered_at(position)
                await world.background("register")
            moments.append(world.clock.monotonic_s())
        assert moments[-1] - moments[-2] >= 60, "two hosts of one name must not chase each other"

    in_virtual_time(scenario)


def registered_at(position: int) -> Reply:
    return Reply(receipt=Receipt(command_id=CommandId("c"), stream=HOST, version=1, position=position, digest=""))


def _recorded(position: int) -> Recorded:
    return Recorded(
        position=position,
        stream=HOST,
        version=1,
        tag="host-lost.v1",
        data=b"{}",
        occurred_at_us=0,
        command_id="c",
        causation_id="c",
        correlation_id="c",
        tenant_id="system",
        digest=b"",
    )


def test_a_second_vm_host_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        other = DirectoryWorkspace(tmp_path, offload=inline)
        with pytest.raises(Rejected, match="host-busy"):
            await other.lock()
        await world.stop()
        await other.lock()
        await other.unlock()

    in_virtual_time(scenario)


def test_after_an_orderly_stop_machines_and_programs_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(exec_vm("sh", "-c", "sleep 3; echo on"))
        await world.stop()
        assert world.state_of() == "running"
        assert (await world.tags())[-1] == "vm-exec-started"
        await world.boot()
        await world.ended()
        await world.look()
        assert world.read().output == b"on\n"

    in_virtual_time(scenario)


def test_the_view_holds_exactly_the_machines_that_may_exist(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(world.start_vm(session_id=SessionId("s-2")), "vm-2")
        await world.command(world.suspend_vm())
        await fold_view(MemoryLog(world.database), world.views, world.service.projections)
        async with world.views.reading() as rows:
            found = await rows.find(VMS, {"host_id": HOST})
        assert [row.vm_id for row in found] == ["vm-2"]
        assert len(found[0].held) == 2

    in_virtual_time(scenario)

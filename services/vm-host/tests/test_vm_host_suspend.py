"""SuspendVm and starts from checkpoints: all of it or nothing, whoever dies, whatever is full, away or damaged."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.vm_host_world import CKP, TENANT, HostWorld, S, claimed_resources, exec_vm, in_virtual_time
from torpor_chunks.port import NoSpace
from torpor_contracts.checkpoint import CheckpointRecorded, FreeCheckpoint, RegisterCheckpoint
from torpor_contracts.errors import Rejected
from torpor_contracts.ids import CheckpointId, CommandId, HostId, TenantId
from torpor_contracts.replies import Refusal, Reply
from torpor_contracts.session import MachineSpec, SessionTerminated
from torpor_contracts.vm import VmExecEnded, VmReleased, VmStartFailed, VmStopped, VmSuspended, VmSuspendFailed
from torpor_eventlog.codec import encode_event
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Commit
from torpor_messaging.ports import OutgoingCommand


async def running(root: Path, **settings: object) -> HostWorld:
    world = HostWorld(root, **settings)
    await world.boot()
    await world.command(world.start_vm())
    return world


async def counted(world: HostWorld, vm_id: str, incarnation: int = 1) -> int:
    """Count one up in the machine's memory."""
    exec_id = f"x-count-{len(world.bus.stored)}"
    await world.command(exec_vm("count", exec_id=exec_id, incarnation=incarnation), vm_id)
    await world.ended(exec_id, vm_id)
    await world.look()
    return int(world.read(exec_id).output)


def test_a_suspended_machine_is_gone_and_its_checkpoint_is_with_the_store(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        gone_when_recorded: list[Any] = []
        world.points.plans["append vm-suspended"] = lambda: gone_when_recorded.append(world.state_of())
        receipt = await world.command(world.suspend_vm())
        assert receipt is not None
        assert (await world.tags())[2:4] == ["vm-suspend-started", "vm-suspended"]
        events = await world.events()
        released = [one for event in events if isinstance(event, VmReleased) for one in event.resources]
        assert released == claimed_resources(events)[::-1]
        suspended: VmSuspended = await world.last(VmSuspended)
        assert (suspended.checkpoint_id, suspended.fingerprint) == (CKP, "simulated-1")
        assert suspended.suspend_ms >= 100
        assert gone_when_recorded == [None]
        assert world.directories() == []
        (recorded,) = await world.events(CKP)
        assert isinstance(recorded, CheckpointRecorded)
        assert {part.kind for part in recorded.manifest.parts} == {"memory", "devices", "disk"}
        assert await world.command(world.suspend_vm()) is None, "asked again, it is done already"

    in_virtual_time(scenario)


def test_memory_files_and_programs_go_on_in_the_next_incarnation(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        vm_id, parent = "vm-1", None
        for incarnation in range(1, 21):
            assert await counted(world, vm_id, incarnation) == incarnation
            written = exec_vm(
                "append", "/root/log", str(incarnation), exec_id=f"x-{incarnation}", incarnation=incarnation
            )
            await world.command(written, vm_id)
            await world.ended(f"x-{incarnation}", vm_id)
            checkpoint = f"ckp-{incarnation}"
            await world.command(world.suspend_vm(incarnation, checkpoint, parent_id=parent), vm_id)
            vm_id, parent = f"vm-{incarnation + 1}", CheckpointId(checkpoint)
            await world.command(world.start_vm(incarnation + 1, checkpoint_id=parent), vm_id)
        await world.command(exec_vm("cat", "/root/log", exec_id="x-cat", incarnation=21), vm_id)
        await world.ended("x-cat", vm_id)
        await world.look()
        assert world.read("x-cat").output.split() == [str(number).encode() for number in range(1, 21)]

    in_virtual_time(scenario)


def test_a_program_sleeps_with_its_machine_and_ends_in_the_next_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(exec_vm("sh", "-c", "echo one; sleep 10; echo two; exit 9"))
        await world.clock.sleep(4)
        await world.command(world.suspend_vm())
        await world.clock.sleep(5000)
        await world.command(world.start_vm(2, checkpoint_id=CKP), "vm-2")
        began_s = world.clock.monotonic_s()
        assert await world.tags("vm-2") == ["vm-claimed", "vm-started", "vm-exec-continued"]
        assert await world.command(exec_vm("count", incarnation=2), "vm-2") is None, "it is known already"
        end: VmExecEnded = await world.ended(stream="vm-2")
        assert (end.exit_code, end.incarnation) == (9, 2)
        assert 5 < world.clock.monotonic_s() - began_s < 7
        await world.look()
        output, last = world.read()
        assert output == b"one\ntwo\n"
        assert last is not None
        assert last["Torpor-Incarnation"] == "2"
        assert "vm-exec-ended" not in await world.tags("vm-1")

    in_virtual_time(scenario)


@pytest.mark.parametrize(
    "point",
    [
        "append vm-suspend-started",
        "appended vm-suspend-started",
        "checkpoint",
        "checkpointed",
        "call snapshot-store",
        "called snapshot-store",
        "destroy",
        "destroyed",
        "append vm-suspended",
        "appended vm-suspended",
        "append vm-released",
        "appended vm-released",
    ],
)
@pytest.mark.parametrize("asked_again", [True, False])
def test_dying_anywhere_in_a_suspend_ends_it_once(tmp_path: Path, point: str, asked_again: bool) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        assert await counted(world, "vm-1") == 1
        command = world.suspend_vm()
        await world.killed_by(point, command, command_id="acme/suspend")
        await world.boot()
        if asked_again:
            await world.command(command, command_id="acme/suspend")
        await world.look()
        await world.look()
        if point == "append vm-suspend-started" and not asked_again:
            assert world.state_of() == "running", "nothing was recorded, so nothing was begun"
            return
        tags = await world.tags()
        assert tags.count("vm-suspended") == 1
        assert tags[-1] in {"vm-suspended", "vm-released"}
        assert world.state_of() is None
        assert world.directories() == []
        assert await world.tags(CKP) == ["checkpoint-recorded"]
        await world.command(world.start_vm(2, checkpoint_id=CKP), "vm-2")
        assert await counted(world, "vm-2", 2) == 2

    in_virtual_time(scenario)


@pytest.mark.parametrize("point", ["called snapshot-store", "destroyed"])
def test_once_the_checkpoint_is_recorded_an_answer_is_not_needed(tmp_path: Path, point: str) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.killed_by(point, world.suspend_vm(in_s=20.0), command_id="acme/suspend")
        await world.clock.sleep(30)
        world.bus.away = True
        await world.boot()
        await world.look()
        await world.look()
        tags = await world.tags()
        assert "vm-suspended" in tags
        assert "vm-stopped" not in tags
        assert world.state_of() is None

    in_virtual_time(scenario)


async def not_suspended(world: HostWorld, **changes: Any) -> VmSuspendFailed:
    """Suspend a machine that cannot be suspended; it must run on as if nothing had been."""
    assert await counted(world, "vm-1") == 1
    await world.command(exec_vm("sh", "-c", "sleep 300; echo on", exec_id="x-on"))
    await world.command(world.suspend_vm(**changes))
    failed: VmSuspendFailed = await world.last(VmSuspendFailed)
    assert world.state_of() == "running"
    assert not list(world.root.rglob("checkpoint")), "nothing half-written is left"
    assert await counted(world, "vm-1") == 2
    for _ in range(4):
        await world.clock.sleep(100)
    end: VmExecEnded = await world.ended("x-on")
    assert end.exit_code == 0
    return failed


def test_without_room_in_the_store_the_machine_runs_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)

        def full() -> None:
            raise NoSpace("the disk is full")

        world.points.plan("put", full)
        failed = await not_suspended(world)
        assert failed.code == "no-space"
        assert await world.tags(CKP) == []
        await world.command(world.suspend_vm(checkpoint_id="ckp-2"))
        assert "vm-suspended" in await world.tags()

    in_virtual_time(scenario)


def test_when_the_store_does_not_answer_the_machine_runs_on_at_the_deadline(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        assert await counted(world, "vm-1") == 1
        world.bus.away = True
        await world.command(world.suspend_vm(in_s=45.0))
        failed: VmSuspendFailed = await world.last(VmSuspendFailed)
        assert failed.code == "snapshot-store-unavailable"
        assert world.state_of() == "running"
        assert world.points.passed.count("call snapshot-store") > 1
        world.bus.away = False
        assert await counted(world, "vm-1") == 2

    in_virtual_time(scenario)


def test_when_the_store_refuses_the_machine_runs_on_and_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        refusal = Refusal(code="parent-unknown", message="there is no checkpoint", advice="name another")
        world.bus.answers["snapshot-store"] = Reply(refusal=refusal)
        assert (await not_suspended(world)).code == "parent-unknown"

    in_virtual_time(scenario)


def test_a_suspend_that_comes_too_late_touches_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        assert (await not_suspended(world, in_s=-1.0)).code == "deadline-passed"
        assert "checkpoint" not in world.points.passed

    in_virtual_time(scenario)


def test_a_checkpoint_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path, driver_checkpoint_s=0.05)
        assert (await not_suspended(world)).code == "driver-timed-out"

    in_virtual_time(scenario)


def test_a_machine_that_dies_in_its_checkpoint_is_said_to_be_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        world.points.plans["checkpoint"] = world.machines.kept.clear
        await world.command(world.suspend_vm())
        stopped: VmStopped = await world.last(VmStopped)
        assert not stopped.expected
        assert (await world.tags())[-2:] == ["vm-stopped", "vm-released"]
        assert await world.tags(CKP) == []

    in_virtual_time(scenario)


def test_a_suspend_of_another_incarnation_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        with pytest.raises(Rejected, match="stale-incarnation"):
            await world.command(world.suspend_vm(2))

    in_virtual_time(scenario)


async def suspended(root: Path) -> HostWorld:
    world = await running(root)
    assert await counted(world, "vm-1") == 1
    await world.command(world.suspend_vm())
    return world


async def refused(world: HostWorld, **changes: Any) -> VmStartFailed:
    """Start from the checkpoint, in vain; nothing may be left and nothing may have run."""
    starts = world.points.passed.count("started")
    await world.command(world.start_vm(2, checkpoint_id=CKP, **changes), "vm-2")
    failed: VmStartFailed = await world.last(VmStartFailed, "vm-2")
    assert world.points.passed.count("started") == starts
    assert (world.state_of("vm-2"), world.directories()) == (None, [])
    return failed


@pytest.mark.parametrize("kind", ["memory", "devices", "disk"])
@pytest.mark.parametrize("where", [0, 20, -1])
def test_a_flipped_byte_is_found_before_anything_runs_and_the_rest_stays(tmp_path: Path, kind: str, where: int) -> None:
    async def scenario() -> None:
        world = await suspended(tmp_path)
        (address,) = [address for _, address in world.chunks.packs]
        whole = world.chunks.content(TENANT, address, kind)
        assert whole is not None
        damaged = bytearray(whole)
        damaged[where] ^= 1
        world.chunks.change(TENANT, address, kind, bytes(damaged))
        failed = await refused(world)
        assert (failed.code, failed.retryable) == ("checkpoint-part-corrupt", False)
        world.chunks.change(TENANT, address, kind, whole)
        await world.command(world.start_vm(3, checkpoint_id=CKP), "vm-3")
        assert await counted(world, "vm-3", 3) == 2

    in_virtual_time(scenario)


def test_a_missing_part_is_a_final_failure(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await suspended(tmp_path)
        (address,) = [address for _, address in world.chunks.packs]
        await world.chunks.delete(TENANT, address)
        failed = await refused(world)
        assert (failed.code, failed.retryable) == ("checkpoint-part-missing", False)

    in_virtual_time(scenario)


def test_a_checkpoint_of_another_engine_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await suspended(tmp_path)
        (recorded,) = await world.events(CKP)
        other = msgspec.structs.replace(recorded.manifest, fingerprint="qemu-7.2")
        reply = await world.snapshot_store_answers(
            OutgoingCommand(
                tenant_id=TenantId("acme"),
                service="snapshot-store",
                target="ckp-other",
                command=RegisterCheckpoint(host_id=HostId("host-b"), manifest=other),
                command_id=CommandId("register"),
                causation_id="test",
                correlation_id="test",
            )
        )
        assert reply.receipt is not None
        await world.command(world.start_vm(2, checkpoint_id=CheckpointId("ckp-other")), "vm-2")
        failed: VmStartFailed = await world.last(VmStartFailed, "vm-2")
        assert (failed.code, failed.retryable) == ("fingerprint-mismatch", False)

    in_virtual_time(scenario)


def test_a_machine_of_another_size_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await suspended(tmp_path)
        assert (await refused(world, machine=MachineSpec(memory_mib=512))).code == "checkpoint-mismatched"

    in_virtual_time(scenario)


def test_a_checkpoint_of_another_tenant_is_not_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await suspended(tmp_path)
        await world.command(world.start_vm(2, checkpoint_id=CKP), "vm-2", tenant_id=TenantId("other"))
        assert (await world.last(VmStartFailed, "vm-2")).code == "checkpoint-missing"

    in_virtual_time(scenario)


@pytest.mark.parametrize("point", ["called snapshot-store", "destroyed", "append vm-suspended"])
@pytest.mark.parametrize("gone", [True, False])
def test_a_checkpoint_freed_before_its_suspend_is_over_is_not_called_there(
    tmp_path: Path,
    point: str,
    gone: bool,
) -> None:
    """The host was away for so long that its session went on without it, and let go of what it had registered."""

    async def scenario() -> None:
        world = await running(tmp_path)
        await world.killed_by(point, world.suspend_vm())
        if gone:
            world.machines.kept.clear()
        await say_terminated(world)
        assert (await world.snapshot_store_answers(outgoing(CKP, FreeCheckpoint(reason="over")))).receipt is not None
        await world.boot()
        await world.look()
        tags = await world.tags()
        assert "vm-suspended" not in tags
        if gone or point != "called snapshot-store":
            assert (await world.last(VmStopped)).expected, "its session is over"
            assert world.directories() == []
        else:
            assert (await world.last(VmSuspendFailed)).code == "checkpoint-freed"
            assert world.state_of() == "running"

    in_virtual_time(scenario)


def outgoing(target: str, command: msgspec.Struct) -> OutgoingCommand:
    return OutgoingCommand(
        tenant_id=TenantId("acme"),
        service="snapshot-store",
        target=target,
        command=command,
        command_id=CommandId(f"test-{target}"),
        causation_id="test",
        correlation_id="test",
    )


async def say_terminated(world: HostWorld) -> None:
    event = SessionTerminated(incarnation=1, cause="", observed_at=world.clock.now())
    await MemoryLog(world.database).append(
        Commit(
            command_id=CommandId("acme/terminated"),
            tenant_id=TenantId("acme"),
            causation_id="test",
            correlation_id="test",
            request_digest=b"." * 32,
            occurred_at_us=1,
            expected={S: 0},
            events=[encode_event(S, event)],
        )
    )

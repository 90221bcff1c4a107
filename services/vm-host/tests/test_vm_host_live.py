"""CheckpointVm: the machine runs on whatever happens; a checkpoint is taken whole or not at all, whoever dies."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.vm_host_world import CKP, HostWorld, S, exec_vm, in_virtual_time, stop_vm
from torpor_chunks.port import NoSpace
from torpor_contracts.checkpoint import CheckpointRecorded
from torpor_contracts.errors import Rejected
from torpor_contracts.ids import CheckpointId, SessionId, TenantId
from torpor_contracts.replies import Refusal, Reply
from torpor_contracts.session_branches import RollbackRequested
from torpor_contracts.vm import (
    VmCheckpointed,
    VmCheckpointFailed,
    VmCheckpointStarted,
    VmExecEnded,
    VmStarted,
    VmStartFailed,
)
from torpor_eventlog.codec import encode_event
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Commit

ENDS = (VmCheckpointed, VmCheckpointFailed)


async def running(root: Path, **settings: object) -> HostWorld:
    world = HostWorld(root, **settings)
    await world.boot()
    await world.command(world.start_vm())
    return world


async def counted(world: HostWorld, vm_id: str = "vm-1", incarnation: int = 1, session_id: SessionId = S) -> int:
    """Count one up in the machine's memory."""
    exec_id = f"x-count-{len(world.bus.stored)}"
    command = exec_vm("count", exec_id=exec_id, incarnation=incarnation)
    if session_id != S:
        command = type(command)(
            session_id=session_id, incarnation=incarnation, exec_id=command.exec_id, program=command.program
        )
    await world.command(command, vm_id)
    await world.ended(exec_id, vm_id)
    await world.look()
    return int(world.read(exec_id, session_id).output)


async def checkpointed(world: HostWorld, checkpoint_id: str = CKP, **given: Any) -> Any:
    """Checkpoint the machine; its end, either way."""
    await world.command(world.checkpoint_vm(checkpoint_id=checkpoint_id, **given))
    return await world.eventually(lambda event: isinstance(event, ENDS) and event.checkpoint_id == checkpoint_id)


def test_a_machine_is_captured_while_it_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        assert await counted(world) == 1
        head = (await world.log.head()).position
        done = await checkpointed(world)
        assert isinstance(done, VmCheckpointed)
        assert (done.checkpoint_id, done.fingerprint) == (CKP, "simulated-1")
        assert done.log_position == head + 1, "the intention is recorded; all the rest comes later"
        assert world.state_of() == "running"
        assert await counted(world) == 2
        (recorded,) = await world.events(CKP)
        assert isinstance(recorded, CheckpointRecorded)
        assert (recorded.manifest.log_position, recorded.manifest.parent_id) == (done.log_position, None)
        assert not list(world.root.rglob("live-checkpoint")), "no copy is left"
        assert not list(world.root.rglob("*.json")), "no note is left"
        assert await world.command(world.checkpoint_vm()) is None, "asked again, it is done already"

    in_virtual_time(scenario)


def test_others_start_from_it_and_the_machine_itself_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(exec_vm("sh", "-c", "echo one; sleep 50; echo two", exec_id="x-long"))
        assert await counted(world) == 1
        await checkpointed(world)
        for number in range(5):
            fork = SessionId(f"s-fork-{number}")
            await world.command(world.start_vm(1, checkpoint_id=CKP, session_id=fork), f"vm-fork-{number}")
            started: VmStarted = await world.last(VmStarted, f"vm-fork-{number}")
            assert [one.exec_id for one in started.execs] == ["x-long"]
            assert started.execs[0].remaining_s > 40
            assert await counted(world, f"vm-fork-{number}", session_id=fork) == 2
        assert await counted(world) == 2
        await world.clock.sleep(60)
        await world.look()
        assert world.read("x-long").output == b"one\ntwo\n"
        for forked in ("s-fork-0", "s-fork-4"):
            first = next(one for one in world.bus.stored if one.subject == f"out.acme.{forked}.x-long")
            assert (first.headers["Torpor-Offset"], first.data) == ("4", b"two\n")

    in_virtual_time(scenario)


def test_a_foreign_tenants_checkpoint_starts_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await checkpointed(world)
        theirs = world.start_vm(1, checkpoint_id=CKP, session_id=SessionId("s-other"))
        await world.command(theirs, "vm-other", tenant_id=TenantId("other"))
        failed: VmStartFailed = await world.last(VmStartFailed, "vm-other")
        assert (failed.code, failed.retryable) == ("checkpoint-missing", False)
        assert world.state_of("vm-other") is None

    in_virtual_time(scenario)


def test_programs_are_followed_all_the_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(exec_vm("sh", "-c", "echo a; sleep 1; echo b; sleep 1; echo c; exit 3"))
        for number in range(10):
            await checkpointed(world, f"ckp-{number}")
        end: VmExecEnded = await world.ended()
        await world.look()
        assert (end.exit_code, world.read().output) == (3, b"a\nb\nc\n")

    in_virtual_time(scenario)


def test_a_chain_of_checkpoints_each_of_its_own_moment(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        parent = None
        for number in range(1, 11):
            assert await counted(world) == number
            await checkpointed(world, f"ckp-{number}", parent_id=parent)
            parent = CheckpointId(f"ckp-{number}")
        for number in (3, 10, 1, 3):
            vm_id = f"vm-from-{number}-{len(world.bus.stored)}"
            fork = SessionId(f"s-{vm_id}")
            start = world.start_vm(1, checkpoint_id=CheckpointId(f"ckp-{number}"), session_id=fork)
            await world.command(start, vm_id)
            assert await counted(world, vm_id, session_id=fork) == number + 1

    in_virtual_time(scenario)


@pytest.mark.parametrize(
    "point",
    [
        "append vm-checkpoint-started",
        "appended vm-checkpoint-started",
        "checkpoint-live",
        "paused",
        "captured",
        "put",
        "call snapshot-store",
        "called snapshot-store",
        "append vm-checkpointed",
        "appended vm-checkpointed",
    ],
)
@pytest.mark.parametrize("asked_again", [True, False])
def test_dying_anywhere_in_a_checkpoint_ends_it_once_and_the_machine_runs(
    tmp_path: Path, point: str, asked_again: bool
) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        assert await counted(world) == 1
        command = world.checkpoint_vm()
        world.points.plans[point] = world.kill
        await _delivered(world, command)
        await world.boot()
        await world.look()
        if asked_again:
            await _delivered(world, command)
        for _ in range(4):
            await world.look()
        tags = await world.tags()
        begun = asked_again or not point.startswith("append vm-checkpoint-started")
        assert tags.count("vm-checkpointed") == int(begun), tags
        assert "vm-stopped" not in tags
        assert world.state_of() == "running"
        assert await counted(world) == 2
        if begun:
            assert await world.tags(CKP) == ["checkpoint-recorded"]
            fork = SessionId("s-fork")
            await world.command(world.start_vm(1, checkpoint_id=CKP, session_id=fork), "vm-fork")
            assert await counted(world, "vm-fork", session_id=fork) == 2

    in_virtual_time(scenario)


async def _delivered(world: HostWorld, command: Any) -> None:
    """Deliver a command under one id; the process may die of it, now or a moment later."""
    await asyncio.gather(world.command(command, command_id="acme/checkpoint"), return_exceptions=True)
    for _ in range(100):
        await asyncio.sleep(0.01)
    if not world.process.alive:
        await world._dead()


async def not_checkpointed(world: HostWorld, **given: Any) -> VmCheckpointFailed:
    """Checkpoint a machine that cannot be checkpointed; it must run on as if nothing had been."""
    before = await counted(world)
    failed = await checkpointed(world, **given)
    assert isinstance(failed, VmCheckpointFailed)
    assert world.state_of() == "running"
    assert await counted(world) == before + 1
    return failed


def test_without_room_in_the_store_the_machine_runs_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)

        def full() -> None:
            raise NoSpace("the disk is full")

        world.points.plan("put", full)
        failed = await not_checkpointed(world)
        assert (failed.code, failed.retryable) == ("no-space", True)
        assert await world.tags(CKP) == []
        assert isinstance(await checkpointed(world, "ckp-2"), VmCheckpointed)

    in_virtual_time(scenario)


def test_when_the_store_does_not_answer_programs_run_on_and_the_next_try_registers_the_very_same(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        assert await counted(world) == 1
        away = Reply(refusal=Refusal(code="unavailable", message="not now", advice="later"))
        world.bus.answers["snapshot-store"] = away
        failed = await checkpointed(world)
        assert isinstance(failed, VmCheckpointFailed)
        assert await counted(world) == 2, "nobody waits for the store"
        del world.bus.answers["snapshot-store"]
        await world.command(world.checkpoint_vm())
        done: VmCheckpointed = await world.eventually(lambda event: isinstance(event, VmCheckpointed))
        assert world.points.passed.count("captured") == 1, "it was captured once"
        assert done.taken_at < failed.observed_at
        fork = SessionId("s-fork")
        await world.command(world.start_vm(1, checkpoint_id=CKP, session_id=fork), "vm-fork")
        assert await counted(world, "vm-fork", session_id=fork) == 2, "it is as it was at the first try"

    in_virtual_time(scenario)


def test_commands_are_not_held_up_by_a_checkpoint(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        world.bus.away = True
        await world.command(world.checkpoint_vm(in_s=100.0))
        await world.eventually(lambda event: isinstance(event, VmCheckpointStarted))
        began_s = world.clock.monotonic_s()
        await world.command(exec_vm("true", exec_id="x-quick"))
        assert world.clock.monotonic_s() - began_s < 1

    in_virtual_time(scenario)


def test_a_checkpoint_that_comes_too_late_touches_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        assert (await not_checkpointed(world, in_s=-1.0)).code == "deadline-passed"
        assert "checkpoint-live" not in world.points.passed

    in_virtual_time(scenario)


def test_a_capture_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path, driver_checkpoint_s=0.05)
        assert (await not_checkpointed(world)).code == "driver-timed-out"

    in_virtual_time(scenario)


def test_a_machine_that_dies_meanwhile_is_said_to_be_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        world.points.plans["checkpoint-live"] = world.machines.kept.clear
        await world.command(world.checkpoint_vm())
        for _ in range(4):
            await world.look()
        assert (await world.tags())[-2:] == ["vm-stopped", "vm-released"]
        assert await world.tags(CKP) == []

    in_virtual_time(scenario)


@pytest.mark.parametrize("how", ["stop", "suspend"])
def test_what_ends_the_machine_breaks_its_checkpoint_off(tmp_path: Path, how: str) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        assert await counted(world) == 1
        await world.command(world.checkpoint_vm())
        await world.command(stop_vm() if how == "stop" else world.suspend_vm(checkpoint_id="ckp-end"))
        assert world.state_of() is None
        for _ in range(4):
            await world.look()
        tags = await world.tags()
        assert "vm-checkpointed" not in tags
        assert tags[-1] == "vm-released"
        assert world.directories() == []
        if how == "suspend":
            await world.command(world.start_vm(2, checkpoint_id=CheckpointId("ckp-end")), "vm-2")
            assert await counted(world, "vm-2", 2) == 2

    in_virtual_time(scenario)


def test_a_machine_that_its_session_has_left_is_not_checkpointed(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        with pytest.raises(Rejected, match="stale-incarnation"):
            await world.command(world.checkpoint_vm(2))
        with pytest.raises(Rejected, match="foreign-tenant"):
            await world.command(world.checkpoint_vm(), tenant_id=TenantId("other"))
        await _session_goes_back(world)
        with pytest.raises(Rejected, match="stale-incarnation"):
            await world.command(world.checkpoint_vm())
        with pytest.raises(Rejected, match="stale-incarnation"):
            await world.command(exec_vm("true", exec_id="x-late"))

    in_virtual_time(scenario)


async def _session_goes_back(world: HostWorld) -> None:
    now = world.clock.now()
    (claimed, *_) = await world.events()
    event = RollbackRequested(
        session_id=S,
        host_id=claimed.host_id,
        vm_id=claimed.vm_id,
        incarnation=1,
        checkpoint_id=CKP,
        checkpoint_incarnation=1,
        fingerprint="simulated-1",
        log_position=1,
        recorded_at=now,
        requested_at=now,
        deadline_at=now,
    )
    log = MemoryLog(world.database)
    await log.append(
        Commit(
            command_id="acme/rollback",  # type: ignore[arg-type]
            tenant_id=TenantId("acme"),
            causation_id="test",
            correlation_id="test",
            request_digest=bytes(32),
            occurred_at_us=1,
            expected={S: 0},
            events=[encode_event(S, event)],
        )
    )


def test_an_idle_suspend_is_not_done_to_a_machine_in_which_a_program_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(exec_vm("sleep", "100"))
        await world.command(world.suspend_vm(idle_s=5.0))
        assert (await world.tags())[-1] == "vm-suspend-failed"
        assert world.state_of() == "running"
        await world.clock.sleep(101)
        await world.ended()
        await world.command(world.suspend_vm(checkpoint_id="ckp-2", idle_s=5.0))
        assert "vm-suspended" in await world.tags()

    in_virtual_time(scenario)

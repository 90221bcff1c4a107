"""Nothing is begun in a machine that its session has given up or replaced, also when it comes to that in between."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.vm_host_world import HOST, TENANT, VM, HostWorld, S, exec_vm, in_virtual_time, stop_vm
from torpor_contracts.errors import Rejected
from torpor_contracts.ids import CheckpointId, CommandId, HostId, SessionId, VmId
from torpor_contracts.session import (
    ExecRequested,
    ExecSpec,
    MachineSpec,
    RetryRule,
    SessionFailed,
    SessionLost,
    SessionRecovered,
    SessionRequested,
    SessionStartFailed,
    SessionSuspended,
    SessionTerminated,
    TerminateRequested,
    VmStartRequested,
)
from torpor_contracts.vm import VmStopped
from torpor_eventlog.codec import encode_event
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Commit
from torpor_vm_host.domain.observations import Place
from torpor_vm_host.domain.tenure import UNSAID, check, follow

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def asked(vm_id: str, incarnation: int = 1) -> VmStartRequested:
    return VmStartRequested(
        session_id=S,
        host_id=HostId(HOST),
        vm_id=VmId(vm_id),
        incarnation=incarnation,
        attempt=1,
        machine=MachineSpec(),
        checkpoint_id=None,
        fingerprint="f",
        requested_at=NOW,
        deadline_at=NOW,
    )


def lost(vm_id: str = VM) -> SessionLost:
    return SessionLost(
        incarnation=1, host_id=HostId(HOST), vm_id=VmId(vm_id), cause="silent", lost_since=NOW, observed_at=NOW
    )


def recovered() -> SessionRecovered:
    return SessionRecovered(vm_id=VM, host_id=HostId(HOST), incarnation=1, observed_at=NOW)


REQUESTED = SessionRequested(
    session_id=S,
    tenant_id=TENANT,
    machine=MachineSpec(),
    idle_after_s=None,
    start_retry=RetryRule(),
    metadata={},
    requested_at=NOW,
)
WORK = ExecRequested(exec_id=exec_vm("true").exec_id, program=ExecSpec(argv=["true"]), requested_at=NOW)
START_FAILED = SessionStartFailed(
    vm_id=VM, host_id=HostId(HOST), incarnation=1, attempt=1, code="c", detail="", retry_at=None, observed_at=NOW
)
SUSPENDED = SessionSuspended(
    incarnation=1, host_id=HostId(HOST), checkpoint_id=CheckpointId("ckp-1"), fingerprint="f", observed_at=NOW
)
FAILED = SessionFailed(incarnation=1, code="c", detail="", way_out="w", observed_at=NOW)
TERMINATE = TerminateRequested(
    session_id=S,
    host_id=HostId(HOST),
    vm_id=VM,
    incarnation=1,
    reason="",
    requested_at=NOW,
    deadline_at=NOW,
)
TERMINATED = SessionTerminated(incarnation=1, cause="", observed_at=NOW)


@pytest.mark.parametrize(
    ("session", "may"),
    [
        ([], True),
        ([REQUESTED], True),
        ([asked(VM)], True),
        ([asked(VM), WORK], True),
        ([asked(VM), lost(), recovered()], True),
        ([asked(VM), lost()], False),
        ([asked(VM), lost(), asked("vm-2", 2)], False),
        ([asked(VM), START_FAILED], False),
        ([asked(VM), SUSPENDED], False),
        ([asked(VM), FAILED], False),
        ([asked(VM), TERMINATED], False),
        ([asked("vm-0"), asked(VM)], True),
        ([asked(VM), TERMINATE], False),
    ],
)
def test_only_the_machine_that_the_session_has_may_begin_anything(session: list[Any], may: bool) -> None:
    place = Place(vm_id=VM, host_id=HostId(HOST), boot_id="b", now=NOW)
    tenure = UNSAID
    for event in session:
        tenure = follow(tenure, event)
    if may:
        check(tenure, place)
    else:
        with pytest.raises(Rejected, match="stale-incarnation"):
            check(tenure, place)


async def say(world: HostWorld, *events: msgspec.Struct) -> None:
    """Append to the session's stream, as the scheduler does."""
    log = MemoryLog(world.database)
    await log.append(
        Commit(
            command_id=CommandId(f"acme/say-{(await log.head()).position}"),
            tenant_id=TENANT,
            causation_id="test",
            correlation_id="test",
            request_digest=b"." * 32,
            occurred_at_us=1,
            expected={S: len(await log.load(S))},
            events=[encode_event(S, event) for event in events],
        )
    )


def test_a_command_that_comes_after_the_session_has_gone_on_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        await say(world, asked(VM))
        await world.command(world.start_vm())
        await world.command(exec_vm("count"))
        await world.ended()
        await say(world, lost(), asked("vm-2", 2))
        with pytest.raises(Rejected, match="it has vm-2 now"):
            await world.command(exec_vm("count", exec_id="x-2"))
        with pytest.raises(Rejected, match="stale-incarnation"):
            await world.command(world.start_vm(1), "vm-0")
        assert await world.tags("vm-0") == []
        await world.command(stop_vm())
        assert (await world.tags())[-2:] == ["vm-stopped", "vm-released"], "a stop is always welcome"
        await world.command(world.start_vm(2), "vm-2")
        assert world.state_of("vm-2") == "running"

    in_virtual_time(scenario)


@pytest.mark.parametrize("given_up", [True, False])
def test_what_the_session_says_in_between_is_heard(tmp_path: Path, given_up: bool) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        await say(world, asked(VM))
        await world.command(world.start_vm())
        meanwhile = lost() if given_up else WORK

        def in_between() -> None:
            _now(say(world, meanwhile))

        world.points.plans["append vm-exec-started"] = in_between
        if given_up:
            with pytest.raises(Rejected, match="it has none now"):
                await world.command(exec_vm("count"))
            assert "vm-exec-started" not in await world.tags()
        else:
            await world.command(exec_vm("count"))
            assert (await world.ended()).exit_code == 0
            assert world.points.passed.count("append vm-exec-started") == 2

    in_virtual_time(scenario)


def _now(work: Any) -> None:
    """Run to the end what waits for nothing."""
    with pytest.raises(StopIteration):
        work.send(None)


@pytest.mark.parametrize("asked_for", [True, False])
def test_a_stop_broken_off_before_its_record_is_expected_all_the_same(tmp_path: Path, asked_for: bool) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        await say(world, asked(VM))
        await world.command(world.start_vm())
        if asked_for:
            await say(world, TERMINATE)
            await world.killed_by("append vm-stopped", stop_vm())
        else:
            await world.crash()
            await world.machines.delete(VM)
        await world.boot()
        stopped: VmStopped = await world.last(VmStopped)
        assert stopped.expected == asked_for
        assert (await world.tags()).count("vm-stopped") == 1

    in_virtual_time(scenario)


def test_a_program_that_an_earlier_machine_had_begun_is_not_begun_again(tmp_path: Path) -> None:
    """Its end, or its start alone, may not have come to the scheduler when that sends the program to a new machine."""

    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        await say(world, asked(VM))
        await world.command(world.start_vm())
        await world.command(exec_vm("count"))
        await world.ended()
        await world.command(world.suspend_vm())
        await say(world, SUSPENDED, asked("vm-2", 2))
        await world.command(world.start_vm(2, checkpoint_id=CheckpointId("ckp-1")), "vm-2")
        assert await world.command(exec_vm("count", incarnation=2), "vm-2") is None
        await world.command(exec_vm("count", exec_id="x-new", incarnation=2), "vm-2")
        await world.ended("x-new", "vm-2")
        await world.look()
        assert world.read("x-new").output == b"2\n"

    in_virtual_time(scenario)


@pytest.mark.parametrize(
    ("session", "before"),
    [
        ([asked("vm-1")], ()),
        ([asked("vm-1"), lost(), asked("vm-2")], ("vm-1",)),
        ([asked("vm-1"), asked("vm-2"), lost("vm-2"), recovered()], ("vm-2",)),
        ([asked(f"vm-{number}") for number in range(9)], ("vm-7", "vm-6", "vm-5", "vm-4")),
    ],
)
def test_the_machines_a_session_had_last_are_known(session: list[Any], before: tuple[str, ...]) -> None:
    tenure = UNSAID
    for event in session:
        tenure = follow(tenure, event)
    assert tenure.before == before


def test_other_sessions_do_not_matter(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        await say(world, asked("vm-7"))
        await world.command(world.start_vm(session_id=SessionId("s-other")))
        assert world.state_of() == "running"

    in_virtual_time(scenario)

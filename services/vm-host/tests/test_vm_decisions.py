"""Given what happened to a machine, when it is told or seen to do something: happens, rejected, ignored."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from torpor_contracts.checkpoint import CheckpointManifest
from torpor_contracts.errors import InvariantViolation, Rejected
from torpor_contracts.ids import CheckpointId, ExecId, HostId, SessionId, TenantId, VmId
from torpor_contracts.session import ExecSpec, MachineSpec
from torpor_contracts.session_reports import ContinuedExec
from torpor_contracts.vm import (
    IN_USE,
    CheckpointVm,
    ExecVm,
    QuarantineVm,
    ReapVm,
    ResourceRef,
    StartVm,
    StopVm,
    SuspendVm,
    VmCheckpointed,
    VmCheckpointFailed,
    VmCheckpointStarted,
    VmClaimed,
    VmEvent,
    VmExecContinued,
    VmExecEnded,
    VmExecStarted,
    VmQuarantined,
    VmReaped,
    VmReleased,
    VmStarted,
    VmStartFailed,
    VmStopped,
    VmSuspended,
    VmSuspendFailed,
    VmSuspendStarted,
)
from torpor_vm_host.domain import decisions, observations
from torpor_vm_host.domain.observations import Failure, Outcome, Place
from torpor_vm_host.domain.vm import ABSENT, TRANSITIONS, VmState, evolve, held_by, may_exist, name_of, running_execs
from torpor_vm_host.ports import TakenCheckpoint

NOW = datetime(2030, 1, 1, tzinfo=UTC)
PLACE = Place(vm_id=VmId("vm-1"), host_id=HostId("host-a"), boot_id="boot-1", now=NOW)
FILE = ResourceRef(kind="memory-file", name="machines/vm-1")
FOLDER = ResourceRef(kind="directory", name="vms/vm-1")
WHY = Failure("boot-failed", "it did not boot", retryable=True)

START = StartVm(
    session_id=SessionId("s-1"),
    incarnation=1,
    machine=MachineSpec(),
    checkpoint_id=None,
    deadline_at=NOW + timedelta(seconds=60),
)
EXEC = ExecVm(session_id=SessionId("s-1"), incarnation=1, exec_id=ExecId("x-1"), program=ExecSpec(argv=["true"]))
SUSPEND = SuspendVm(
    session_id=SessionId("s-1"),
    incarnation=1,
    checkpoint_id=CheckpointId("ckp-1"),
    parent_id=None,
    deadline_at=NOW + timedelta(seconds=60),
)
CAPTURE = CheckpointVm(
    session_id=SessionId("s-1"),
    incarnation=1,
    checkpoint_id=CheckpointId("ckp-live"),
    parent_id=CheckpointId("ckp-0"),
    deadline_at=NOW + timedelta(seconds=60),
)
TAKEN = TakenCheckpoint(
    manifest=CheckpointManifest(
        session_id=SessionId("s-1"),
        incarnation=1,
        parent_id=CheckpointId("ckp-0"),
        fingerprint="simulated-1",
        parts=[],
        log_position=17,
    ),
    pause_ms=2.5,
    taken_at=NOW - timedelta(seconds=1),
)
STOP = StopVm(session_id=SessionId("s-1"), incarnation=1, reason="")
REAP = ReapVm(evidence="nobody's", checked_position=10)
QUARANTINE = QuarantineVm(evidence="nobody's")


def start(state: VmState, command: StartVm = START, *, room: bool = True) -> list[VmEvent]:
    return decisions.start(state, command, TenantId("acme"), PLACE, [FOLDER, FILE], room=room)


def ended(exec_id: str = "x-1") -> VmExecEnded:
    claim = fold(CLAIMED).claim  # type: ignore[union-attr]
    assert claim is not None
    return observations.exec_end(claim, PLACE, ExecId(exec_id), Outcome("exited", 0, "", 3))


def fold(events: Sequence[VmEvent], state: VmState = ABSENT) -> VmState:
    for event in events:
        state = evolve(state, event)
    return state


CLAIMED = start(ABSENT)
STARTED = [*CLAIMED, *observations.started(fold(CLAIMED), PLACE, 100, [])]
BUSY = [*STARTED, *decisions.exec_program(fold(STARTED), EXEC, PLACE, 8)]
CAPTURING = [*BUSY, *decisions.checkpoint(fold(BUSY), CAPTURE, PLACE)]
CAPTURED = [*CAPTURING, *observations.checkpointed(fold(CAPTURING), PLACE, TAKEN)]
SUSPENDING = [*BUSY, *decisions.suspend(fold(BUSY), SUSPEND, PLACE)]
SUSPENDED = [*SUSPENDING, *observations.suspended(fold(SUSPENDING), PLACE, "simulated-1", 5, [FILE])]
STOPPED = [*STARTED, *decisions.stop(fold(STARTED), STOP, PLACE, [FILE, FOLDER])]
FAILED = [*CLAIMED, *observations.start_gave_up(fold(CLAIMED), PLACE, WHY, [FILE])]
QUARANTINED = [*STARTED, *decisions.quarantine(fold(STARTED), QUARANTINE, PLACE)]
REAPED = [*QUARANTINED, *decisions.reap(fold(QUARANTINED), REAP, PLACE, [FILE, FOLDER])]
HISTORIES = {
    "absent": [],
    "claimed": CLAIMED,
    "running": STARTED,
    "busy": BUSY,
    "capturing": CAPTURING,
    "captured": CAPTURED,
    "suspending": SUSPENDING,
    "suspended": SUSPENDED,
    "stopped": STOPPED,
    "start-failed": FAILED,
    "quarantined": QUARANTINED,
    "reaped": REAPED,
}


def kinds(events: Sequence[VmEvent]) -> list[type[Any]]:
    return [type(event) for event in events]


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ("absent", [VmClaimed]),
        ("claimed", []),
        ("running", []),
        ("suspending", []),
        ("quarantined", []),
        ("suspended", "vm-ended"),
        ("stopped", "vm-ended"),
        ("reaped", "vm-ended"),
        ("start-failed", [VmClaimed]),
    ],
)
def test_start(given: str, then: Any) -> None:
    check(lambda: start(fold(HISTORIES[given])), then)


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ("absent", "vm-not-running"),
        ("claimed", "vm-not-running"),
        ("running", [VmExecStarted]),
        ("busy", []),
        ("suspending", "vm-not-running"),
        ("suspended", "vm-not-running"),
        ("stopped", "vm-not-running"),
        ("quarantined", "vm-not-running"),
    ],
)
def test_exec(given: str, then: Any) -> None:
    check(lambda: decisions.exec_program(fold(HISTORIES[given]), EXEC, PLACE, 8), then)


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ("absent", "vm-not-running"),
        ("claimed", "vm-not-running"),
        ("running", [VmSuspendStarted]),
        ("suspending", []),
        ("suspended", []),
        ("stopped", "vm-not-running"),
        ("quarantined", "vm-not-running"),
    ],
)
def test_suspend(given: str, then: Any) -> None:
    check(lambda: decisions.suspend(fold(HISTORIES[given]), SUSPEND, PLACE), then)


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ("absent", "vm-not-running"),
        ("claimed", "vm-not-running"),
        ("running", [VmCheckpointStarted]),
        ("capturing", []),
        ("captured", []),
        ("suspending", "vm-not-running"),
        ("suspended", "vm-not-running"),
        ("stopped", "vm-not-running"),
        ("quarantined", "vm-not-running"),
    ],
)
def test_checkpoint(given: str, then: Any) -> None:
    check(lambda: decisions.checkpoint(fold(HISTORIES[given]), CAPTURE, PLACE), then)


def test_one_checkpoint_at_a_time_and_any_number_after_each_other() -> None:
    other = msgspec.structs.replace(CAPTURE, checkpoint_id=CheckpointId("ckp-other"))
    check(lambda: decisions.checkpoint(fold(CAPTURING), other, PLACE), "checkpoint-in-progress")
    check(lambda: decisions.checkpoint(fold(CAPTURED), other, PLACE), [VmCheckpointStarted])
    stale = msgspec.structs.replace(CAPTURE, incarnation=2)
    check(lambda: decisions.checkpoint(fold(STARTED), stale, PLACE), "stale-incarnation")


def test_a_late_checkpoint_fails_and_the_machine_runs_on() -> None:
    late = msgspec.structs.replace(CAPTURE, deadline_at=NOW)
    (failed,) = decisions.checkpoint(fold(STARTED), late, PLACE)
    assert isinstance(failed, VmCheckpointFailed)
    assert (failed.code, failed.retryable) == ("deadline-passed", True)


def test_what_was_captured_is_recorded_once_with_its_place_in_the_log() -> None:
    (done,) = observations.checkpointed(fold(CAPTURING), PLACE, TAKEN)
    assert isinstance(done, VmCheckpointed)
    assert (done.checkpoint_id, done.log_position, done.pause_ms) == ("ckp-live", 17, 2.5)
    assert observations.checkpointed(fold(CAPTURED), PLACE, TAKEN) == []
    assert observations.checkpointed(fold(SUSPENDING), PLACE, TAKEN) == []
    assert kinds(observations.checkpoint_failed(fold(CAPTURING), PLACE, WHY)) == [VmCheckpointFailed]
    assert observations.checkpoint_failed(fold(STOPPED), PLACE, WHY) == []


def test_a_machine_that_is_used_is_not_suspended_for_idleness() -> None:
    (failed,) = decisions.suspend(fold(STARTED), SUSPEND, PLACE, "it was used")
    assert isinstance(failed, VmSuspendFailed)
    assert failed.code == IN_USE


def test_suspend_under_another_id_while_one_is_under_way_or_over() -> None:
    other = msgspec.structs.replace(SUSPEND, checkpoint_id=CheckpointId("ckp-2"))
    check(lambda: decisions.suspend(fold(SUSPENDING), other, PLACE), "suspend-in-progress")
    check(lambda: decisions.suspend(fold(SUSPENDED), other, PLACE), "vm-not-running")


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ("absent", [VmStopped]),
        ("claimed", [VmStopped, VmReleased]),
        ("running", [VmStopped, VmReleased]),
        ("suspending", [VmStopped, VmReleased]),
        ("quarantined", [VmStopped, VmReleased]),
        ("suspended", [VmReleased]),
        ("start-failed", [VmReleased]),
        ("stopped", []),
    ],
)
def test_stop(given: str, then: Any) -> None:
    check(lambda: decisions.stop(fold(HISTORIES[given]), STOP, PLACE, [FILE, FOLDER]), then)


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ("absent", [VmQuarantined]),
        ("running", [VmQuarantined]),
        ("stopped", [VmQuarantined]),
        ("quarantined", []),
        ("claimed", "vm-busy"),
        ("suspending", "vm-busy"),
    ],
)
def test_quarantine(given: str, then: Any) -> None:
    check(lambda: decisions.quarantine(fold(HISTORIES[given]), QUARANTINE, PLACE), then)


def test_reap_only_what_is_quarantined_on_evidence_that_knows_its_last_event() -> None:
    for given in ("absent", "claimed", "running", "suspending", "suspended", "stopped"):
        check(lambda given=given: _check_reap(HISTORIES[given], 10), "vm-not-quarantined")
    check(lambda: _check_reap(QUARANTINED, 11), "evidence-stale")
    assert _check_reap(QUARANTINED, 10) == [True]
    assert _check_reap(REAPED, 99) == [False]
    assert kinds(decisions.reap(fold(QUARANTINED), REAP, PLACE, [FILE])) == [VmReaped, VmReleased]


def _check_reap(given: Sequence[VmEvent], last_position: int) -> list[Any]:
    return [decisions.check_reap(fold(given), REAP, PLACE, last_position)]


def check(decide: Any, then: Any) -> None:
    if isinstance(then, str):
        with pytest.raises(Rejected) as refused:
            decide()
        assert refused.value.code == then
        assert refused.value.advice
    else:
        assert kinds(decide()) == then


@pytest.mark.parametrize("given", ["claimed", "running", "suspending", "quarantined"])
@pytest.mark.parametrize("changes", [{"incarnation": 2}, {"session_id": SessionId("s-2")}])
def test_another_session_or_incarnation_is_refused(given: str, changes: dict[str, Any]) -> None:
    state = fold(HISTORIES[given])
    check(lambda: start(state, msgspec.structs.replace(START, **changes)), "stale-incarnation")
    check(lambda: decisions.stop(state, msgspec.structs.replace(STOP, **changes), PLACE, []), "stale-incarnation")


def test_a_machine_of_another_host_is_refused() -> None:
    elsewhere = msgspec.structs.replace(PLACE, host_id=HostId("host-b"))
    check(lambda: decisions.stop(fold(STARTED), STOP, elsewhere, []), "vm-elsewhere")


def test_too_late_or_too_much_ends_a_start_before_anything_is_claimed() -> None:
    late = msgspec.structs.replace(START, deadline_at=NOW)
    for events, code in ((start(ABSENT, late), "deadline-passed"), (start(ABSENT, room=False), "no-capacity")):
        (failed,) = events
        assert isinstance(failed, VmStartFailed)
        assert (failed.code, failed.retryable) == (code, True)
        assert held_by(fold(events)) == ()


def test_a_start_that_failed_is_recorded_once_however_often_it_is_asked_for() -> None:
    late = msgspec.structs.replace(START, deadline_at=NOW)
    failed = fold(start(ABSENT, late))
    assert start(failed, late) == []
    assert start(failed, room=False) == []


def test_a_late_suspend_fails_and_the_machine_runs_on() -> None:
    late = msgspec.structs.replace(SUSPEND, deadline_at=NOW)
    events = decisions.suspend(fold(STARTED), late, PLACE)
    assert kinds(events) == [VmSuspendFailed]
    assert name_of(fold([*STARTED, *events])) == "running"


def test_observations_are_recorded_once_and_only_where_they_can_be() -> None:
    assert observations.started(fold(STARTED), PLACE, 1, []) == []
    assert observations.exec_ended(fold(STARTED), ended()) == []
    assert kinds(observations.exec_ended(fold(BUSY), ended())) == [VmExecEnded]
    assert observations.exec_ended(fold([*BUSY, ended()]), ended()) == []
    assert kinds(observations.exec_ended(fold(SUSPENDING), ended())) == [VmExecEnded]
    assert observations.exec_ended(fold(SUSPENDED), ended()) == []
    assert kinds(observations.suspend_failed(fold(SUSPENDING), PLACE, WHY)) == [VmSuspendFailed]
    assert observations.suspend_failed(fold(STARTED), PLACE, WHY) == []
    assert observations.suspended(fold(STARTED), PLACE, "", 1, []) == []
    assert kinds(observations.found_gone(fold(BUSY), PLACE, "it died", [FILE])) == [VmStopped, VmReleased]
    assert observations.found_gone(fold(CLAIMED), PLACE, "it died", []) == []
    assert observations.found_gone(fold(STOPPED), PLACE, "it died", []) == []
    assert kinds(observations.start_gave_up(fold(CLAIMED), PLACE, WHY, [FILE])) == [VmStartFailed, VmReleased]
    assert observations.start_gave_up(fold(STARTED), PLACE, WHY, [FILE]) == []


def test_programs_that_come_with_a_checkpoint_are_known_and_not_begun_again() -> None:
    came = ContinuedExec(exec_id=ExecId("x-1"), remaining_s=5.0)
    events = observations.started(fold(CLAIMED), PLACE, 1, [came])
    assert kinds(events) == [VmStarted, VmExecContinued]
    assert isinstance(events[0], VmStarted)
    assert events[0].execs == [came]
    state = fold([*CLAIMED, *events])
    assert running_execs(state) == ["x-1"]
    assert decisions.exec_program(state, EXEC, PLACE, 8) == []
    assert observations.continued(state, PLACE, [ExecId("x-1")]) == []


def test_a_program_too_many_ends_at_once() -> None:
    state = fold(BUSY)
    more = msgspec.structs.replace(EXEC, exec_id=ExecId("x-2"))
    (end,) = decisions.exec_program(state, more, PLACE, 1)
    assert isinstance(end, VmExecEnded)
    assert end.outcome == "failed"
    assert kinds(decisions.exec_program(fold([*BUSY, ended()]), more, PLACE, 1)) == [VmExecStarted]


def test_what_is_held_is_what_was_claimed_and_not_seen_gone() -> None:
    assert held_by(fold(STARTED)) == (FOLDER, FILE)
    assert held_by(fold(SUSPENDED)) == (FOLDER,)
    assert may_exist(fold(SUSPENDED))
    assert not may_exist(fold(STOPPED))
    again = fold([*FAILED, *start(fold(FAILED))])
    assert set(held_by(again)) == {FOLDER, FILE}


def test_a_foreign_tenant_is_refused_and_the_operator_is_not() -> None:
    with pytest.raises(Rejected, match="foreign-tenant"):
        decisions.check_tenant(fold(STARTED), TenantId("other"))
    decisions.check_tenant(fold(STARTED), TenantId("acme"))
    decisions.check_tenant(fold(STARTED), TenantId("system"))
    decisions.check_tenant(ABSENT, TenantId("other"))


def examples() -> dict[type[Any], VmEvent]:
    found: dict[type[Any], VmEvent] = {}
    for history in HISTORIES.values():
        found |= {type(event): event for event in history}
    came = ContinuedExec(exec_id=ExecId("x-9"), remaining_s=5.0)
    continued = observations.started(fold(CLAIMED), PLACE, 1, [came])[1]
    failed = observations.suspend_failed(fold(SUSPENDING), PLACE, WHY)[0]
    not_taken = observations.checkpoint_failed(fold(CAPTURING), PLACE, WHY)[0]
    return found | {type(event): event for event in (continued, failed, not_taken, ended())}


def test_every_event_in_every_state_does_what_the_table_says() -> None:
    events = examples()
    assert set(events) == set(VmEvent.__args__)
    for history in HISTORIES.values():
        state = fold(history)
        for kind, event in events.items():
            after = TRANSITIONS[name_of(state)].get(kind)
            claimed_anew = (
                kind is VmClaimed and name_of(state) == "ended" and getattr(state, "how", "") != "start-failed"
            )
            if after is None or claimed_anew:
                with pytest.raises(InvariantViolation):
                    evolve(state, event)
            else:
                assert name_of(evolve(state, event)) == after


def test_every_state_of_the_table_can_be_reached() -> None:
    assert {name_of(fold(history)) for history in HISTORIES.values()} == set(TRANSITIONS)
    assert {kind for after in TRANSITIONS.values() for kind in after} == set(VmEvent.__args__)
    assert isinstance(SUSPENDED[-2], VmSuspended)

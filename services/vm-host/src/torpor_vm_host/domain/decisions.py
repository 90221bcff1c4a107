"""What a command makes of a machine's state: the events to record, nothing when it is done already, or a refusal."""

from collections.abc import Sequence
from datetime import datetime
from typing import assert_never

from torpor_contracts.errors import Rejected
from torpor_contracts.ids import SessionId, TenantId
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
    VmCheckpointStarted,
    VmClaimed,
    VmEvent,
    VmExecStarted,
    VmQuarantined,
    VmReaped,
    VmStopped,
    VmSuspendStarted,
)
from torpor_vm_host.domain.observations import (
    Failure,
    Outcome,
    Place,
    exec_end,
    not_checkpointed,
    not_suspended,
    released,
    start_failed,
)
from torpor_vm_host.domain.vm import (
    Absent,
    Claim,
    Claimed,
    Ended,
    Quarantined,
    Running,
    Suspending,
    VmState,
    claim_of,
    name_of,
)


def check_tenant(state: VmState, tenant_id: TenantId) -> None:
    """Refuse a command of a tenant whose machine it is not."""
    claim = claim_of(state)
    if claim is not None and tenant_id not in {claim.tenant_id, "system"}:
        raise Rejected("foreign-tenant", f"{claim.vm_id} is not tenant {tenant_id}'s", "name a machine of your own")


def start(
    state: VmState, command: StartVm, tenant_id: TenantId, place: Place, resources: list[ResourceRef], *, room: bool
) -> list[VmEvent]:
    """Claim the machine; nothing when that is done; a failure, once, when it is too late or there is no room."""
    match state:
        case Claimed() | Running() | Suspending() | Quarantined():
            _check_same(state, place, command.session_id, command.incarnation)
            return []
        case Ended(how="start-failed") | Absent():
            pass
        case Ended():
            raise Rejected(
                "vm-ended", f"{place.vm_id} was {state.how}", "ask for a machine under a new id and incarnation"
            )
        case _ as never:
            assert_never(never)
    failure = deadline_failure(command.deadline_at, place.now)
    if failure is None and not room:
        failure = Failure("no-capacity", f"{place.host_id} has no room for the machine now", retryable=True)
    if failure is not None:
        # A start that has failed already is on record; it failed once, however often it is asked for.
        return [] if isinstance(state, Ended) else [start_failed(command, place, failure)]
    return [
        VmClaimed(
            vm_id=place.vm_id,
            host_id=place.host_id,
            boot_id=place.boot_id,
            tenant_id=tenant_id,
            session_id=command.session_id,
            incarnation=command.incarnation,
            machine=command.machine,
            checkpoint_id=command.checkpoint_id,
            resources=resources,
            claimed_at=place.now,
        )
    ]


def deadline_failure(deadline_at: datetime, now: datetime) -> Failure | None:
    """The failure of what begins after its deadline."""
    if now < deadline_at:
        return None
    return Failure("deadline-passed", f"it was to be done before {deadline_at.isoformat()}", retryable=True)


def exec_program(state: VmState, command: ExecVm, place: Place, execs_max: int) -> list[VmEvent]:
    """Record that the program is about to start; nothing when it is known; its end when there are too many."""
    if not isinstance(state, Running):
        raise _not_running(state, place)
    _check_same(state, place, command.session_id, command.incarnation)
    if command.exec_id in state.execs:
        return []
    if sum(state.execs.values()) >= execs_max:
        detail = f"too-many-programs: {execs_max} run already in this machine; wait until one has ended"
        return [exec_end(state.claim, place, command.exec_id, Outcome("failed", None, detail, 0))]
    return [
        VmExecStarted(
            vm_id=place.vm_id,
            session_id=command.session_id,
            incarnation=command.incarnation,
            exec_id=command.exec_id,
            observed_at=place.now,
        )
    ]


def suspend(state: VmState, command: SuspendVm, place: Place, used: str = "") -> list[VmEvent]:
    """Record that the machine is about to be paused; nothing when that is under way or done under the same id.

    `used`: why it is not idle; then it is not suspended.
    """
    match state:
        case Running():
            _check_same(state, place, command.session_id, command.incarnation)
            late = deadline_failure(command.deadline_at, place.now)
            if late is None and used:
                late = Failure(IN_USE, used, retryable=True)
            started = _suspend_started(state.claim, command, place)
            return [started] if late is None else [not_suspended(started, place, late)]
        case Suspending():
            _check_same(state, place, command.session_id, command.incarnation)
            if state.suspend.checkpoint_id == command.checkpoint_id:
                return []
            other = state.suspend.checkpoint_id
            raise Rejected("suspend-in-progress", f"{place.vm_id} is being suspended as {other}", "wait for its end")
        case Ended(how="suspended", checkpoint_id=command.checkpoint_id):
            return []
        case Absent() | Claimed() | Quarantined() | Ended():
            raise _not_running(state, place)
        case _ as never:
            assert_never(never)


def checkpoint(state: VmState, command: CheckpointVm, place: Place) -> list[VmEvent]:
    """Record that the machine is about to be captured; nothing when that is under way or done under the same id."""
    if not isinstance(state, Running):
        raise _not_running(state, place)
    _check_same(state, place, command.session_id, command.incarnation)
    if state.checkpoint is not None:
        if state.checkpoint.checkpoint_id == command.checkpoint_id:
            return []
        other = state.checkpoint.checkpoint_id
        raise Rejected("checkpoint-in-progress", f"{place.vm_id} is being checkpointed as {other}", "wait for its end")
    if state.checkpointed == command.checkpoint_id:
        return []
    started = VmCheckpointStarted(
        vm_id=place.vm_id,
        host_id=place.host_id,
        session_id=state.claim.session_id,
        incarnation=state.claim.incarnation,
        checkpoint_id=command.checkpoint_id,
        parent_id=command.parent_id,
        started_at=place.now,
        deadline_at=command.deadline_at,
    )
    late = deadline_failure(command.deadline_at, place.now)
    return [started] if late is None else [not_checkpointed(started, place, late)]


def check_stop(state: VmState, command: StopVm, place: Place) -> bool:
    """Whether there is anything to stop or to let go of; refuses another incarnation's command."""
    match state:
        case Absent():
            return True
        case Claimed() | Running() | Suspending() | Quarantined() | Ended():
            _check_same(state, place, command.session_id, command.incarnation)
            return not isinstance(state, Ended) or bool(state.held)
        case _ as never:
            assert_never(never)


def stop(state: VmState, command: StopVm, place: Place, gone: Sequence[ResourceRef]) -> list[VmEvent]:
    """The machine is gone, as was asked; said also of one that was never started, so that it never will be."""
    check_stop(state, command, place)
    if isinstance(state, Ended):
        return released(state, place, gone)
    return [
        VmStopped(
            vm_id=place.vm_id,
            host_id=place.host_id,
            session_id=command.session_id,
            incarnation=command.incarnation,
            expected=True,
            cause=command.reason or "asked to stop",
            observed_at=place.now,
        ),
        *released(state, place, gone),
    ]


def check_quarantine(state: VmState, place: Place) -> bool:
    """Whether the machine is to be frozen; refuses one whose start is not settled, or that is being suspended."""
    match state:
        case Absent() | Running() | Ended():
            return True
        case Quarantined():
            return False
        case Claimed() | Suspending():
            raise Rejected("vm-busy", f"{place.vm_id} is {name_of(state)}", "look again when that has ended")
        case _ as never:
            assert_never(never)


def quarantine(state: VmState, command: QuarantineVm, place: Place) -> list[VmEvent]:
    """The machine is frozen."""
    if not check_quarantine(state, place):
        return []
    return [VmQuarantined(vm_id=place.vm_id, host_id=place.host_id, evidence=command.evidence, observed_at=place.now)]


def check_reap(state: VmState, command: ReapVm, place: Place, last_position: int) -> bool:
    """Whether to destroy the machine; refuses one that is not quarantined, and evidence older than its stream."""
    if isinstance(state, Ended) and state.how == "reaped":
        return bool(state.held)
    if not isinstance(state, Quarantined):
        raise Rejected("vm-not-quarantined", f"{place.vm_id} is {name_of(state)}", "quarantine it first, on evidence")
    if last_position > command.checked_position:
        raise Rejected(
            "evidence-stale",
            f"the log was checked up to {command.checked_position}, {place.vm_id} has an event at {last_position}",
            "read the log again before a machine is destroyed",
        )
    return True


def reap(state: VmState, command: ReapVm, place: Place, gone: Sequence[ResourceRef]) -> list[VmEvent]:
    """The quarantined machine is gone."""
    if isinstance(state, Ended):
        return released(state, place, gone)
    if not isinstance(state, Quarantined):
        return []
    return [
        VmReaped(
            vm_id=place.vm_id,
            host_id=place.host_id,
            evidence=command.evidence,
            checked_position=command.checked_position,
            observed_at=place.now,
        ),
        *released(state, place, gone),
    ]


def _check_same(state: VmState, place: Place, session_id: SessionId, incarnation: int) -> None:
    claim = claim_of(state)
    if claim is None:
        return
    if claim.host_id != place.host_id:
        raise Rejected("vm-elsewhere", f"{place.vm_id} is on {claim.host_id}", "send the command to that host")
    if (claim.session_id, claim.incarnation) != (session_id, incarnation):
        raise Rejected(
            "stale-incarnation",
            f"{place.vm_id} is incarnation {claim.incarnation} of {claim.session_id}",
            "name the incarnation you mean to act for",
        )


def _not_running(state: VmState, place: Place) -> Rejected:
    return Rejected("vm-not-running", f"{place.vm_id} is {name_of(state)}", "resume the session, then try again")


def _suspend_started(claim: Claim, command: SuspendVm, place: Place) -> VmSuspendStarted:
    return VmSuspendStarted(
        vm_id=place.vm_id,
        host_id=place.host_id,
        session_id=claim.session_id,
        incarnation=claim.incarnation,
        checkpoint_id=command.checkpoint_id,
        parent_id=command.parent_id,
        started_at=place.now,
        deadline_at=command.deadline_at,
    )

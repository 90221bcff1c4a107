"""Folds a session's events into its state; every step goes through the one table of transitions."""

from datetime import timedelta
from typing import Final, assert_never

from msgspec.structs import replace

from torpor_contracts.errors import InvariantViolation
from torpor_contracts.ids import ExecId
from torpor_contracts.scheduling import Problem
from torpor_contracts.session import (
    ExecEnded,
    ExecRequested,
    ExecStarted,
    PlacementDeferred,
    ResumeDeferred,
    ResumeRequested,
    SessionEvent,
    SessionFailed,
    SessionLost,
    SessionRecovered,
    SessionRequested,
    SessionResumed,
    SessionStarted,
    SessionStartFailed,
    SessionSuspended,
    SessionTerminated,
    SuspendFailed,
    SuspendRequested,
    SuspendWithdrawn,
    TerminateRequested,
    VmStartRequested,
)
from torpor_contracts.session_branches import BranchEvent, ExecContinued, Lineage
from torpor_scheduler.domain.branching import with_branch
from torpor_scheduler.domain.session import (
    TRANSITIONS,
    Checkpoint,
    Exec,
    Lost,
    Machine,
    Session,
    Starting,
    Suspending,
)

RECENT_EXECS_MAX: Final = 32
"""How many ids of ended programs a session remembers; older ones are found in the view of programs."""

ExecEvent = ExecRequested | ExecStarted | ExecEnded | ExecContinued
StartEvent = (
    SessionRequested
    | PlacementDeferred
    | VmStartRequested
    | SessionStarted
    | SessionResumed
    | SessionRecovered
    | SessionStartFailed
)
SleepEvent = SuspendRequested | SessionSuspended | SuspendFailed | SuspendWithdrawn | ResumeDeferred | ResumeRequested
EndEvent = SessionLost | TerminateRequested | SessionTerminated | SessionFailed


def evolve(session: Session, event: SessionEvent) -> Session:
    """The state after `event`; raises `InvariantViolation` for what the table does not allow."""
    phase = TRANSITIONS[session.phase].get(type(event))
    if phase is None:
        raise InvariantViolation(
            f"session {session.session_id or '?'} at version {session.version}: "
            f"{type(event).__name__} cannot happen in phase {session.phase}"
        )
    version = session.version + 1
    if isinstance(event, ExecEvent):
        return _with_exec(replace(session, phase=phase, version=version), event)
    session = replace(session, phase=phase, version=version, step_version=version)
    if isinstance(event, StartEvent):
        return _with_start(session, event)
    if isinstance(event, SleepEvent):
        return _with_sleep(session, event)
    if isinstance(event, BranchEvent):
        return with_branch(session, event)
    return _with_end(session, event)


def _with_start(session: Session, event: StartEvent) -> Session:
    match event:
        case SessionRequested():
            return replace(
                session,
                session_id=event.session_id,
                tenant_id=event.tenant_id,
                spec=event.machine,
                idle_after_s=event.idle_after_s,
                start_retry=event.start_retry,
                metadata=event.metadata,
                lineage=event.lineage,
                requested_at=event.requested_at,
                incarnation=1,
                starting=Starting(began_at=event.requested_at),
                checkpoint=None if event.lineage is None else _inherited(event.lineage, event),
                restorable_at=None if event.lineage is None else event.requested_at,
            )
        case PlacementDeferred():
            return replace(
                session,
                starting=replace(_starting(session), deferrals=event.attempt, retry_at=event.retry_at),
                problem=Problem(
                    code="not-placed",
                    detail=event.reason,
                    way_out=f"wait: it is tried again until {event.give_up_at.isoformat()}; or add or undrain a host",
                    since=event.deferred_at,
                ),
            )
        case VmStartRequested():
            return _with_machine(session, event)
        case SessionStarted() | SessionResumed():
            return _with_running(session, event)
        case SessionRecovered():
            lost = session.lost
            if lost is None or lost.machine.vm_id != event.vm_id:
                raise InvariantViolation(f"session {session.session_id}: {event.vm_id} was not given up for lost")
            return replace(
                session, machine=lost.machine, lost=None, problem=None, active_at=event.observed_at, resume_wanted=False
            )
        case SessionStartFailed():
            return replace(
                session,
                machine=None,
                starting=replace(_starting(session), retry_at=event.retry_at),
                problem=Problem(
                    code=event.code,
                    detail=event.detail,
                    way_out="wait: it is tried again",
                    since=event.observed_at,
                ),
            )
        case _ as never:
            assert_never(never)


def _with_machine(session: Session, event: VmStartRequested) -> Session:
    if event.incarnation <= session.incarnation_used or event.incarnation < session.incarnation:
        raise InvariantViolation(f"session {session.session_id}: incarnation {event.incarnation} would be given twice")
    return replace(
        session,
        incarnation=event.incarnation,
        incarnation_used=event.incarnation,
        machine=Machine(
            vm_id=event.vm_id,
            host_id=event.host_id,
            incarnation=event.incarnation,
            checkpoint_id=event.checkpoint_id,
            fingerprint=event.fingerprint,
            deadline_at=event.deadline_at,
        ),
        starting=replace(_starting(session), attempt=event.attempt, retry_at=None),
    )


def _with_running(session: Session, event: SessionStarted | SessionResumed) -> Session:
    machine = session.machine
    if machine is None or machine.vm_id != event.vm_id:
        raise InvariantViolation(f"session {session.session_id}: {event.vm_id} is not its machine")
    from_image = machine.checkpoint_id is None
    return replace(
        session,
        machine=replace(machine, started_at=event.observed_at),
        starting=None,
        lost=None,
        problem=None,
        resume_wanted=False,
        active_at=event.observed_at,
        restorable_at=event.observed_at if from_image else session.restorable_at,
    )


def _with_exec(session: Session, event: ExecEvent) -> Session:
    match event:
        case ExecRequested():
            program = Exec(
                exec_id=event.exec_id,
                version=session.version,
                requested_at=event.requested_at,
                timeout_s=event.program.timeout_s,
            )
            return replace(session, execs=(*session.execs, program), active_at=event.requested_at, suspend_failures=0)
        case ExecStarted():
            execs = tuple(
                replace(program, started_at=event.observed_at, started_incarnation=event.incarnation)
                if program.exec_id == event.exec_id
                else program
                for program in session.execs
            )
            return replace(session, execs=execs, losses=0)
        case ExecContinued():
            program = Exec(
                exec_id=event.exec_id,
                version=session.version,
                requested_at=event.observed_at,
                timeout_s=event.timeout_s,
                started_at=event.observed_at,
                started_incarnation=event.incarnation,
            )
            return replace(session, execs=(*session.execs, program))
        case ExecEnded():
            return replace(
                session,
                execs=tuple(program for program in session.execs if program.exec_id != event.exec_id),
                recent_execs=_remembered(session, event.exec_id),
                active_at=max(session.active_at or event.observed_at, event.observed_at),
            )
        case _ as never:
            assert_never(never)


def _with_sleep(session: Session, event: SleepEvent) -> Session:
    match event:
        case SuspendRequested():
            return replace(
                session,
                suspending=Suspending(
                    checkpoint_id=event.checkpoint_id,
                    cause=event.cause,
                    deadline_at=event.deadline_at,
                    parent_id=event.parent_id,
                ),
            )
        case SessionSuspended():
            return replace(
                session,
                machine=None,
                lost=None,
                suspending=None,
                checkpoint=Checkpoint(
                    checkpoint_id=event.checkpoint_id,
                    incarnation=event.incarnation,
                    fingerprint=event.fingerprint,
                    host_id=event.host_id,
                    observed_at=event.observed_at,
                ),
                restorable_at=event.observed_at,
                losses=0,
                suspend_failures=0,
                suspend_retry_at=None,
                problem=None,
            )
        case SuspendFailed():
            return replace(
                session,
                suspending=None,
                resume_wanted=False,
                suspend_failures=event.attempt,
                suspend_retry_at=event.retry_at,
                problem=Problem(
                    code=event.code,
                    detail=event.detail,
                    way_out="the machine runs on; suspend it again, or terminate it",
                    since=event.observed_at,
                ),
            )
        case SuspendWithdrawn():
            idle_s = timedelta(seconds=session.idle_after_s or 0)
            return replace(
                session,
                suspending=None,
                resume_wanted=False,
                active_at=max(session.active_at or event.observed_at, event.retry_at - idle_s),
                suspend_retry_at=event.retry_at,
            )
        case ResumeDeferred():
            return replace(session, resume_wanted=True)
        case ResumeRequested():
            return replace(
                session,
                machine=None,
                stop_deadline_at=None,
                incarnation=event.incarnation,
                starting=Starting(began_at=event.requested_at),
                resume_wanted=False,
            )
        case _ as never:
            assert_never(never)


def _with_end(session: Session, event: EndEvent) -> Session:
    match event:
        case SessionLost():
            machine = session.machine
            if machine is None or machine.vm_id != event.vm_id:
                raise InvariantViolation(f"session {session.session_id}: {event.vm_id} is not its machine")
            return replace(
                session,
                machine=None,
                suspending=None,
                lost=Lost(machine=machine, since=event.lost_since, at=event.observed_at),
                losses=session.losses + 1,
                problem=Problem(
                    code="lost",
                    detail=event.cause,
                    way_out=f"resume it: it goes on from {event.lost_since.isoformat()}",
                    since=event.observed_at,
                ),
            )
        case TerminateRequested():
            return replace(
                session,
                starting=None,
                suspending=None,
                lost=None,
                resume_wanted=False,
                problem=None,
                stop_deadline_at=event.deadline_at,
            )
        case SessionTerminated():
            return replace(session, machine=None, stop_deadline_at=None)
        case SessionFailed():
            return replace(
                session,
                starting=None,
                resume_wanted=False,
                problem=Problem(code=event.code, detail=event.detail, way_out=event.way_out, since=event.observed_at),
            )
        case _ as never:
            assert_never(never)


def _inherited(lineage: Lineage, event: SessionRequested) -> Checkpoint:
    """The checkpoint a fork begins in; none of its own incarnations is in it."""
    return Checkpoint(
        checkpoint_id=lineage.checkpoint_id,
        incarnation=0,
        fingerprint=lineage.fingerprint,
        host_id=lineage.made_on,
        observed_at=event.requested_at,
    )


def _starting(session: Session) -> Starting:
    if session.starting is None:
        raise InvariantViolation(f"session {session.session_id} is not being started")
    return session.starting


def _remembered(session: Session, exec_id: ExecId) -> tuple[ExecId, ...]:
    return (*session.recent_execs, exec_id)[-RECENT_EXECS_MAX:]

"""Decides what reports make happen: only those of the machine the session has now, all others are ignored."""

from typing import Final, assert_never

from torpor_contracts.ids import VmId
from torpor_contracts.session import (
    ExecEnded,
    ExecStarted,
    SessionRecovered,
    SessionResumed,
    SessionStarted,
    SessionTerminated,
)
from torpor_contracts.session_branches import ExecContinued
from torpor_contracts.session_reports import (
    ReportExecEnded,
    ReportExecStarted,
    ReportHostDraining,
    ReportHostLost,
    ReportVmCheckpointed,
    ReportVmCheckpointFailed,
    ReportVmStarted,
    ReportVmStartFailed,
    ReportVmStopped,
    ReportVmSuspended,
    ReportVmSuspendFailed,
)
from torpor_contracts.vm import IN_USE
from torpor_scheduler.domain.session import Exec, Machine, Phase, Session
from torpor_scheduler.domain.session_decisions.branches import settle_checkpointed
from torpor_scheduler.domain.session_decisions.checkpointing import fail_checkpoint, take_checkpoint
from torpor_scheduler.domain.session_decisions.context import Context, Draft
from torpor_scheduler.domain.session_decisions.sleeping import (
    fail_suspend,
    lose,
    request_suspend,
    settle_suspended,
    withdraw_suspend,
)
from torpor_scheduler.domain.session_decisions.waking import end_exec, fail_start, request_resume

CheckpointReport = ReportVmCheckpointed | ReportVmCheckpointFailed
MachineReport = (
    ReportVmStarted
    | ReportVmStartFailed
    | ReportVmSuspended
    | ReportVmSuspendFailed
    | ReportVmStopped
    | CheckpointReport
)
ExecReport = ReportExecStarted | ReportExecEnded
HostReport = ReportHostLost | ReportHostDraining

MAY_HAVE_RUN: Final = (Phase.RUNNING, Phase.SUSPENDING, Phase.SUSPENDED, Phase.RESUMING)
"""Phases of a session that had a machine running, so that a program may have been started in it."""


def decide_machine_report(draft: Draft, report: MachineReport, context: Context) -> None:
    """What a host observed of a machine."""
    session = draft.session
    lost = session.lost
    if session.phase is Phase.LOST and lost is not None and _is(lost.machine, report.vm_id, report.incarnation):
        _of_lost(draft, report, lost.machine, context)
        return
    machine = session.machine
    if machine is None or not _is(machine, report.vm_id, report.incarnation):
        return
    if isinstance(report, CheckpointReport):
        _of_checkpoint(draft, report, machine, context)
        return
    match report:
        case ReportVmStarted():
            _started(draft, report, machine, context)
        case ReportVmStartFailed():
            _start_failed(draft, report, context)
        case ReportVmSuspended():
            _suspended(draft, report, machine, context)
        case ReportVmSuspendFailed():
            _suspend_failed(draft, report, context)
        case ReportVmStopped():
            _stopped(draft, report, context)
        case _ as never:
            assert_never(never)


def decide_exec_report(draft: Draft, report: ExecReport, context: Context) -> None:
    """What a host observed of a program."""
    session = draft.session
    program = next((program for program in session.execs if program.exec_id == report.exec_id), None)
    if program is None or report.incarnation > session.incarnation_used or session.phase not in MAY_HAVE_RUN:
        return
    match report:
        case ReportExecStarted():
            if program.started_at is None:
                _exec_started(draft, report, program, context)
        case ReportExecEnded():
            current = session.machine is not None and _is(session.machine, report.vm_id, report.incarnation)
            # A machine that was gone when the program came says `failed`; the program still waits for the next one.
            if current or program.started_at is not None or report.outcome != "failed":
                draft.record(
                    ExecEnded(
                        exec_id=report.exec_id,
                        incarnation=report.incarnation,
                        outcome=report.outcome,
                        exit_code=report.exit_code,
                        detail=report.detail,
                        output_bytes=report.output_bytes,
                        observed_at=context.past(report.observed_at),
                    )
                )
        case _ as never:
            assert_never(never)


def decide_host_report(draft: Draft, report: HostReport, context: Context) -> None:
    """What became of the host of the session's machine."""
    session = draft.session
    machine = session.machine
    if machine is None or machine.host_id != report.host_id or machine.incarnation != report.incarnation:
        return
    match report:
        case ReportHostLost():
            if session.phase in (Phase.STARTING, Phase.RESUMING):
                fail_start(draft, context, "host-lost", f"host {report.host_id} was lost", retryable=True)
            elif session.phase is Phase.TERMINATING:
                _terminated(draft, context, "host-lost")
            elif session.phase is Phase.ROLLING_BACK:
                request_resume(draft, context, "rollback")
            else:
                lose(draft, context, f"host {report.host_id} was lost", context.now)
        case ReportHostDraining():
            waiting = session.suspend_retry_at is not None and context.now < session.suspend_retry_at
            given_up = session.suspend_failures > 0 and session.suspend_retry_at is None
            busy = waiting or given_up or session.checkpointing is not None
            if session.phase is Phase.RUNNING and not busy:
                request_suspend(draft, context, "drain")
        case _ as never:
            assert_never(never)


def _of_lost(draft: Draft, report: MachineReport, machine: Machine, context: Context) -> None:
    """Of a machine given up: it may be seen alive, or its checkpoint may have been made before."""
    lost = draft.session.lost
    match report:
        # Older reports may be repeated at any time; only one of a moment after the loss speaks against it.
        case ReportVmStarted() if lost is not None and report.observed_at > lost.at:
            draft.record(
                SessionRecovered(
                    vm_id=machine.vm_id,
                    host_id=machine.host_id,
                    incarnation=machine.incarnation,
                    observed_at=context.past(report.observed_at),
                )
            )
        case ReportVmSuspended():
            settle_suspended(draft, context, machine, report)
        case ReportVmCheckpointed():
            take_checkpoint(draft, context, machine, report)
        case _:
            pass


def _started(draft: Draft, report: ReportVmStarted, machine: Machine, context: Context) -> None:
    observed_at = context.past(report.observed_at)
    if draft.session.phase is Phase.STARTING:
        draft.record(
            SessionStarted(
                vm_id=machine.vm_id,
                host_id=machine.host_id,
                incarnation=machine.incarnation,
                observed_at=observed_at,
            )
        )
    elif draft.session.phase is Phase.RESUMING:
        lost = draft.session.lost
        draft.record(
            SessionResumed(
                vm_id=machine.vm_id,
                host_id=machine.host_id,
                incarnation=machine.incarnation,
                checkpoint_id=machine.checkpoint_id,
                lost_since=None if lost is None else lost.since,
                observed_at=observed_at,
            )
        )
    else:
        return
    for program in report.execs:
        if all(program.exec_id != other.exec_id for other in draft.session.execs):
            draft.record(
                ExecContinued(
                    exec_id=program.exec_id,
                    incarnation=machine.incarnation,
                    timeout_s=program.remaining_s,
                    observed_at=observed_at,
                )
            )


def _start_failed(draft: Draft, report: ReportVmStartFailed, context: Context) -> None:
    if draft.session.phase in (Phase.STARTING, Phase.RESUMING):
        fail_start(draft, context, report.code, report.detail, retryable=report.retryable)
    elif draft.session.phase is Phase.TERMINATING:
        _terminated(draft, context, "never-started")


def _suspended(draft: Draft, report: ReportVmSuspended, machine: Machine, context: Context) -> None:
    """Also when the time for it was over, and the session was called running again: the machine is gone."""
    if draft.session.phase in (Phase.RUNNING, Phase.SUSPENDING):
        settle_suspended(draft, context, machine, report)
    elif draft.session.phase is Phase.TERMINATING:
        _terminated(draft, context, "suspended")
    elif draft.session.phase is Phase.ROLLING_BACK:
        request_resume(draft, context, "rollback")


def _suspend_failed(draft: Draft, report: ReportVmSuspendFailed, context: Context) -> None:
    suspending = draft.session.suspending
    if suspending is None or suspending.checkpoint_id != report.checkpoint_id:
        return
    if report.code == IN_USE and suspending.cause == "idle":
        withdraw_suspend(draft, context, report.detail)
    else:
        fail_suspend(draft, context, report.code, report.detail)


def _of_checkpoint(draft: Draft, report: CheckpointReport, machine: Machine, context: Context) -> None:
    """A failure counts only for the try that is waited for: one that is over, or not yet begun, does not fail by it."""
    pending = draft.session.checkpointing
    match report:
        case ReportVmCheckpointed():
            if draft.session.phase in (Phase.RUNNING, Phase.SUSPENDING):
                settle_checkpointed(draft, context, machine, report)
        case ReportVmCheckpointFailed():
            if pending is not None and pending.retry_at is None and pending.checkpoint_id == report.checkpoint_id:
                fail_checkpoint(draft, context, report.code, report.detail, retryable=report.retryable)
        case _ as never:
            assert_never(never)


def _stopped(draft: Draft, report: ReportVmStopped, context: Context) -> None:
    phase = draft.session.phase
    if phase is Phase.TERMINATING:
        _terminated(draft, context, "stopped")
    elif phase is Phase.ROLLING_BACK:
        request_resume(draft, context, "rollback")
    elif phase in (Phase.STARTING, Phase.RESUMING):
        fail_start(draft, context, "vm-stopped", report.cause, retryable=True)
    else:
        lose(draft, context, report.cause, report.observed_at)


def _exec_started(draft: Draft, report: ReportExecStarted, program: Exec, context: Context) -> None:
    draft.record(
        ExecStarted(
            exec_id=program.exec_id,
            incarnation=report.incarnation,
            observed_at=context.past(report.observed_at),
        )
    )
    if not _goes_on(draft.session, report.vm_id, report.incarnation):
        gone = next(other for other in draft.session.execs if other.exec_id == program.exec_id)
        end_exec(draft, context, gone, "lost", "its machine is gone")


def _goes_on(session: Session, vm_id: VmId, incarnation: int) -> bool:
    """Whether what that machine started is in the present one, or in the newest checkpoint."""
    if session.machine is not None and _is(session.machine, vm_id, incarnation):
        return True
    newest = session.checkpoint
    return newest is not None and newest.incarnation == incarnation and not newest.partial


def _terminated(draft: Draft, context: Context, cause: str) -> None:
    draft.record(SessionTerminated(incarnation=draft.session.incarnation, cause=cause, observed_at=context.now))


def _is(machine: Machine, vm_id: VmId, incarnation: int) -> bool:
    return machine.vm_id == vm_id and machine.incarnation == incarnation

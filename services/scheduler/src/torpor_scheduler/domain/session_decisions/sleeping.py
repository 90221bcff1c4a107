"""Suspends a session, and deals with a suspend that ended one way or the other, or with a machine that is gone."""

from datetime import datetime
from typing import Literal

from torpor_contracts.errors import InvariantViolation
from torpor_contracts.session import (
    SessionLost,
    SessionSuspended,
    SuspendFailed,
    SuspendRequested,
    SuspendWithdrawn,
)
from torpor_contracts.session_reports import ReportVmSuspended
from torpor_scheduler.domain.session import Machine, started, unstarted
from torpor_scheduler.domain.session_decisions.checkpointing import drop_checkpoint
from torpor_scheduler.domain.session_decisions.context import Context, Draft, pause_s
from torpor_scheduler.domain.session_decisions.waking import end_exec, request_resume, wake_for_what_waits


def request_suspend(draft: Draft, context: Context, cause: Literal["client", "idle", "drain"]) -> None:
    """Ask the host for a checkpoint; programs that run go on after the resume, in the machine restored from it."""
    session = draft.session
    machine = session.machine
    if machine is None:
        raise InvariantViolation(f"session {session.session_id} has no machine to suspend")
    draft.record(
        SuspendRequested(
            session_id=session.session_id,
            host_id=machine.host_id,
            vm_id=machine.vm_id,
            incarnation=machine.incarnation,
            checkpoint_id=context.checkpoint_id,
            parent_id=machine.parent_id,
            cause=cause,
            requested_at=context.now,
            deadline_at=context.after(context.rules.suspend_timeout_s),
        )
    )


def settle_suspended(draft: Draft, context: Context, machine: Machine, report: ReportVmSuspended) -> None:
    """The machine is checkpointed and gone; wake the session again if something waits for it."""
    drop_checkpoint(draft, context, "suspended", "the session was suspended first")
    suspending = draft.session.suspending
    draft.record(
        SessionSuspended(
            incarnation=machine.incarnation,
            host_id=machine.host_id,
            checkpoint_id=report.checkpoint_id,
            fingerprint=report.fingerprint or machine.fingerprint,
            observed_at=context.past(report.observed_at),
        )
    )
    if suspending is not None and suspending.cause == "drain" and started(draft.session):
        request_resume(draft, context, "drain")
    else:
        wake_for_what_waits(draft, context)


def fail_suspend(draft: Draft, context: Context, code: str, detail: str) -> None:
    """The machine runs on; how soon idleness tries again is on record, and also that it stops trying."""
    suspending, rule = draft.session.suspending, context.rules.suspend_retry
    if suspending is None:
        raise InvariantViolation(f"session {draft.session.session_id} is not being suspended")
    attempt = draft.session.suspend_failures + 1
    again = attempt < rule.attempts_max
    draft.record(
        SuspendFailed(
            incarnation=draft.session.incarnation,
            checkpoint_id=suspending.checkpoint_id,
            attempt=attempt,
            code=code,
            detail=detail,
            observed_at=context.now,
            retry_at=context.after(pause_s(rule.backoff_s, rule.backoff_s_max, attempt)) if again else None,
        )
    )


def withdraw_suspend(draft: Draft, context: Context, detail: str) -> None:
    """The machine was not idle: it runs on, and its time begins anew; no failure, so nothing is counted."""
    session = draft.session
    if session.suspending is None:
        raise InvariantViolation(f"session {session.session_id} is not being suspended")
    again_s = max(session.idle_after_s or 0.0, context.rules.idle_again_s_min)
    draft.record(
        SuspendWithdrawn(
            incarnation=session.incarnation,
            checkpoint_id=session.suspending.checkpoint_id,
            detail=detail,
            observed_at=context.now,
            retry_at=context.after(again_s),
        )
    )


def lose(draft: Draft, context: Context, cause: str, at: datetime) -> None:
    """The machine is gone with what it did since the last checkpoint.

    Programs that it had started are lost. Others still wait, so the session is woken for them; but not for ever:
    machines lost in a row without a program started count as tries of the session's own rule.
    """
    machine = draft.session.machine
    if machine is None or machine.started_at is None:
        raise InvariantViolation(f"session {draft.session.session_id} has no machine that ran")
    drop_checkpoint(draft, context, "session-lost", f"its machine is gone: {cause}")
    draft.record(
        SessionLost(
            incarnation=machine.incarnation,
            host_id=machine.host_id,
            vm_id=machine.vm_id,
            cause=cause,
            lost_since=draft.session.restorable_at or machine.started_at,
            observed_at=context.past(at),
        )
    )
    for program in started(draft.session):
        end_exec(draft, context, program, "lost", f"its machine is gone: {cause}")
    if draft.session.losses < draft.session.start_retry.attempts_max:
        wake_for_what_waits(draft, context)
        return
    for program in unstarted(draft.session):
        end_exec(draft, context, program, "failed", f"{draft.session.losses} machines were lost before it: {cause}")

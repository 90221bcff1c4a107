"""Gets a machine for a session: places it, asks for its start, tries again within the rule on record, gives up."""

from typing import Literal

from torpor_contracts.errors import InvariantViolation
from torpor_contracts.session import (
    ExecEnded,
    PlacementDeferred,
    ResumeRequested,
    SessionFailed,
    SessionStartFailed,
    VmStartRequested,
)
from torpor_scheduler.domain.placement import Need, choose, why_none
from torpor_scheduler.domain.session import Exec, Machine, Session, Starting, next_incarnation, started, unstarted
from torpor_scheduler.domain.session_decisions.context import Context, Draft, pause_s


def request_resume(draft: Draft, context: Context, cause: Literal["client", "work", "drain", "rollback"]) -> None:
    """Wake the session from its newest checkpoint (or the one it goes back to), or from its image if it has none."""
    checkpoint = draft.session.checkpoint
    draft.record(
        ResumeRequested(
            incarnation=next_incarnation(draft.session),
            checkpoint_id=None if checkpoint is None else checkpoint.checkpoint_id,
            cause=cause,
            requested_at=context.now,
        )
    )
    place(draft, context)


def place(draft: Draft, context: Context) -> None:
    """Ask a host that fits for the machine; or look again later; or give up when the time for that is over."""
    session = draft.session
    need = _need(session)
    offer = choose(context.offers, need)
    if offer is not None:
        draft.record(
            VmStartRequested(
                session_id=session.session_id,
                host_id=offer.host_id,
                vm_id=context.vm_id,
                incarnation=next_incarnation(session),
                attempt=_starting(session).attempt + 1,
                machine=session.spec,
                checkpoint_id=None if session.checkpoint is None else session.checkpoint.checkpoint_id,
                fingerprint=offer.fingerprint,
                requested_at=context.now,
                deadline_at=context.after(context.rules.start_timeout_s),
            )
        )
        return
    starting, rule = _starting(session), session.start_retry
    over_s = (context.now - starting.began_at).total_seconds() - rule.deadline_s
    if over_s >= 0:
        give_up(draft, context, "not-placed", why_none(context.offers, need))
        return
    attempt = starting.deferrals + 1
    longest_s = max(context.rules.placement_backoff_s_max, rule.backoff_s)
    draft.record(
        PlacementDeferred(
            incarnation=next_incarnation(session),
            attempt=attempt,
            reason=why_none(context.offers, need),
            deferred_at=context.now,
            retry_at=context.after(min(pause_s(rule.backoff_s, longest_s, attempt), -over_s)),
            give_up_at=context.after(-over_s),
        )
    )


def fail_start(draft: Draft, context: Context, code: str, detail: str, *, retryable: bool) -> None:
    """The machine asked for did not come: try another within the rule, else the session fails."""
    session = draft.session
    machine, starting, rule = _machine(session), _starting(session), session.start_retry
    pause = pause_s(rule.backoff_s, rule.backoff_s_max, starting.attempt)
    in_time = (context.now - starting.began_at).total_seconds() + pause <= rule.deadline_s
    again = retryable and in_time and starting.attempt < rule.attempts_max
    draft.record(
        SessionStartFailed(
            vm_id=machine.vm_id,
            host_id=machine.host_id,
            incarnation=machine.incarnation,
            attempt=starting.attempt,
            code=code,
            detail=detail,
            observed_at=context.now,
            retry_at=context.after(pause) if again else None,
        )
    )
    if not again:
        give_up(draft, context, code, detail)


def give_up(draft: Draft, context: Context, code: str, detail: str) -> None:
    """The session cannot be started: its programs will not run, and its owner is told the way out."""
    for program in started(draft.session):
        end_exec(draft, context, program, "lost", f"the session failed: {code}")
    for program in unstarted(draft.session):
        end_exec(draft, context, program, "failed", f"the session failed: {code}: {detail}")
    resumable = draft.session.checkpoint is not None
    draft.record(
        SessionFailed(
            incarnation=draft.session.incarnation,
            code=code,
            detail=detail,
            way_out="resume it: its checkpoint is kept; or terminate it"
            if resumable
            else "terminate it, and create another once the cause is removed",
            observed_at=context.now,
        )
    )


def end_exec(
    draft: Draft, context: Context, program: Exec, outcome: Literal["failed", "lost", "cancelled"], detail: str
) -> None:
    """Let a program end without anybody having seen it end."""
    draft.record(
        ExecEnded(
            exec_id=program.exec_id,
            incarnation=program.started_incarnation or draft.session.incarnation,
            outcome=outcome,
            exit_code=None,
            detail=detail,
            output_bytes=0,
            observed_at=context.now,
        )
    )


def wake_for_what_waits(draft: Draft, context: Context) -> None:
    """Resume a session without a machine when a client or a program waits for it."""
    if draft.session.resume_wanted:
        request_resume(draft, context, "client")
    elif unstarted(draft.session):
        request_resume(draft, context, "work")


def _need(session: Session) -> Need:
    checkpoint = session.checkpoint
    if checkpoint is None:
        return Need(spec=session.spec)
    return Need(spec=session.spec, fingerprint=checkpoint.fingerprint, near=checkpoint.host_id)


def _starting(session: Session) -> Starting:
    if session.starting is None:
        raise InvariantViolation(f"session {session.session_id} is not being started")
    return session.starting


def _machine(session: Session) -> Machine:
    if session.machine is None:
        raise InvariantViolation(f"session {session.session_id} has no machine")
    return session.machine

"""Decides what a timer makes happen; one that the session no longer has, or that is not due, does nothing."""

from typing import assert_never

from torpor_contracts.session import SessionTerminated
from torpor_contracts.session_reports import FireSessionTimer
from torpor_scheduler.domain.session import Phase
from torpor_scheduler.domain.session_decisions.checkpointing import fail_checkpoint, request_again
from torpor_scheduler.domain.session_decisions.context import Context, Draft
from torpor_scheduler.domain.session_decisions.sleeping import fail_suspend, request_suspend
from torpor_scheduler.domain.session_decisions.waking import end_exec, fail_start, place, request_resume
from torpor_scheduler.domain.timers import overdue_execs, timer_of


def decide_timer(draft: Draft, command: FireSessionTimer, context: Context) -> None:
    """Look again at what the timer was set for, under its generation: what came in between is not undone."""
    session = draft.session
    timer = timer_of(session)
    if timer is None or command.kind != timer.kind or context.now < timer.due_at:
        return
    if command.generation != timer.generation or command.incarnation != session.incarnation:
        return
    match command.kind:
        case "placement":
            place(draft, context)
        case "start":
            fail_start(draft, context, "start-timed-out", "the host did not report in time", retryable=True)
        case "suspend":
            fail_suspend(draft, context, "suspend-timed-out", "the host did not report in time")
        case "stop":
            _go_on_unconfirmed(draft, context)
        case "idle":
            request_suspend(draft, context, "idle")
        case "exec":
            _end_overdue(draft, context)
        case "checkpoint":
            _see_to_checkpoint(draft, context)
        case _ as never:
            assert_never(never)


def _go_on_unconfirmed(draft: Draft, context: Context) -> None:
    """The machine may be there still: it is of an incarnation that is over, and is stopped when it is seen."""
    if draft.session.phase is Phase.ROLLING_BACK:
        request_resume(draft, context, "rollback")
        return
    draft.record(
        SessionTerminated(incarnation=draft.session.incarnation, cause="stop-unconfirmed", observed_at=context.now)
    )


def _see_to_checkpoint(draft: Draft, context: Context) -> None:
    pending = draft.session.checkpointing
    if pending is not None and pending.retry_at is not None:
        request_again(draft, context)
    else:
        fail_checkpoint(draft, context, "checkpoint-timed-out", "the host did not report in time", retryable=True)


def _end_overdue(draft: Draft, context: Context) -> None:
    for program in overdue_execs(draft.session, context.now):
        if program.started_at is None:
            end_exec(draft, context, program, "failed", "the host did not start it in time")
        else:
            end_exec(draft, context, program, "lost", "its end was not reported in time")

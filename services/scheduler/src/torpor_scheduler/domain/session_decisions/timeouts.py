"""Decides what a timer makes happen; one that the session no longer has, or that is not due, does nothing."""

from typing import assert_never

from torpor_contracts.session import SessionTerminated
from torpor_contracts.session_reports import FireSessionTimer
from torpor_scheduler.domain.session_decisions.context import Context, Draft
from torpor_scheduler.domain.session_decisions.sleeping import fail_suspend, request_suspend
from torpor_scheduler.domain.session_decisions.waking import end_exec, fail_start, place
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
            draft.record(
                SessionTerminated(incarnation=session.incarnation, cause="stop-unconfirmed", observed_at=context.now)
            )
        case "idle":
            request_suspend(draft, context, "idle")
        case "exec":
            _end_overdue(draft, context)
        case _ as never:
            assert_never(never)


def _end_overdue(draft: Draft, context: Context) -> None:
    for program in overdue_execs(draft.session, context.now):
        if program.started_at is None:
            end_exec(draft, context, program, "failed", "the host did not start it in time")
        else:
            end_exec(draft, context, program, "lost", "its end was not reported in time")

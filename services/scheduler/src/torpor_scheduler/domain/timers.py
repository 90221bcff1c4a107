"""The timer of a session: a pure function of its state, so timers that are lost can always be made again."""

from datetime import datetime, timedelta
from typing import Final

import msgspec

from torpor_contracts.session_reports import TimerKind
from torpor_scheduler.domain.session import Exec, Phase, Session

REPORT_GRACE_S: Final = 2.0
"""How long after a host's deadline its report may still be on its way."""

EXEC_START_S: Final = 120.0
"""How long a running machine may take to say that a program was started."""

EXEC_END_GRACE_S: Final = 60.0
"""How long after a program's own time-out its end may be reported."""


class Timer(msgspec.Struct, frozen=True, kw_only=True):
    """A session has one at most. `generation` is the stream version of the event that set it."""

    kind: TimerKind
    due_at: datetime
    generation: int


def timer_of(session: Session) -> Timer | None:
    """The timer that `session` has now."""
    match session.phase:
        case Phase.PLACING | Phase.STARTING | Phase.RESUMING:
            return _start_timer(session)
        case Phase.RUNNING:
            return _running_timer(session)
        case Phase.SUSPENDING if session.suspending is not None:
            return _step_timer(session, "suspend", _after(session.suspending.deadline_at, REPORT_GRACE_S))
        case Phase.TERMINATING | Phase.ROLLING_BACK if session.stop_deadline_at is not None:
            return _step_timer(session, "stop", _after(session.stop_deadline_at, REPORT_GRACE_S))
        case _:
            return None


def idle_at(session: Session) -> datetime | None:
    """When idleness will suspend the session; None while there is work, or when nothing will."""
    if session.phase is not Phase.RUNNING or session.idle_after_s is None or session.execs:
        return None
    if session.checkpointing is not None:
        return None
    if session.active_at is None or (session.suspend_failures and session.suspend_retry_at is None):
        return None
    due_at = _after(session.active_at, session.idle_after_s)
    return max(due_at, session.suspend_retry_at or due_at)


def overdue_execs(session: Session, now: datetime) -> tuple[Exec, ...]:
    """The programs whose start or end should have been reported by now."""
    return tuple(program for program in session.execs if _exec_due_at(session, program) <= now)


def _start_timer(session: Session) -> Timer | None:
    if session.machine is not None:
        return _step_timer(session, "start", _after(session.machine.deadline_at, REPORT_GRACE_S))
    if session.starting is not None and session.starting.retry_at is not None:
        return _step_timer(session, "placement", session.starting.retry_at)
    return None


def _running_timer(session: Session) -> Timer | None:
    due: list[tuple[datetime, TimerKind]] = []
    if session.execs:
        due.append((min(_exec_due_at(session, program) for program in session.execs), "exec"))
    if session.checkpointing is not None:
        pending = session.checkpointing
        due.append((pending.retry_at or _after(pending.deadline_at, REPORT_GRACE_S), "checkpoint"))
    idle = idle_at(session)
    if idle is not None:
        due.append((idle, "idle"))
    first = min(due, default=None)
    return None if first is None else Timer(kind=first[1], due_at=first[0], generation=session.version)


def _step_timer(session: Session, kind: TimerKind, due_at: datetime) -> Timer:
    return Timer(kind=kind, due_at=due_at, generation=session.step_version)


def _exec_due_at(session: Session, program: Exec) -> datetime:
    """Counted from when the present machine has it: time spent suspended is not the program's."""
    since = program.started_at or program.requested_at
    if session.machine is not None and session.machine.started_at is not None:
        since = max(since, session.machine.started_at)
    return _after(since, EXEC_START_S if program.started_at is None else program.timeout_s + EXEC_END_GRACE_S)


def _after(moment: datetime, seconds: float) -> datetime:
    return moment + timedelta(seconds=seconds)

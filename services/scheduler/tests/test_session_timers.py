"""Timers: due ones make things happen, stale or early ones do not; a session has one at most."""

from tests.support.sessions import Story, program, running, starting, suspended, suspending
from torpor_contracts.session import (
    CreateSession,
    ExecEnded,
    ExecRequested,
    SuspendFailed,
    SuspendRequested,
    SuspendSession,
    TerminateSession,
)
from torpor_contracts.session_reports import FireSessionTimer
from torpor_scheduler.domain.session import Phase
from torpor_scheduler.domain.timers import EXEC_END_GRACE_S, EXEC_START_S, REPORT_GRACE_S, idle_at, timer_of

IDLE = CreateSession(idle_after_s=30.0)


def kind_of(story: Story) -> str | None:
    timer = timer_of(story.session)
    return timer.kind if timer else None


def test_idleness_suspends() -> None:
    story = running(IDLE).timer_comes().then(SuspendRequested)
    assert story.last[0].cause == "idle"
    assert (story.now - story.all[2].observed_at).total_seconds() == 30.0


def test_idleness_counts_from_the_end_of_the_last_program() -> None:
    story = running(IDLE).passes(20).when(program())
    story.passes(100).when(story.exec_ended("e-1"))
    assert idle_at(story.session) is not None
    story.passes(29).nothing_happens(story.timer())
    story.passes(1).when(story.timer()).then(SuspendRequested)


def test_work_that_lands_between_the_timer_and_its_firing_counts() -> None:
    story = running(IDLE).passes(30)
    due = story.timer()
    story.when(program()).then(ExecRequested)
    story.nothing_happens(due)
    story.when(story.exec_ended("e-1"))
    story.nothing_happens(due)
    assert story.session.phase is Phase.RUNNING


def test_a_timer_of_an_earlier_incarnation_is_stale() -> None:
    story = running(IDLE)
    old = story.timer()
    story.when(SuspendSession()).when(story.suspended()).when(program())
    story.when(story.started()).when(story.exec_ended("e-1")).passes(1_000)
    story.nothing_happens(old)
    story.when(story.timer()).then(SuspendRequested)


def test_a_timer_that_comes_early_is_ignored() -> None:
    story = running(IDLE).passes(29.999)
    story.nothing_happens(story.timer())


def test_a_timer_of_another_kind_is_ignored() -> None:
    story = running(IDLE).passes(100)
    timer = story.timer()
    forged = FireSessionTimer(kind="stop", incarnation=timer.incarnation, generation=timer.generation)
    story.nothing_happens(forged)


def test_a_failed_idle_suspend_is_tried_again_later_and_not_for_ever() -> None:
    story = running(IDLE)
    pauses = []
    while timer_of(story.session) is not None:
        story.timer_comes().then(SuspendRequested)
        story.when(story.suspend_failed()).then(SuspendFailed)
        retry_at = story.last[0].retry_at
        pauses.append(None if retry_at is None else (retry_at - story.now).total_seconds())
    assert pauses == [30.0, 60.0, 120.0, 240.0, 480.0, 900.0, 900.0, None]
    assert story.session.problem is not None


def test_work_lets_idleness_try_again() -> None:
    story = running(IDLE)
    while timer_of(story.session) is not None:
        story.timer_comes().when(story.suspend_failed())
    story.when(program()).when(story.exec_ended("e-1"))
    story.timer_comes().then(SuspendRequested)


def test_a_program_that_nobody_starts_ends_in_time() -> None:
    story = running(IDLE).when(program())
    asked_at = story.now
    story.timer_comes().then(ExecEnded)
    assert story.last[0].outcome == "failed"
    assert (story.now - asked_at).total_seconds() == EXEC_START_S
    assert kind_of(story) == "idle"


def test_a_program_whose_end_nobody_reports_is_lost_in_time() -> None:
    story = running(IDLE).when(program("e-1", timeout_s=10.0)).when(program("e-2", timeout_s=500.0))
    story.when(story.exec_started("e-1")).when(story.exec_started("e-2"))
    began_at = story.now
    story.timer_comes().then(ExecEnded)
    assert (story.last[0].exec_id, story.last[0].outcome) == ("e-1", "lost")
    assert (story.now - began_at).total_seconds() == 10.0 + EXEC_END_GRACE_S
    assert kind_of(story) == "exec"


def test_the_time_of_a_program_does_not_run_while_it_sleeps() -> None:
    story = running(IDLE).when(program("e-1", timeout_s=10.0))
    story.when(story.exec_started("e-1")).when(SuspendSession()).when(story.suspended())
    story.passes(100_000).when(program("e-2"))
    story.when(story.started()).when(story.exec_started("e-2"))
    story.passes(9).nothing_happens(story.timer())


def test_every_phase_that_waits_for_a_host_has_an_end() -> None:
    for story, kind, deadline in (
        (starting(), "start", starting().machine.deadline_at),
        (suspending(), "suspend", suspending().session.suspending.deadline_at),  # type: ignore[union-attr]
        (running().when(TerminateSession()), "stop", running().when(TerminateSession()).session.stop_deadline_at),
    ):
        timer = timer_of(story.session)
        assert timer is not None
        assert deadline is not None
        assert (timer.kind, (timer.due_at - deadline).total_seconds()) == (kind, REPORT_GRACE_S)


def test_a_sleeping_session_has_no_timer() -> None:
    assert timer_of(suspended().session) is None

"""ExecSession and the reports of programs: happens / refused / ignored, asleep and awake."""

import pytest

from tests.support.sessions import (
    Story,
    failed,
    lost,
    placing,
    program,
    running,
    starting,
    suspended,
    suspending,
)
from torpor_contracts.ids import ExecId, TenantId
from torpor_contracts.session import (
    CreateSession,
    ExecEnded,
    ExecRequested,
    ExecSession,
    ExecSpec,
    ExecStarted,
    PlacementDeferred,
    ResumeRequested,
    SessionFailed,
    SessionLost,
    SessionStarted,
    SessionStartFailed,
    SessionSuspended,
    SuspendSession,
    TerminateSession,
    VmStartRequested,
)
from torpor_contracts.session_reports import ReportExecStarted
from torpor_scheduler.domain.folding import RECENT_EXECS_MAX
from torpor_scheduler.domain.session import Phase, started, unstarted
from torpor_scheduler.domain.session_decisions import HistoryNeeded


def test_happens_in_a_running_session() -> None:
    story = running().when(program("e-1", "make", "test")).then(ExecRequested)
    assert story.last[0].program.argv == ["make", "test"]
    assert [one.exec_id for one in unstarted(story.session)] == ["e-1"]


@pytest.mark.parametrize("story", [starting, placing])
def test_happens_before_the_session_runs_and_waits(story: type[Story]) -> None:
    story().when(program()).then(ExecRequested)


def test_wakes_a_suspended_session() -> None:
    story = suspended().when(program()).then(ExecRequested, ResumeRequested, VmStartRequested)
    resume, start = story.last[1:]
    assert resume.cause == "work"
    assert resume.incarnation == start.incarnation == 2
    assert resume.checkpoint_id == start.checkpoint_id == story.session.checkpoint.checkpoint_id  # type: ignore[union-attr]


def test_wakes_a_suspended_session_also_when_no_host_has_room_yet() -> None:
    story = suspended()
    story.hosts = ()
    story.when(program()).then(ExecRequested, ResumeRequested, PlacementDeferred)
    assert story.session.phase is Phase.RESUMING


def test_wakes_a_lost_session() -> None:
    lost().when(program()).then(ExecRequested, ResumeRequested, VmStartRequested)


def test_asked_for_while_suspending_resumes_as_soon_as_that_is_done() -> None:
    story = suspending().when(program()).then(ExecRequested)
    assert story.session.phase is Phase.SUSPENDING
    story.when(story.suspended()).then(SessionSuspended, ResumeRequested, VmStartRequested)
    assert story.last[1].cause == "work"


def test_a_program_that_ran_when_the_session_was_suspended_does_not_wake_it() -> None:
    story = running().when(program())
    story.when(story.exec_started("e-1")).when(SuspendSession())
    story.when(story.suspended()).then(SessionSuspended)
    assert [one.exec_id for one in started(story.session)] == ["e-1"]


def test_a_program_goes_on_in_the_machine_restored_from_the_checkpoint() -> None:
    story = running().when(program())
    story.when(story.exec_started("e-1")).when(SuspendSession())
    story.when(story.suspended()).when(program("e-2"))
    story.when(story.started())
    assert [one.exec_id for one in unstarted(story.session)] == ["e-2"]
    story.when(story.exec_ended("e-1", exit_code=3)).then(ExecEnded)
    assert (story.last[0].exit_code, story.last[0].incarnation) == (3, 2)


def test_refused_for_a_session_nobody_asked_for() -> None:
    Story().refused(program(), "session-not-found")


def test_refused_for_a_foreign_session_as_if_it_were_not_there() -> None:
    running().refused(program(), "session-not-found", tenant=TenantId("rival"))


def test_refused_once_the_session_is_over() -> None:
    story = running().when(TerminateSession())
    story.refused(program(), "session-terminating")
    story.when(story.stopped(expected=True)).refused(program(), "session-terminated")


def test_refused_by_a_failed_session_with_its_reason_and_way_out() -> None:
    refusal = failed().refused(program(), "session-failed")
    assert "image-unknown" in refusal.message
    assert "create another" in refusal.advice


def test_refused_for_an_incarnation_that_is_over() -> None:
    story = suspended().when(program("e-1"))
    story.when(story.started())
    story.refused(program("e-2", incarnation=1), "stale-incarnation")
    story.when(program("e-2", incarnation=2)).then(ExecRequested)


def test_refused_for_an_exec_id_that_was_used() -> None:
    story = running().when(program("e-1"))
    story.refused(program("e-1"), "exec-exists")
    story.when(story.exec_started("e-1")).when(story.exec_ended("e-1"))
    story.refused(program("e-1"), "exec-exists")


def test_refused_for_an_exec_id_that_only_the_view_remembers() -> None:
    story = running()
    for number in range(RECENT_EXECS_MAX + 1):
        story.when(program(f"e-{number}")).when(story.exec_ended(f"e-{number}"))
    story.refused(program("e-0"), "exec-exists", exec_known=True)
    assert len(story.session.recent_execs) == RECENT_EXECS_MAX
    with pytest.raises(HistoryNeeded):
        story.when(program("e-0"), exec_known=None)
    story.when(program("e-new"), exec_known=False).then(ExecRequested)


def test_refused_for_more_than_a_session_may_have_in_flight() -> None:
    story = running()
    for number in range(64):
        story.when(program(f"e-{number}"))
    story.refused(program("e-64"), "too-many-execs")
    story.when(story.exec_ended("e-0")).when(program("e-64")).then(ExecRequested)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (ExecSession(exec_id=ExecId("E 1"), program=ExecSpec(argv=["true"])), "illegal-exec-id"),
        (ExecSession(exec_id=ExecId("e-1"), program=ExecSpec(argv=[])), "illegal-program"),
        (ExecSession(exec_id=ExecId("e-1"), program=ExecSpec(argv=["", "x"])), "illegal-program"),
        (ExecSession(exec_id=ExecId("e-1"), program=ExecSpec(argv=["a\0b"])), "illegal-program"),
        (ExecSession(exec_id=ExecId("e-1"), program=ExecSpec(argv=["env"], env={"": "x"})), "illegal-program"),
        (ExecSession(exec_id=ExecId("e-1"), program=ExecSpec(argv=["env"], env={"A=B": "x"})), "illegal-program"),
        (ExecSession(exec_id=ExecId("e-1"), program=ExecSpec(argv=["true"], timeout_s=0)), "illegal-timeout"),
        (
            ExecSession(exec_id=ExecId("e-1"), program=ExecSpec(argv=["true"], timeout_s=float("nan"))),
            "illegal-timeout",
        ),
        (
            ExecSession(exec_id=ExecId("e-1"), program=ExecSpec(argv=["true"], timeout_s=float("inf"))),
            "illegal-timeout",
        ),
        (ExecSession(exec_id=ExecId("e-1"), program=ExecSpec(argv=["cat"], stdin="x" * 262_144)), "program-too-large"),
    ],
)
def test_refused_for_what_cannot_be_run(command: ExecSession, code: str) -> None:
    running().refused(command, code)


def test_its_start_and_end_are_told_once() -> None:
    story = running().when(program())
    story.when(story.exec_started("e-1")).then(ExecStarted)
    story.nothing_happens(story.exec_started("e-1"))
    story.when(story.exec_ended("e-1")).then(ExecEnded)
    story.nothing_happens(story.exec_ended("e-1"))
    story.nothing_happens(story.exec_started("e-1"))


def test_its_end_is_told_also_when_its_start_was_not() -> None:
    story = running().when(program())
    story.when(story.exec_ended("e-1", exit_code=7)).then(ExecEnded)
    assert story.last[0].exit_code == 7


def test_that_a_machine_gone_could_not_start_it_is_no_end_of_it() -> None:
    story = suspending().when(program())
    gone = story.machine
    story.when(story.suspended()).nothing_happens(story.exec_ended("e-1", gone, failed=True))
    story.when(story.started()).when(story.exec_ended("e-1", failed=True)).then(ExecEnded)


def test_a_report_of_an_incarnation_that_never_was_is_ignored() -> None:
    story = running().when(program())
    forged = ReportExecStarted(
        vm_id=story.machine.vm_id,
        incarnation=9,
        exec_id=ExecId("e-1"),
        observed_at=story.now,
        position=1,
    )
    story.nothing_happens(forged)


def test_started_programs_are_lost_with_the_machine_and_others_run_in_the_next() -> None:
    story = running().when(program("e-1")).when(program("e-2"))
    story.when(story.exec_started("e-1")).when(story.stopped())
    story.then(SessionLost, ExecEnded, ResumeRequested, VmStartRequested)
    assert (story.last[1].exec_id, story.last[1].outcome) == ("e-1", "lost")
    story.when(story.started())
    assert [one.exec_id for one in unstarted(story.session)] == ["e-2"]


def test_that_it_was_started_by_a_machine_since_lost_is_told_late_and_ends_it_as_lost() -> None:
    story = running().when(program())
    gone = story.machine
    story.when(story.host_lost()).then(SessionLost, ResumeRequested, VmStartRequested)
    story.when(story.exec_started("e-1", gone)).then(ExecStarted, ExecEnded)
    assert story.last[1].outcome == "lost"


def test_that_it_was_started_before_the_checkpoint_is_told_late_and_it_goes_on() -> None:
    story = running().when(program()).when(SuspendSession())
    gone = story.machine
    story.when(story.suspended())
    story.when(story.exec_started("e-1", gone)).then(ExecStarted)
    assert [one.exec_id for one in started(story.session)] == ["e-1"]


def test_machines_lost_in_a_row_before_it_starts_end_it_in_a_bounded_number_of_tries() -> None:
    story = running().when(program())
    tries = 0
    while unstarted(story.session):
        if story.machine.started_at is None:
            story.when(story.started())
        story.when(story.stopped())
        tries += 1
        assert tries < 10
    assert tries == story.session.start_retry.attempts_max
    assert story.session.phase is Phase.LOST
    assert (story.last[-1].outcome, story.last[-1].exec_id) == ("failed", "e-1")


def test_it_ends_as_failed_when_the_session_cannot_be_started() -> None:
    story = starting().when(program())
    story.when(story.start_failed(retryable=False)).then(SessionStartFailed, ExecEnded, SessionFailed)
    assert story.last[1].outcome == "failed"


def test_it_waits_through_a_start_that_is_tried_again() -> None:
    story = starting(CreateSession()).when(program())
    story.when(story.start_failed()).then(SessionStartFailed)
    story.timer_comes().then(VmStartRequested).when(story.started()).then(SessionStarted)
    assert [one.exec_id for one in unstarted(story.session)] == ["e-1"]

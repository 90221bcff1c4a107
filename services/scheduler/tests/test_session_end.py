"""TerminateSession, and what hosts report of machines: happens / refused / ignored."""

from collections.abc import Callable

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
from torpor_contracts.ids import TenantId
from torpor_contracts.session import (
    CreateSession,
    ExecEnded,
    ResumeSession,
    RetryRule,
    SessionFailed,
    SessionLost,
    SessionStarted,
    SessionStartFailed,
    SessionTerminated,
    TerminateRequested,
    TerminateSession,
    VmStartRequested,
)
from torpor_scheduler.domain.session import TRANSITIONS, Phase


def resuming() -> Story:
    return suspended().when(ResumeSession())


@pytest.mark.parametrize("story", [starting, running, suspending, resuming])
def test_terminate_asks_for_the_machine_to_be_stopped(story: Callable[[], Story]) -> None:
    one = story()
    machine = one.machine
    one.when(TerminateSession(reason="done")).then(TerminateRequested)
    asked = one.last[0]
    assert (asked.host_id, asked.vm_id, asked.reason) == (machine.host_id, machine.vm_id, "done")
    one.when(one.stopped(machine, expected=True)).then(SessionTerminated)
    assert one.session.phase is Phase.TERMINATED
    assert one.session.machine is None


@pytest.mark.parametrize("story", [placing, suspended, lost, failed])
def test_terminate_is_done_at_once_without_a_machine(story: Callable[[], Story]) -> None:
    one = story().when(TerminateSession()).then(TerminateRequested, SessionTerminated)
    assert one.last[0].vm_id is None


def test_terminate_cancels_what_has_not_ended() -> None:
    story = running().when(program("e-1")).when(program("e-2"))
    story.when(story.exec_started("e-1")).when(TerminateSession())
    story.then(ExecEnded, ExecEnded, TerminateRequested)
    assert [event.outcome for event in story.last[:2]] == ["cancelled", "cancelled"]
    story.nothing_happens(story.exec_ended("e-1"))


def test_terminate_is_refused_when_it_is_under_way_or_done() -> None:
    story = running().when(TerminateSession())
    story.refused(TerminateSession(), "session-terminating")
    story.when(story.stopped(expected=True)).refused(TerminateSession(), "session-terminated")


def test_terminate_is_refused_for_others_and_for_a_book_as_reason() -> None:
    Story().refused(TerminateSession(), "session-not-found")
    running().refused(TerminateSession(), "session-not-found", tenant=TenantId("rival"))
    running().refused(TerminateSession(reason="x" * 1_001), "reason-too-long")


def test_terminate_ends_in_time_when_the_host_says_nothing() -> None:
    story = running().when(TerminateSession()).timer_comes().then(SessionTerminated)
    assert story.last[0].cause == "stop-unconfirmed"


def test_terminate_ends_with_the_host() -> None:
    story = running().when(TerminateSession())
    assert story.when(story.host_lost()).then(SessionTerminated).last[0].cause == "host-lost"


def test_terminate_ends_with_a_suspend_or_a_failed_start_that_came_first() -> None:
    story = suspending().when(TerminateSession())
    assert story.when(story.suspended()).then(SessionTerminated).last[0].cause == "suspended"
    other = starting().when(TerminateSession())
    assert other.when(other.start_failed()).then(SessionTerminated).last[0].cause == "never-started"


def test_nothing_more_happens_to_a_terminated_session() -> None:
    story = running()
    machine = story.machine
    story.when(TerminateSession()).when(story.stopped(expected=True))
    for report in (
        story.started(machine),
        story.suspended(machine),
        story.stopped(machine),
        story.host_lost(machine),
        story.exec_started("e-1", machine),
    ):
        story.nothing_happens(report)
    assert not TRANSITIONS[Phase.TERMINATED]


def test_a_start_is_told_once() -> None:
    story = starting()
    story.when(story.started()).then(SessionStarted)
    story.nothing_happens(story.started())


def test_a_failed_start_is_tried_again_with_another_machine_and_incarnation() -> None:
    story = starting()
    first = story.machine
    story.when(story.start_failed()).then(SessionStartFailed)
    assert (story.last[0].retry_at - story.now).total_seconds() == 1.0
    story.timer_comes().then(VmStartRequested)
    start = story.last[0]
    assert (start.attempt, start.incarnation) == (2, 2)
    assert start.vm_id != first.vm_id
    story.nothing_happens(story.started(first))
    story.when(story.started()).then(SessionStarted)


def test_tries_end_with_the_rule_on_record() -> None:
    rule = RetryRule(attempts_max=4, backoff_s=2.0, backoff_s_max=5.0, deadline_s=600.0)
    story = starting(CreateSession(start_retry=rule))
    pauses = []
    while story.session.phase is not Phase.FAILED:
        story.when(story.start_failed())
        if story.session.phase is Phase.PLACING:
            pauses.append((story.last[0].retry_at - story.now).total_seconds())
            story.timer_comes()
    assert pauses == [2.0, 4.0, 5.0]
    story.then(SessionStartFailed, SessionFailed)
    assert story.last[0].attempt == 4
    assert story.last[0].retry_at is None
    assert story.last[1].way_out


def test_tries_end_with_the_deadline_on_record() -> None:
    rule = RetryRule(attempts_max=10, backoff_s=10.0, backoff_s_max=10.0, deadline_s=25.0)
    story = starting(CreateSession(start_retry=rule))
    story.when(story.start_failed()).timer_comes()
    story.when(story.start_failed()).timer_comes()
    story.when(story.start_failed()).then(SessionStartFailed, SessionFailed)


def test_a_failure_that_another_try_cannot_mend_is_final() -> None:
    story = starting()
    story.when(story.start_failed(retryable=False)).then(SessionStartFailed, SessionFailed)


def test_a_start_without_a_report_fails_in_time() -> None:
    story = starting().timer_comes().then(SessionStartFailed)
    assert story.last[0].code == "start-timed-out"
    assert story.last[0].retry_at is not None


def test_a_host_lost_while_starting_costs_a_try_only() -> None:
    story = starting()
    story.when(story.host_lost()).then(SessionStartFailed)
    assert story.last[0].code == "host-lost"


def test_a_machine_that_stops_while_starting_costs_a_try_only() -> None:
    story = starting()
    assert story.when(story.stopped()).then(SessionStartFailed).last[0].code == "vm-stopped"


def test_a_machine_that_stops_while_it_runs_or_is_suspended_is_lost() -> None:
    for story in (running(), suspending()):
        story.when(story.stopped()).then(SessionLost)
        assert story.session.problem is not None
        assert "resume it" in story.session.problem.way_out


def test_reports_that_make_no_sense_now_are_ignored() -> None:
    story = running()
    story.nothing_happens(story.start_failed())
    story.nothing_happens(story.suspend_failed())
    waking = suspended().when(ResumeSession())
    waking.nothing_happens(waking.suspended())


def test_reports_under_another_tenant_are_ignored() -> None:
    story = starting()
    story.nothing_happens(story.started(), tenant=TenantId("rival"))
    Story().nothing_happens(story.started())


def test_a_hosts_clock_that_is_ahead_cannot_put_things_into_the_future() -> None:
    story = starting()
    early = story.passes(100).started()
    story.passes(-100).when(early)
    assert story.last[0].observed_at == story.now

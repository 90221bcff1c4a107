"""Checkpoints of a session that runs on: happens / refused / ignored, tried again, dropped with the machine."""

from typing import Any

import pytest

from tests.support.sessions import (
    Story,
    checkpointed,
    checkpointing,
    failed,
    lost,
    placing,
    program,
    running,
    starting,
    suspended,
    suspending,
)
from torpor_contracts.ids import CheckpointId
from torpor_contracts.session import (
    CreateSession,
    ExecEnded,
    ResumeRequested,
    ResumeSession,
    SessionLost,
    SessionResumed,
    SessionSuspended,
    SessionTerminated,
    SuspendRequested,
    SuspendSession,
    SuspendWithdrawn,
    TerminateRequested,
    TerminateSession,
    VmStartRequested,
)
from torpor_contracts.session_branches import (
    CheckpointFailed,
    CheckpointRequested,
    CheckpointSession,
    ExecContinued,
    RollbackSession,
    SessionCheckpointed,
)
from torpor_contracts.vm import IN_USE
from torpor_scheduler.domain.session import Phase
from torpor_scheduler.domain.session_decisions import LookedUp
from torpor_scheduler.domain.timers import REPORT_GRACE_S, idle_at, timer_of
from torpor_scheduler.orders import checkpoint_order

IDLE = CreateSession(idle_after_s=30.0)


def test_a_running_session_is_checkpointed_and_runs_on() -> None:
    story = running().passes(1).when(CheckpointSession(label="before the upgrade")).then(CheckpointRequested)
    asked = story.last[0]
    assert (asked.vm_id, asked.incarnation, asked.parent_id, asked.attempt) == ("vm-1", 1, None, 1)
    assert story.session.phase is Phase.RUNNING
    story.passes(1).when(story.checkpointed()).then(SessionCheckpointed)
    taken = story.last[0]
    assert (taken.checkpoint_id, taken.label) == (asked.checkpoint_id, "before the upgrade")
    assert (taken.pause_ms, taken.log_position, taken.fingerprint) == (12.5, 7, "simulated-1")
    assert story.session.phase is Phase.RUNNING
    assert story.session.checkpointing is None


def test_the_id_of_a_checkpoint_can_be_chosen_once() -> None:
    story = running().when(CheckpointSession(checkpoint_id=CheckpointId("ckp-mine")))
    assert story.last[0].checkpoint_id == "ckp-mine"
    story.when(story.checkpointed())
    story.refused(CheckpointSession(checkpoint_id=CheckpointId("ckp-mine")), "checkpoint-exists")


def test_an_id_under_which_anything_stands_is_taken() -> None:
    story = running()
    story.checkpoints[CheckpointId("ckp-theirs")] = LookedUp(version=3, facts=None)
    story.refused(CheckpointSession(checkpoint_id=CheckpointId("ckp-theirs")), "checkpoint-exists")


@pytest.mark.parametrize("given", ["s-1", "ckp-UPPER", "ckp-" + "x" * 60, "", "ckp-a b"])
def test_an_id_that_cannot_be_a_checkpoints_is_refused(given: str) -> None:
    running().refused(CheckpointSession(checkpoint_id=CheckpointId(given)), "illegal-checkpoint-id")


def test_a_label_is_a_short_text() -> None:
    running().refused(CheckpointSession(label="x" * 201), "label-too-large")


@pytest.mark.parametrize(
    ("story", "code"),
    [
        (Story, "session-not-found"),
        (placing, "not-running"),
        (starting, "not-running"),
        (suspending, "already-suspending"),
        (lost, "session-lost"),
        (failed, "session-failed"),
        (checkpointing, "checkpoint-in-progress"),
    ],
)
def test_a_checkpoint_is_refused(story: Any, code: str) -> None:
    story().refused(CheckpointSession(), code)


def test_a_checkpoint_is_refused_for_another_incarnation() -> None:
    running().refused(CheckpointSession(incarnation=2), "stale-incarnation")


def test_a_suspended_session_is_answered_with_the_checkpoint_it_sleeps_in() -> None:
    story = suspended()
    newest = story.session.checkpoint
    assert newest is not None
    story.when(CheckpointSession(label="asleep")).then(SessionCheckpointed)
    named = story.last[0]
    assert (named.checkpoint_id, named.label, named.pause_ms) == (newest.checkpoint_id, "asleep", 0.0)
    assert story.session.checkpoint == newest, "nothing has changed"
    assert story.session.phase is Phase.SUSPENDED


def test_each_checkpoint_builds_on_the_one_before() -> None:
    story = checkpointed()
    first = story.session.checkpoint
    assert first is not None
    story.passes(1).when(CheckpointSession())
    assert story.last[0].parent_id == first.checkpoint_id
    story.when(story.checkpointed()).passes(1).when(SuspendSession())
    assert story.last[0].parent_id == story.session.checkpoint.checkpoint_id  # type: ignore[union-attr]


def test_a_machine_that_is_lost_afterwards_is_resumed_from_the_newest_checkpoint() -> None:
    story = checkpointed()
    taken_at = story.now
    story.passes(60).when(story.stopped()).then(SessionLost)
    assert story.last[0].lost_since == taken_at
    story.when(ResumeSession()).then(ResumeRequested, VmStartRequested)
    assert story.last[1].checkpoint_id == story.session.checkpoint.checkpoint_id  # type: ignore[union-attr]
    story.when(story.started()).then(SessionResumed)
    assert story.last[0].lost_since == taken_at


def test_a_checkpoint_that_failed_is_tried_again_within_the_rule_and_then_given_up() -> None:
    story = checkpointing()
    wanted = story.last[0].checkpoint_id
    pauses = []
    while story.session.checkpointing is not None:
        story.when(story.checkpoint_failed(retryable=True)).then(CheckpointFailed)
        retry_at = story.last[0].retry_at
        pauses.append(None if retry_at is None else (retry_at - story.now).total_seconds())
        assert checkpoint_order(story.session) is None, "nothing is asked for before its time"
        if retry_at is not None:
            story.timer_comes().then(CheckpointRequested)
            assert story.last[0].checkpoint_id == wanted
            assert checkpoint_order(story.session) is not None
    assert pauses == [1.0, 2.0, None]
    assert story.session.phase is Phase.RUNNING
    assert story.session.problem is not None
    assert story.session.problem.code == "no-space"


def test_a_failure_that_no_other_try_will_mend_is_final() -> None:
    story = checkpointing()
    story.when(story.checkpoint_failed(retryable=False)).then(CheckpointFailed)
    assert story.last[0].retry_at is None
    assert story.session.checkpointing is None


def test_a_success_after_a_failure_takes_the_problem_away() -> None:
    story = checkpointing()
    story.when(story.checkpoint_failed(retryable=True)).timer_comes().when(story.checkpointed())
    assert story.session.problem is None


def test_the_failure_of_another_checkpoint_is_ignored() -> None:
    story = checkpointing()
    story.nothing_happens(story.checkpoint_failed(checkpoint_id="ckp-older"))
    story.when(story.checkpoint_failed(retryable=True))
    story.nothing_happens(story.checkpoint_failed())


def test_a_checkpoint_without_a_report_fails_in_time_and_a_late_report_still_counts() -> None:
    story = checkpointing()
    timer = timer_of(story.session)
    assert timer is not None
    assert timer.kind == "checkpoint"
    assert (timer.due_at - story.now).total_seconds() == 120.0 + REPORT_GRACE_S
    late = story.checkpointed()
    for _ in range(2):
        story.timer_comes().then(CheckpointFailed)
        assert story.last[0].code == "checkpoint-timed-out"
        story.timer_comes().then(CheckpointRequested)
    story.timer_comes().then(CheckpointFailed)
    assert story.session.checkpointing is None
    story.when(late).then(SessionCheckpointed)
    story.nothing_happens(late)


def test_an_older_checkpoint_that_is_reported_late_does_not_become_the_newest() -> None:
    story = checkpointing()
    late = story.checkpointed()
    story.when(story.checkpoint_failed()).passes(5).when(CheckpointSession()).passes(1).when(story.checkpointed())
    story.nothing_happens(late)


def test_a_report_of_a_machine_that_was_given_up_moves_the_point_to_go_back_to() -> None:
    story = checkpointing()
    machine, report = story.machine, story.passes(2).checkpointed()
    story.passes(2).when(story.host_lost()).then(CheckpointFailed, SessionLost)
    assert story.last[0].code == "session-lost"
    story.when(report).then(SessionCheckpointed)
    assert story.session.phase is Phase.LOST
    assert story.session.lost is not None
    assert story.session.lost.since == report.taken_at
    assert story.session.lost.machine.vm_id == machine.vm_id


def test_nothing_that_ends_the_machine_leaves_a_checkpoint_waiting() -> None:
    for number, then in enumerate((TerminateRequested, SessionLost, SessionSuspended)):
        story = checkpointing()
        ends = (TerminateSession(), story.stopped(), story.suspended(checkpoint_id="ckp-late"))
        story.when(ends[number]).then(CheckpointFailed, then)
        assert story.session.checkpointing is None


def test_a_session_that_is_being_checkpointed_is_not_suspended_meanwhile() -> None:
    story = checkpointing(IDLE)
    story.refused(SuspendSession(), "checkpoint-in-progress")
    story.nothing_happens(story.host_draining())
    assert idle_at(story.session) is None
    story.when(story.checkpointed())
    story.when(story.host_draining()).then(SuspendRequested)


def test_a_checkpoint_is_no_work_and_does_not_keep_awake() -> None:
    story = running(IDLE)
    due = idle_at(story.session)
    story.passes(20).when(CheckpointSession()).passes(1).when(story.checkpointed())
    assert idle_at(story.session) == due


def test_programs_go_on_while_a_checkpoint_is_taken() -> None:
    story = running().when(program())
    story.when(story.exec_started("e-1")).when(CheckpointSession()).passes(1).when(story.checkpointed())
    story.when(story.exec_ended("e-1")).then(ExecEnded)


def test_a_program_of_a_lost_machine_is_not_taken_for_one_that_its_checkpoint_holds() -> None:
    story = running().when(program("e-1"))
    told = story.passes(1).exec_started("e-1")
    story.when(CheckpointSession()).passes(1).when(story.checkpointed()).when(story.stopped())
    story.when(told)
    assert [event.outcome for event in story.last if isinstance(event, ExecEnded)] == ["lost"]


def test_what_the_guest_brought_along_is_in_flight_again() -> None:
    story = running().when(program("e-1"))
    story.when(story.exec_started("e-1")).when(CheckpointSession()).passes(1).when(story.checkpointed())
    story.when(story.stopped()).when(ResumeSession())
    story.when(story.started(None, "e-1")).then(SessionResumed, ExecContinued)
    assert (story.last[1].exec_id, story.last[1].incarnation, story.last[1].timeout_s) == ("e-1", 2, 60.0)
    story.when(story.exec_ended("e-1")).then(ExecEnded)
    assert story.last[0].incarnation == 2


def test_what_was_in_flight_all_the_time_is_not_told_again() -> None:
    story = running().when(program("e-1"))
    story.when(story.exec_started("e-1")).when(SuspendSession()).when(story.suspended()).when(ResumeSession())
    story.when(story.started(None, "e-1")).then(SessionResumed)


def test_a_machine_that_was_in_use_is_not_suspended_for_idleness() -> None:
    story = running(IDLE).timer_comes().then(SuspendRequested)
    asked_at = story.now
    story.when(story.suspend_failed(code=IN_USE)).then(SuspendWithdrawn)
    assert story.session.phase is Phase.RUNNING
    assert story.session.problem is None
    assert story.session.suspend_failures == 0
    due = idle_at(story.session)
    assert due is not None
    assert (due - asked_at).total_seconds() == 30.0
    for _ in range(20):
        story.timer_comes().then(SuspendRequested)
        story.when(story.suspend_failed(code=IN_USE)).then(SuspendWithdrawn)
    assert idle_at(story.session) is not None, "use is no failure, so nothing is given up"


def test_a_very_short_idle_time_is_not_looked_at_all_the_time() -> None:
    story = running(CreateSession(idle_after_s=0.1)).timer_comes()
    story.when(story.suspend_failed(code=IN_USE))
    assert (story.last[0].retry_at - story.now).total_seconds() == 1.0


def test_a_client_who_suspends_is_told_of_a_host_that_says_in_use() -> None:
    story = suspending()
    story.when(story.suspend_failed(code=IN_USE))
    assert story.session.problem is not None


def test_a_terminated_session_takes_no_more_checkpoints() -> None:
    story = running().when(TerminateSession())
    story.refused(CheckpointSession(), "session-terminating")
    story.refused(RollbackSession(checkpoint_id=CheckpointId("ckp-1")), "session-terminating")
    story.when(story.stopped(expected=True)).then(SessionTerminated)
    story.refused(CheckpointSession(), "session-terminated")

"""Rollback: happens / refused / ignored; the machine is stopped first, then the session comes back as a new one."""

from typing import Any

import pytest

from tests.support.sessions import (
    Story,
    checkpointed,
    failed,
    forked,
    lost,
    offer,
    placing,
    program,
    running,
    starting,
    suspended,
    suspending,
)
from torpor_contracts.ids import CheckpointId
from torpor_contracts.session import (
    ExecEnded,
    ExecRequested,
    ResumeRequested,
    ResumeSession,
    SessionFailed,
    SessionResumed,
    SuspendSession,
    TerminateRequested,
    TerminateSession,
    VmStartRequested,
)
from torpor_contracts.session_branches import (
    CheckpointFailed,
    CheckpointSession,
    ExecContinued,
    RollbackRequested,
    RollbackSession,
)
from torpor_scheduler.domain.session import Phase
from torpor_scheduler.domain.timers import REPORT_GRACE_S, timer_of
from torpor_scheduler.orders import pending_order

OLD = CheckpointId("ckp-old")
BACK = RollbackSession(checkpoint_id=OLD)


def with_old(story: Story, **changes: Any) -> Story:
    """A session whose tree has a checkpoint `ckp-old`."""
    return story.keeps(OLD, **changes)


def test_a_running_session_is_stopped_and_comes_back_from_the_checkpoint() -> None:
    story = with_old(running(), log_position=5).passes(1).when(BACK).then(RollbackRequested)
    asked = story.last[0]
    assert (asked.vm_id, asked.incarnation, asked.checkpoint_id, asked.log_position) == ("vm-1", 1, OLD, 5)
    assert story.session.phase is Phase.ROLLING_BACK
    order = pending_order(story.session)
    assert order is not None
    assert order.vm_id == "vm-1"
    story.passes(1).when(story.stopped(expected=True)).then(ResumeRequested, VmStartRequested)
    assert (story.last[0].cause, story.last[0].incarnation, story.last[0].checkpoint_id) == ("rollback", 2, OLD)
    assert story.last[1].checkpoint_id == OLD
    story.passes(1).when(story.started()).then(SessionResumed)
    assert (story.last[0].incarnation, story.last[0].checkpoint_id, story.last[0].lost_since) == (2, OLD, None)


@pytest.mark.parametrize("begin", [suspended, lost, failed])
def test_a_session_without_a_machine_comes_back_at_once(begin: Any) -> None:
    story = with_old(begin()).when(BACK).then(RollbackRequested, ResumeRequested, VmStartRequested)
    assert story.last[0].vm_id is None
    story.when(story.started()).then(SessionResumed)


def test_programs_in_flight_are_lost_and_told_why() -> None:
    story = with_old(running()).when(program("e-1")).when(program("e-2"))
    story.when(story.exec_started("e-1")).when(BACK).then(RollbackRequested, ExecEnded, ExecEnded)
    assert {(end.exec_id, end.outcome) for end in story.last[1:]} == {("e-1", "lost"), ("e-2", "lost")}
    assert all("rolled-back" in end.detail for end in story.last[1:])


def test_a_program_that_ran_at_the_checkpoint_goes_on_and_ends_again() -> None:
    story = with_old(running()).when(program("e-1"))
    story.when(story.exec_started("e-1")).when(story.exec_ended("e-1")).when(BACK).when(story.stopped())
    story.when(story.started(None, "e-1")).then(SessionResumed, ExecContinued)
    story.when(story.exec_ended("e-1")).then(ExecEnded)


def test_work_asked_for_meanwhile_waits_for_the_new_machine() -> None:
    story = with_old(running()).when(BACK).when(program("e-9")).then(ExecRequested)
    story.when(story.stopped())
    story.when(story.started()).then(SessionResumed)
    assert [one.exec_id for one in story.session.execs] == ["e-9"]


def test_what_was_made_since_stays_in_the_tree_and_can_be_gone_to_again() -> None:
    story = with_old(checkpointed())
    newer = story.session.checkpoint
    assert newer is not None
    story.when(BACK).when(story.stopped()).when(story.started())
    story.when(RollbackSession(checkpoint_id=newer.checkpoint_id)).then(RollbackRequested)
    story.when(story.stopped())
    assert story.last[1].checkpoint_id == newer.checkpoint_id
    assert story.last[1].incarnation == 3


def test_the_next_checkpoint_is_a_child_of_the_one_gone_back_to() -> None:
    story = with_old(checkpointed()).when(BACK)
    story.when(story.stopped()).when(story.started()).when(CheckpointSession())
    assert story.last[0].parent_id == OLD


@pytest.mark.parametrize(
    ("story", "code"),
    [
        (Story, "session-not-found"),
        (placing, "not-running"),
        (starting, "not-running"),
        (suspending, "already-suspending"),
    ],
)
def test_a_rollback_is_refused(story: Any, code: str) -> None:
    found = story()
    with_old(found).refused(BACK, code)


def test_a_rollback_is_refused_twice_and_for_another_incarnation() -> None:
    story = with_old(running())
    story.refused(RollbackSession(checkpoint_id=OLD, incarnation=2), "stale-incarnation")
    story.when(BACK).refused(BACK, "already-rolling-back")
    story.refused(SuspendSession(), "not-running")
    story.refused(ResumeSession(), "already-resuming")
    story.refused(CheckpointSession(), "not-running")


def test_a_checkpoint_that_is_not_of_the_tree_or_freed_is_refused_and_the_machine_runs_on() -> None:
    story = running()
    story.refused(RollbackSession(checkpoint_id=CheckpointId("ckp-none")), "checkpoint-not-found")
    story.refused(RollbackSession(checkpoint_id=CheckpointId("s-1")), "illegal-checkpoint-id")
    with_old(story, kept=False).refused(BACK, "checkpoint-freed")
    assert story.session.phase is Phase.RUNNING


def test_a_machine_is_not_stopped_for_a_checkpoint_that_no_host_can_load() -> None:
    story = with_old(running(), fingerprint="qemu-9")
    story.refused(BACK, "checkpoint-not-loadable")
    assert story.session.phase is Phase.RUNNING
    story.hosts = (offer("host-b", fingerprint="qemu-9", vms_free=0),)
    story.when(BACK).then(RollbackRequested)


def test_a_checkpoint_under_way_is_dropped_first() -> None:
    story = with_old(running()).when(CheckpointSession()).when(BACK).then(CheckpointFailed, RollbackRequested)
    assert story.last[0].code == "rolled-back"


@pytest.mark.parametrize("how", ["stopped", "suspended", "host-lost", "nobody reports"])
def test_however_the_old_machine_ends_the_session_comes_back(how: str) -> None:
    story = with_old(running()).when(BACK)
    if how == "nobody reports":
        timer = timer_of(story.session)
        assert timer is not None
        assert (timer.kind, (timer.due_at - story.now).total_seconds()) == ("stop", 30.0 + REPORT_GRACE_S)
        story.timer_comes()
    else:
        reports = {
            "stopped": story.stopped(),
            "suspended": story.suspended(checkpoint_id="ckp-late"),
            "host-lost": story.host_lost(),
        }
        story.when(reports[how])
    story.then(ResumeRequested, VmStartRequested)
    assert story.session.phase is Phase.RESUMING
    assert story.session.checkpoint is not None
    assert story.session.checkpoint.checkpoint_id == OLD


def test_the_end_of_the_old_machine_is_heard_once() -> None:
    story = with_old(running())
    machine = story.machine
    story.when(BACK)
    report = story.stopped(machine)
    story.when(report)
    story.nothing_happens(report)


def test_a_rollback_that_cannot_start_fails_with_a_way_out() -> None:
    story = with_old(running()).when(BACK)
    story.when(story.stopped())
    story.when(story.start_failed(retryable=False, code="checkpoint-part-corrupt"))
    assert type(story.last[-1]) is SessionFailed
    story.keeps("ckp-other").when(RollbackSession(checkpoint_id=CheckpointId("ckp-other")))
    story.when(story.started()).then(SessionResumed)


def test_a_session_that_goes_back_can_be_terminated() -> None:
    story = with_old(running()).when(BACK).when(TerminateSession()).then(TerminateRequested)
    assert story.last[0].vm_id == "vm-1"


def test_a_fork_goes_back_to_where_it_began() -> None:
    story = forked()
    story.when(story.started()).when(RollbackSession(checkpoint_id=CheckpointId("ckp-0"))).then(RollbackRequested)
    assert story.last[0].checkpoint_incarnation == 0

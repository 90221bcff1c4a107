"""Suspend and resume, asked for by clients, idleness or a draining host: happens / refused / ignored."""

import pytest

from tests.support.histories import at
from tests.support.sessions import (
    Story,
    failed,
    lost,
    offer,
    placing,
    program,
    running,
    starting,
    suspended,
    suspending,
)
from torpor_contracts.session import (
    CreateSession,
    ExecEnded,
    ResumeDeferred,
    ResumeRequested,
    ResumeSession,
    SessionFailed,
    SessionLost,
    SessionRecovered,
    SessionResumed,
    SessionStartFailed,
    SessionSuspended,
    SuspendFailed,
    SuspendRequested,
    SuspendSession,
    TerminateSession,
    VmStartRequested,
)
from torpor_scheduler.domain.session import Phase
from torpor_scheduler.domain.timers import timer_of


def test_suspend_happens_to_a_running_session() -> None:
    story = running().when(SuspendSession()).then(SuspendRequested)
    asked = story.last[0]
    assert (asked.vm_id, asked.incarnation, asked.parent_id, asked.cause) == ("vm-1", 1, None, "client")
    assert story.session.phase is Phase.SUSPENDING


def test_suspend_names_the_checkpoint_that_the_machine_came_from_as_parent() -> None:
    story = suspended().when(ResumeSession())
    story.when(story.started()).when(SuspendSession())
    assert story.last[0].parent_id == story.session.checkpoint.checkpoint_id  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("story", "code"),
    [
        (Story, "session-not-found"),
        (placing, "not-running"),
        (starting, "not-running"),
        (suspending, "already-suspending"),
        (suspended, "already-suspended"),
        (lost, "session-lost"),
        (failed, "session-failed"),
    ],
)
def test_suspend_is_refused(story: type[Story], code: str) -> None:
    story().refused(SuspendSession(), code)


def test_suspend_is_refused_for_another_incarnation() -> None:
    running().refused(SuspendSession(incarnation=2), "stale-incarnation")


def test_the_machine_is_gone_once_suspended() -> None:
    story = suspending()
    story.when(story.suspended()).then(SessionSuspended)
    assert story.session.machine is None
    assert timer_of(story.session) is None
    assert story.session.checkpoint is not None


def test_a_suspend_that_failed_leaves_the_machine_running_and_shows_why() -> None:
    story = suspending()
    story.when(story.suspend_failed()).then(SuspendFailed)
    assert story.session.phase is Phase.RUNNING
    assert story.session.problem is not None
    assert story.session.problem.code == "disk-full"
    story.when(SuspendSession()).then(SuspendRequested)


def test_the_failure_of_an_earlier_suspend_is_ignored() -> None:
    story = suspending()
    story.nothing_happens(story.suspend_failed(checkpoint_id="ckp-older"))


def test_a_suspend_without_a_report_fails_in_time_and_a_late_report_still_counts() -> None:
    story = suspending().passes(1)
    late = story.suspended()
    story.timer_comes().then(SuspendFailed)
    assert story.last[0].code == "suspend-timed-out"
    story.when(late).then(SessionSuspended)
    assert story.session.phase is Phase.SUSPENDED


def test_resume_happens_as_the_next_incarnation() -> None:
    story = suspended().when(ResumeSession(incarnation=1)).then(ResumeRequested, VmStartRequested)
    assert story.last[1].incarnation == 2
    story.when(story.started()).then(SessionResumed)
    assert (story.last[0].incarnation, story.last[0].lost_since) == (2, None)


def test_twenty_cycles_of_sleep_never_give_an_incarnation_twice() -> None:
    story = suspended()
    for _ in range(20):
        story.when(ResumeSession()).when(story.started()).when(SuspendSession()).when(story.suspended())
    given = [event.incarnation for event in story.all if isinstance(event, VmStartRequested)]
    assert given == list(range(1, 22))


def test_resume_goes_to_a_host_that_can_load_the_checkpoint_and_rather_where_it_is() -> None:
    story = suspended()
    story.hosts = (offer("host-z", memory_mib_free=9_999), offer("host-a"), offer("host-b", fingerprint="qemu-9"))
    story.when(ResumeSession())
    assert story.last[1].host_id == "host-a"
    again = suspended()
    again.hosts = (offer("host-b", fingerprint="qemu-9"), offer("host-c"))
    assert again.when(ResumeSession()).last[1].host_id == "host-c"


def test_resume_waits_when_no_host_can_load_the_checkpoint() -> None:
    story = suspended()
    story.hosts = (offer("host-b", fingerprint="qemu-9"),)
    story.when(ResumeSession())
    assert "can load a checkpoint of simulated-1" in story.last[1].reason


def test_the_checkpoints_own_fingerprint_counts_more_than_that_of_the_host() -> None:
    story = suspending()
    story.when(story.suspended(fingerprint="simulated-2"))
    story.when(ResumeSession())
    assert "simulated-2" in story.last[1].reason


@pytest.mark.parametrize(
    ("story", "code"),
    [
        (Story, "session-not-found"),
        (placing, "already-starting"),
        (starting, "already-starting"),
        (running, "already-running"),
        (failed, "nothing-to-resume"),
    ],
)
def test_resume_is_refused(story: type[Story], code: str) -> None:
    story().refused(ResumeSession(), code)


def test_resume_right_after_suspend_is_kept_and_follows() -> None:
    story = suspending().when(ResumeSession()).then(ResumeDeferred)
    story.refused(ResumeSession(), "already-resuming")
    story.when(story.suspended()).then(SessionSuspended, ResumeRequested, VmStartRequested)
    assert story.last[1].cause == "client"
    story.refused(ResumeSession(), "already-resuming")


def test_a_kept_resume_is_done_with_when_the_suspend_fails() -> None:
    story = suspending().when(ResumeSession())
    story.when(story.suspend_failed())
    assert not story.session.resume_wanted
    story.when(SuspendSession()).when(story.suspended()).then(SessionSuspended)


def test_a_lost_session_resumes_from_its_checkpoint_and_says_what_was_lost() -> None:
    story = suspended().passes(10).when(ResumeSession())
    story.when(story.started()).passes(100)
    story.when(story.stopped()).then(SessionLost)
    asleep_at = story.session.checkpoint.observed_at  # type: ignore[union-attr]
    assert story.last[0].lost_since == asleep_at
    story.when(ResumeSession()).when(story.started()).then(SessionResumed)
    assert story.last[0].lost_since == asleep_at
    assert story.session.lost is None


def test_a_session_lost_before_its_first_checkpoint_starts_from_its_image_and_says_so() -> None:
    story = lost().when(ResumeSession())
    assert story.last[1].checkpoint_id is None
    story.when(story.started())
    assert story.last[0].lost_since == at(1)


def test_a_lost_machine_seen_alive_later_is_taken_back() -> None:
    story = running().when(program())
    gone = story.machine
    story.when(story.exec_started("e-1")).passes(10).when(story.host_lost())
    story.then(SessionLost, ExecEnded)
    before = story.started(gone)
    story.nothing_happens(before)
    story.passes(1).when(story.started(gone)).then(SessionRecovered)
    assert story.machine == gone
    assert story.session.phase is Phase.RUNNING


def test_a_lost_machine_seen_alive_after_the_session_went_on_stays_lost() -> None:
    story = running()
    gone = story.machine
    story.passes(10).when(story.host_lost()).when(ResumeSession()).passes(1)
    story.nothing_happens(story.started(gone))


def test_a_checkpoint_made_before_the_host_was_lost_is_worth_more_than_the_loss() -> None:
    story = suspending()
    gone = story.machine
    checkpointed = story.suspended()
    story.passes(10).when(story.host_lost()).then(SessionLost)
    story.when(checkpointed).then(SessionSuspended)
    assert story.session.lost is None
    assert story.session.checkpoint is not None
    assert story.session.checkpoint.host_id == gone.host_id


def test_a_resume_that_fails_for_good_keeps_the_checkpoint_as_the_way_out() -> None:
    story = suspended().when(ResumeSession())
    story.when(story.start_failed(retryable=False, code="checkpoint-corrupt")).then(SessionStartFailed, SessionFailed)
    assert "resume it" in story.last[1].way_out
    story.refused(program(), "session-failed")
    story.when(ResumeSession()).then(ResumeRequested, VmStartRequested)
    story.when(story.started()).then(SessionResumed)
    assert story.session.problem is None


def test_a_draining_host_is_left_and_a_running_program_goes_on_elsewhere() -> None:
    story = running().when(program())
    story.when(story.exec_started("e-1")).when(story.host_draining()).then(SuspendRequested)
    assert story.last[0].cause == "drain"
    story.hosts = (offer("host-a", draining=True), offer("host-b"))
    story.when(story.suspended()).then(SessionSuspended, ResumeRequested, VmStartRequested)
    assert (story.last[1].cause, story.last[2].host_id) == ("drain", "host-b")


def test_a_draining_host_is_left_and_an_idle_session_stays_asleep() -> None:
    story = running()
    story.when(story.host_draining()).when(story.suspended()).then(SessionSuspended)


def test_draining_does_not_disturb_what_is_not_running_there() -> None:
    story = suspending()
    story.nothing_happens(story.host_draining())
    moved = running(hosts=[offer("host-b")])
    report = running().host_draining()
    moved.nothing_happens(report)


def test_draining_waits_out_a_failed_suspend_and_gives_up_with_it() -> None:
    story = running()
    for _ in range(story.rules.suspend_retry.attempts_max):
        story.when(story.host_draining()).then(SuspendRequested)
        story.when(story.suspend_failed())
        story.nothing_happens(story.host_draining())
        retry_at = story.session.suspend_retry_at
        if retry_at is not None:
            story.now = retry_at
    story.passes(100_000).nothing_happens(story.host_draining())


def test_terminating_takes_precedence_over_a_suspend_under_way() -> None:
    story = suspending().when(TerminateSession())
    assert story.session.phase is Phase.TERMINATING
    assert story.session.suspending is None


def test_a_session_that_never_idles_has_no_timer() -> None:
    assert timer_of(running(CreateSession(idle_after_s=None)).session) is None

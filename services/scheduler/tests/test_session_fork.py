"""Forks: happens / refused; new sessions are made together or not at all, and the source is left as it is."""

from typing import Any

import msgspec
import pytest

from tests.support.sessions import (
    Story,
    checkpointed,
    checkpointing,
    failed,
    forked,
    forking,
    lost,
    offer,
    placing,
    running,
    starting,
    suspended,
    suspending,
)
from torpor_contracts.ids import CheckpointId, SessionId, VmId
from torpor_contracts.session import (
    CreateSession,
    PlacementDeferred,
    ResumeSession,
    SessionFailed,
    SessionRequested,
    SessionResumed,
    SessionStarted,
    SuspendSession,
    TerminateSession,
    VmStartRequested,
)
from torpor_contracts.session_branches import (
    CheckpointFailed,
    CheckpointRequested,
    CheckpointSession,
    ExecContinued,
    ForkFailed,
    ForkRequested,
    ForkSession,
    RollbackRequested,
    RollbackSession,
    SessionCheckpointed,
    SessionForked,
)
from torpor_scheduler.domain.session import Phase
from torpor_scheduler.domain.session_decisions import LookedUp, Seed

TWO = [SessionId("s-2"), SessionId("s-3")]
NAMED = CreateSession(metadata={"owner": "example"}, idle_after_s=42.0)


def fork(*session_ids: str, **given: Any) -> ForkSession:
    return ForkSession(session_ids=[SessionId(session_id) for session_id in session_ids or TWO], **given)


def test_a_running_session_is_forked_from_a_checkpoint_taken_for_that() -> None:
    story = running(NAMED).passes(1).when(fork()).then(ForkRequested, CheckpointRequested)
    assert story.last[1].cause == "fork"
    assert not story.made, "nobody is made before the checkpoint is there"
    story.passes(1).when(story.checkpointed()).then(SessionCheckpointed, SessionForked)
    made = story.last[1]
    assert (made.session_ids, made.checkpoint_id, made.log_position) == (TWO, story.last[0].checkpoint_id, 7)
    assert list(story.made) == TWO
    assert story.session.phase is Phase.RUNNING
    assert story.session.fork is None


def test_a_child_is_asked_for_with_all_that_its_source_is_and_knows_where_it_came_from() -> None:
    story = running(NAMED).passes(1).when(fork("s-2")).passes(1)
    story.when(story.checkpointed())
    requested, start = story.made[SessionId("s-2")]
    assert isinstance(requested, SessionRequested)
    assert isinstance(start, VmStartRequested)
    assert (requested.session_id, requested.tenant_id, requested.idle_after_s) == ("s-2", "acme", 42.0)
    assert requested.metadata == {"owner": "example"}
    lineage = requested.lineage
    assert lineage is not None
    assert (lineage.session_id, lineage.checkpoint_id) == ("s-1", story.last[0].checkpoint_id)
    assert (lineage.log_position, lineage.made_on, lineage.fingerprint) == (7, "host-a", "simulated-1")
    assert (start.vm_id, start.incarnation, start.checkpoint_id) == ("vm-of-s-2", 1, lineage.checkpoint_id)


def test_a_sleeping_session_is_forked_from_where_it_sleeps_and_sleeps_on() -> None:
    story = suspended()
    before = story.session
    story.when(fork()).then(SessionForked)
    assert [type(event) for event in story.made[TWO[0]]] == [SessionRequested, VmStartRequested]
    after = msgspec.structs.replace(story.session, version=before.version, step_version=before.step_version)
    assert after == before, "a fork leaves its source alone"


def test_a_session_is_forked_from_a_checkpoint_that_is_named() -> None:
    story = running()
    story.keeps("ckp-old", log_position=5)
    story.when(fork("s-2", checkpoint_id=CheckpointId("ckp-old"))).then(SessionForked)
    requested = story.made[SessionId("s-2")][0]
    assert (requested.lineage.checkpoint_id, requested.lineage.log_position) == ("ckp-old", 5)


def test_the_newest_checkpoint_of_a_running_session_can_be_asked_for() -> None:
    story = checkpointed().passes(5)
    newest = story.session.checkpoint
    assert newest is not None
    story.when(fork("s-2", source="newest")).then(SessionForked)
    assert story.last[0].checkpoint_id == newest.checkpoint_id


def test_a_fork_gives_its_own_metadata() -> None:
    story = suspended(NAMED).when(fork("s-2", metadata={"try": "1"}))
    assert story.made[SessionId("s-2")][0].metadata == {"try": "1"}


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (ForkSession(), "illegal-fork"),
        (ForkSession(count=0), "illegal-fork"),
        (fork(*(f"s-{number}" for number in range(2, 103))), "illegal-fork"),
        (fork("s-2", "s-2"), "illegal-fork"),
        (fork("s-1"), "illegal-fork"),
        (fork("host-2"), "illegal-session-id"),
        (fork("no id"), "illegal-session-id"),
        (fork("s-2", checkpoint_id=CheckpointId("vm-1")), "illegal-checkpoint-id"),
        (fork("s-2", checkpoint_id=CheckpointId("ckp-1"), source="newest"), "illegal-fork"),
        (fork("s-2", metadata={"k": "x" * 5000}), "metadata-too-large"),
        (fork("s-2", incarnation=9), "stale-incarnation"),
        (fork("s-2", checkpoint_id=CheckpointId("ckp-none")), "checkpoint-not-found"),
    ],
)
def test_a_fork_that_makes_no_sense_is_refused(command: ForkSession, code: str) -> None:
    running().refused(command, code)


@pytest.mark.parametrize(
    ("story", "command", "code"),
    [
        (Story, fork(), "session-not-found"),
        (starting, fork(), "no-checkpoint"),
        (placing, fork(), "no-checkpoint"),
        (failed, fork(), "no-checkpoint"),
        (lost, fork(), "no-checkpoint"),
        (suspended, fork(source="fresh"), "not-running"),
        (suspending, fork(source="fresh"), "not-running"),
        (checkpointing, fork(), "checkpoint-in-progress"),
        (running, fork(source="newest"), "no-checkpoint"),
    ],
)
def test_a_fork_is_refused(story: Any, command: ForkSession, code: str) -> None:
    story().refused(command, code)


def test_a_hundred_forks_are_the_most() -> None:
    story = suspended().when(fork(*(f"s-{number}" for number in range(2, 102))))
    assert len(story.made) == 100


def test_one_id_that_is_taken_refuses_them_all() -> None:
    for there in (None, running().session):
        story = suspended()
        story.seeds[TWO[1]] = Seed(session=there, vm_id=VmId("vm-x"))
        story.refused(fork(), "session-exists")
        assert not story.made


def test_a_freed_checkpoint_and_a_foreign_tenants_are_refused() -> None:
    story = running()
    story.keeps("ckp-gone", kept=False)
    story.refused(fork("s-2", checkpoint_id=CheckpointId("ckp-gone")), "checkpoint-freed")
    story.checkpoints[CheckpointId("ckp-theirs")] = LookedUp(version=1, facts=None)
    story.refused(fork("s-2", checkpoint_id=CheckpointId("ckp-theirs")), "checkpoint-not-found")


def test_a_fork_fails_whole_when_its_checkpoint_fails() -> None:
    story = forking()
    story.when(story.checkpoint_failed()).then(CheckpointFailed, ForkFailed)
    assert story.last[1].session_ids == TWO
    assert story.session.fork is None
    assert not story.made


def test_a_fork_waits_while_its_checkpoint_is_tried_again() -> None:
    story = forking()
    story.when(story.checkpoint_failed(retryable=True)).then(CheckpointFailed)
    assert story.session.fork is not None
    story.timer_comes().when(story.checkpointed()).then(SessionCheckpointed, SessionForked)


def test_a_fork_fails_whole_when_an_id_is_taken_meanwhile() -> None:
    story = forking()
    story.seeds[TWO[0]] = Seed(session=running().session, vm_id=VmId("vm-x"))
    story.when(story.checkpointed()).then(SessionCheckpointed, ForkFailed)
    assert story.last[1].code == "session-exists"
    assert not story.made


@pytest.mark.parametrize("end", ["stopped", "terminate", "rollback"])
def test_a_fork_fails_when_its_source_ends_first(end: str) -> None:
    story = forking()
    story.keeps("ckp-old")
    commands = {
        "stopped": story.stopped(),
        "terminate": TerminateSession(),
        "rollback": RollbackSession(checkpoint_id=CheckpointId("ckp-old")),
    }
    story.when(commands[end])
    assert [type(event) for event in story.last[:2]] == [CheckpointFailed, ForkFailed]
    assert story.session.fork is None


def test_each_child_takes_its_room_from_what_is_left_for_the_next() -> None:
    story = suspended()
    story.hosts = (offer("host-a", vms_free=2), offer("host-b", vms_free=1))
    story.when(fork("s-2", "s-3", "s-4", "s-5"))
    asked = [event.host_id for events in story.made.values() for event in events if isinstance(event, VmStartRequested)]
    assert sorted(asked) == ["host-a", "host-a", "host-b"]
    assert type(story.made[SessionId("s-5")][1]) is PlacementDeferred


def test_a_child_starts_as_its_own_first_incarnation() -> None:
    story = forked()
    assert story.machine.checkpoint_id == "ckp-0"
    story.passes(1).when(story.started()).then(SessionStarted)
    assert story.last[0].incarnation == 1


def test_a_child_takes_over_the_programs_that_came_with_the_checkpoint() -> None:
    story = forked()
    story.when(story.started(None, "e-of-parent")).then(SessionStarted, ExecContinued)
    assert [program.exec_id for program in story.session.execs] == ["e-of-parent"]


def test_a_child_whose_machine_is_lost_goes_back_to_where_it_began() -> None:
    story = forked()
    began_at = story.now
    story.passes(1).when(story.started()).passes(9).when(story.stopped())
    assert story.last[0].lost_since == began_at
    story.when(ResumeSession())
    assert story.last[1].checkpoint_id == "ckp-0"
    assert story.last[1].incarnation == 2


def test_a_child_that_cannot_start_keeps_its_way_out() -> None:
    story = forked()
    story.when(story.start_failed(retryable=False))
    assert type(story.last[-1]) is SessionFailed
    assert "resume" in story.last[-1].way_out
    story.when(ResumeSession())
    story.when(story.started()).then(SessionResumed)


def test_a_child_can_be_forked_before_it_runs_at_all() -> None:
    story = forked(hosts=())
    assert story.session.phase is Phase.PLACING
    story.when(fork("s-9")).then(SessionForked)
    lineage = story.made[SessionId("s-9")][0].lineage
    assert (lineage.session_id, lineage.checkpoint_id) == ("s-1", "ckp-0")


def test_the_source_may_be_lost_or_failed_as_long_as_it_has_a_checkpoint() -> None:
    story = checkpointed()
    story.when(story.stopped()).when(fork()).then(SessionForked)
    assert story.session.phase is Phase.LOST


def test_a_session_that_goes_back_can_be_forked_from_where_it_goes() -> None:
    story = checkpointed().passes(1)
    newest = story.session.checkpoint
    assert newest is not None
    story.when(RollbackSession(checkpoint_id=newest.checkpoint_id))
    assert type(story.last[0]) is RollbackRequested
    story.when(fork("s-2")).then(SessionForked)
    assert story.last[0].checkpoint_id == newest.checkpoint_id


def test_a_fork_that_waits_is_alone() -> None:
    story = forking()
    story.refused(fork("s-8"), "checkpoint-in-progress")
    story.refused(CheckpointSession(), "checkpoint-in-progress")
    story.refused(SuspendSession(), "checkpoint-in-progress")
    story.keeps("ckp-old").when(fork("s-8", checkpoint_id=CheckpointId("ckp-old"))).then(SessionForked)
    assert story.session.fork is not None, "the one that waits for its own checkpoint waits on"

"""Folds the events by which a session branches: checkpoints of it while it runs, forks, and the way back."""

from typing import assert_never

from msgspec.structs import replace

from torpor_contracts.scheduling import Problem
from torpor_contracts.session_branches import (
    BranchEvent,
    CheckpointFailed,
    CheckpointRequested,
    ForkFailed,
    ForkRequested,
    RollbackRequested,
    SessionCheckpointed,
    SessionForked,
)
from torpor_scheduler.domain.session import Checkpoint, Checkpointing, Fork, Phase, Session


def with_branch(session: Session, event: BranchEvent) -> Session:
    """The state after `event`, which the table allows; phase and version are set already."""
    match event:
        case CheckpointRequested():
            return replace(session, checkpointing=_checkpointing(session, event))
        case SessionCheckpointed():
            return _with_checkpoint(session, event)
        case CheckpointFailed():
            return _with_failure(session, event)
        case ForkRequested():
            fork = Fork(
                checkpoint_id=event.checkpoint_id, session_ids=tuple(event.session_ids), metadata=event.metadata
            )
            return replace(session, fork=fork)
        case SessionForked() | ForkFailed():
            over = session.fork is not None and session.fork.checkpoint_id == event.checkpoint_id
            return replace(session, fork=None if over else session.fork)
        case RollbackRequested():
            return _with_rollback(session, event)
        case _ as never:
            assert_never(never)


def _checkpointing(session: Session, event: CheckpointRequested) -> Checkpointing:
    before = session.checkpointing
    return Checkpointing(
        checkpoint_id=event.checkpoint_id,
        parent_id=event.parent_id,
        label=event.label,
        cause=event.cause,
        attempt=event.attempt,
        began_at=event.requested_at if before is None else before.began_at,
        requested_at=event.requested_at,
        deadline_at=event.deadline_at,
    )


def _with_checkpoint(session: Session, event: SessionCheckpointed) -> Session:
    """The session would be resumed from it now; one that sleeps would be already."""
    if session.phase is Phase.SUSPENDED:
        return session
    pending = session.checkpointing
    if pending is not None and pending.checkpoint_id == event.checkpoint_id:
        pending = None
    checkpoint = Checkpoint(
        checkpoint_id=event.checkpoint_id,
        incarnation=event.incarnation,
        fingerprint=event.fingerprint,
        host_id=event.host_id,
        observed_at=event.taken_at,
        partial=True,
    )
    machine, lost, problem = session.machine, session.lost, session.problem
    since = min(event.taken_at, event.observed_at)
    if lost is None:
        problem = None
    elif problem is not None:
        problem = replace(problem, way_out=f"resume it: it goes on from {since.isoformat()}")
    return replace(
        session,
        checkpointing=pending,
        checkpoint=checkpoint,
        restorable_at=since,
        problem=problem,
        machine=machine if machine is None else replace(machine, tip_id=event.checkpoint_id),
        lost=lost
        if lost is None
        else replace(lost, machine=replace(lost.machine, tip_id=event.checkpoint_id), since=since),
    )


def _with_failure(session: Session, event: CheckpointFailed) -> Session:
    pending = session.checkpointing
    if pending is None or pending.checkpoint_id != event.checkpoint_id:
        return session
    return replace(
        session,
        checkpointing=None if event.retry_at is None else replace(pending, retry_at=event.retry_at),
        problem=Problem(
            code=event.code,
            detail=event.detail,
            way_out="wait: it is tried again" if event.retry_at else "the machine runs on; checkpoint it again",
            since=event.observed_at,
        ),
    )


def _with_rollback(session: Session, event: RollbackRequested) -> Session:
    checkpoint = Checkpoint(
        checkpoint_id=event.checkpoint_id,
        incarnation=event.checkpoint_incarnation,
        fingerprint=event.fingerprint,
        host_id=None,
        observed_at=event.recorded_at,
        partial=True,
    )
    return replace(
        session,
        checkpoint=checkpoint,
        restorable_at=event.recorded_at,
        lost=None,
        losses=0,
        starting=None,
        resume_wanted=False,
        suspend_failures=0,
        suspend_retry_at=None,
        problem=None,
        stop_deadline_at=event.deadline_at if event.vm_id is not None else None,
    )

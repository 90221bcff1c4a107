"""Takes checkpoints of a session that runs on: one at a time, tried again within the rule, dropped with the machine."""

from typing import Literal

from torpor_contracts.errors import InvariantViolation, Rejected
from torpor_contracts.ids import CheckpointId
from torpor_contracts.session_branches import (
    CheckpointFailed,
    CheckpointRequested,
    CheckpointSession,
    ForkFailed,
    SessionCheckpointed,
)
from torpor_contracts.session_reports import ReportVmCheckpointed
from torpor_scheduler.domain.session import Machine, Phase, Session
from torpor_scheduler.domain.session_decisions.asking import check_checkpoint
from torpor_scheduler.domain.session_decisions.context import CheckpointFacts, Context, Draft, pause_s
from torpor_scheduler.domain.session_decisions.refusing import failed, refuse_stale


def checkpoint(draft: Draft, command: CheckpointSession, context: Context) -> None:
    """Ask for a checkpoint of a session that runs; name the one that a suspended session sleeps in."""
    check_checkpoint(command, context.rules.limits)
    session = draft.session
    refuse_stale(session, command.incarnation)
    match session.phase:
        case Phase.RUNNING:
            refuse_second(session)
            wanted = command.checkpoint_id
            if wanted is not None and context.checkpoint(wanted).version:
                raise Rejected("checkpoint-exists", f"there is a {wanted} already", "choose another id, or none")
            request_checkpoint(draft, context, wanted or context.checkpoint_id, command.label, "client")
        case Phase.SUSPENDED:
            _name_newest(draft, command, context)
        case Phase.SUSPENDING:
            raise Rejected(
                "already-suspending", "the session is being suspended, which makes a checkpoint", "wait until it sleeps"
            )
        case Phase.REQUESTED | Phase.PLACING | Phase.STARTING | Phase.RESUMING | Phase.ROLLING_BACK:
            raise Rejected("not-running", f"the session is {session.phase}", "wait until it runs")
        case Phase.LOST:
            raise Rejected(
                "session-lost", "the session's machine is gone: there is nothing to checkpoint", "resume it first"
            )
        case Phase.FAILED:
            raise failed(session)
        case _:
            raise InvariantViolation(f"checkpoint of a session in phase {session.phase}")


def request_checkpoint(
    draft: Draft, context: Context, checkpoint_id: CheckpointId, label: str, cause: Literal["client", "fork"]
) -> None:
    """Ask the host for a checkpoint; what it builds on is the one taken last of this machine."""
    machine = _machine(draft.session)
    draft.record(
        CheckpointRequested(
            session_id=draft.session.session_id,
            host_id=machine.host_id,
            vm_id=machine.vm_id,
            incarnation=machine.incarnation,
            checkpoint_id=checkpoint_id,
            parent_id=machine.parent_id,
            label=label,
            cause=cause,
            attempt=1,
            requested_at=context.now,
            deadline_at=context.after(context.rules.checkpoint_timeout_s),
        )
    )


def request_again(draft: Draft, context: Context) -> None:
    """The next try, of the same checkpoint."""
    machine, pending = _machine(draft.session), draft.session.checkpointing
    if pending is None:
        raise InvariantViolation(f"session {draft.session.session_id} is not being checkpointed")
    draft.record(
        CheckpointRequested(
            session_id=draft.session.session_id,
            host_id=machine.host_id,
            vm_id=machine.vm_id,
            incarnation=machine.incarnation,
            checkpoint_id=pending.checkpoint_id,
            parent_id=pending.parent_id,
            label=pending.label,
            cause=pending.cause,
            attempt=pending.attempt + 1,
            requested_at=context.now,
            deadline_at=context.after(context.rules.checkpoint_timeout_s),
        )
    )


def take_checkpoint(draft: Draft, context: Context, machine: Machine, report: ReportVmCheckpointed) -> bool:
    """Record a checkpoint that was observed, also after the time for it; whether it was waited for.

    One that is older than what the session would be resumed from changes nothing.
    """
    session, newest = draft.session, draft.session.checkpoint
    pending = session.checkpointing
    asked = pending is not None and pending.checkpoint_id == report.checkpoint_id
    if not asked and newest is not None and newest.incarnation >= report.incarnation:
        known = newest.checkpoint_id == report.checkpoint_id
        if known or newest.incarnation > report.incarnation or report.taken_at <= newest.observed_at:
            return False
    draft.record(
        SessionCheckpointed(
            incarnation=machine.incarnation,
            host_id=machine.host_id,
            checkpoint_id=report.checkpoint_id,
            fingerprint=report.fingerprint or machine.fingerprint,
            label=pending.label if asked and pending is not None else "",
            pause_ms=report.pause_ms,
            log_position=report.log_position,
            # By the host's clock, as that of its next checkpoint will be: the two are compared.
            taken_at=report.taken_at,
            observed_at=context.past(report.observed_at),
        )
    )
    return asked


def fail_checkpoint(draft: Draft, context: Context, code: str, detail: str, *, retryable: bool) -> None:
    """The machine runs on; the checkpoint is tried again within the rule, or it and the fork behind it are over."""
    pending, rule = draft.session.checkpointing, context.rules.checkpoint_retry
    if pending is None:
        raise InvariantViolation(f"session {draft.session.session_id} is not being checkpointed")
    pause = pause_s(rule.backoff_s, rule.backoff_s_max, pending.attempt)
    in_time = (context.now - pending.began_at).total_seconds() + pause <= rule.deadline_s
    again = retryable and in_time and pending.attempt < rule.attempts_max
    draft.record(
        CheckpointFailed(
            incarnation=draft.session.incarnation,
            checkpoint_id=pending.checkpoint_id,
            attempt=pending.attempt,
            code=code,
            detail=detail,
            observed_at=context.now,
            retry_at=context.after(pause) if again else None,
        )
    )
    if not again:
        fail_fork(draft, context, code, detail)


def drop_checkpoint(draft: Draft, context: Context, code: str, detail: str) -> None:
    """The machine is going: a checkpoint that is still waited for is so no longer."""
    pending = draft.session.checkpointing
    if pending is None:
        return
    draft.record(
        CheckpointFailed(
            incarnation=draft.session.incarnation,
            checkpoint_id=pending.checkpoint_id,
            attempt=pending.attempt,
            code=code,
            detail=detail,
            observed_at=context.now,
            retry_at=None,
        )
    )
    fail_fork(draft, context, code, detail)


def fail_fork(draft: Draft, context: Context, code: str, detail: str) -> None:
    """A fork that waits for a checkpoint comes to nothing, if there is one."""
    fork = draft.session.fork
    if fork is None:
        return
    draft.record(
        ForkFailed(
            incarnation=draft.session.incarnation,
            checkpoint_id=fork.checkpoint_id,
            session_ids=list(fork.session_ids),
            code=code,
            detail=detail,
            observed_at=context.now,
        )
    )


def usable(context: Context, checkpoint_id: CheckpointId) -> CheckpointFacts:
    """A checkpoint of the session's tree that can be restored; raises `Rejected`."""
    facts = context.checkpoint(checkpoint_id).facts
    if facts is None:
        raise Rejected(
            "checkpoint-not-found",
            f"there is no checkpoint {checkpoint_id} in the session's tree",
            "see `torpor checkpoint tree`",
        )
    if not facts.kept:
        raise Rejected("checkpoint-freed", f"{checkpoint_id} is freed", "use a checkpoint that is kept")
    return facts


def refuse_second(session: Session) -> None:
    """One at a time: the guest is paused for each."""
    if session.checkpointing is not None:
        raise Rejected(
            "checkpoint-in-progress",
            f"{session.checkpointing.checkpoint_id} is being taken",
            "wait until that has ended (session-checkpointed or checkpoint-failed)",
        )


def _name_newest(draft: Draft, command: CheckpointSession, context: Context) -> None:
    newest = draft.session.checkpoint
    if newest is None or newest.host_id is None:
        raise InvariantViolation(f"session {draft.session.session_id} sleeps in no checkpoint")
    draft.record(
        SessionCheckpointed(
            incarnation=newest.incarnation,
            host_id=newest.host_id,
            checkpoint_id=newest.checkpoint_id,
            fingerprint=newest.fingerprint,
            label=command.label,
            pause_ms=0.0,
            log_position=usable(context, newest.checkpoint_id).log_position,
            taken_at=newest.observed_at,
            observed_at=context.now,
        )
    )


def _machine(session: Session) -> Machine:
    if session.machine is None:
        raise InvariantViolation(f"session {session.session_id} has no machine to checkpoint")
    return session.machine

"""Forks sessions and takes them back: new sessions are made together or not at all, and a source is never harmed."""

from collections.abc import Sequence

from msgspec.structs import replace

from torpor_contracts.errors import InvariantViolation, Rejected
from torpor_contracts.ids import SessionId
from torpor_contracts.session import SessionRequested, VmStartRequested
from torpor_contracts.session_branches import (
    ForkRequested,
    ForkSession,
    Lineage,
    RollbackRequested,
    RollbackSession,
    SessionForked,
)
from torpor_contracts.session_reports import ReportVmCheckpointed
from torpor_scheduler.domain.placement import loads, taken
from torpor_scheduler.domain.session import INITIAL, Machine, Phase, Session
from torpor_scheduler.domain.session_decisions.asking import check_checkpoint_id, check_fork
from torpor_scheduler.domain.session_decisions.checkpointing import (
    drop_checkpoint,
    fail_fork,
    refuse_second,
    request_checkpoint,
    take_checkpoint,
    usable,
)
from torpor_scheduler.domain.session_decisions.context import Addressee, Context, Draft
from torpor_scheduler.domain.session_decisions.refusing import refuse_stale
from torpor_scheduler.domain.session_decisions.waking import end_exec, place, request_resume

ROLLED_BACK = "rolled-back: its session went back to an earlier checkpoint"


def fork(draft: Draft, command: ForkSession, addressee: Addressee, context: Context) -> None:
    """Make the sessions now, or ask for the checkpoint in which they are to begin."""
    check_fork(command, addressee, context.rules.limits)
    session = draft.session
    refuse_stale(session, command.incarnation)
    taken_ids = _taken(context, command.session_ids)
    if taken_ids:
        raise Rejected("session-exists", f"there is a session {taken_ids[0]} already", "choose other ids")
    metadata = session.metadata if command.metadata is None else command.metadata
    if command.source == "fresh" or (
        command.source == "auto" and command.checkpoint_id is None and session.phase is Phase.RUNNING
    ):
        _fork_fresh(draft, command.session_ids, metadata, context)
        return
    newest = session.checkpoint
    wanted = command.checkpoint_id or (None if newest is None else newest.checkpoint_id)
    if wanted is None:
        raise Rejected(
            "no-checkpoint",
            f"the session is {session.phase} and has no checkpoint yet",
            "fork it while it runs, or checkpoint it first",
        )
    facts = usable(context, wanted)
    made_here = newest is not None and newest.checkpoint_id == wanted
    lineage = Lineage(
        session_id=session.session_id,
        checkpoint_id=wanted,
        fingerprint=facts.fingerprint,
        made_on=newest.host_id if newest is not None and made_here else None,
        log_position=facts.log_position,
    )
    _make(draft, command.session_ids, metadata, lineage, context)


def settle_checkpointed(draft: Draft, context: Context, machine: Machine, report: ReportVmCheckpointed) -> None:
    """A checkpoint is there: make the sessions that wait for it, unless one of their ids was taken meanwhile."""
    waiting = draft.session.fork
    asked = take_checkpoint(draft, context, machine, report)
    if not asked or waiting is None:
        return
    taken_ids = _taken(context, waiting.session_ids)
    if taken_ids:
        fail_fork(draft, context, "session-exists", f"{taken_ids[0]} was made by somebody else meanwhile")
        return
    lineage = Lineage(
        session_id=draft.session.session_id,
        checkpoint_id=report.checkpoint_id,
        fingerprint=report.fingerprint or machine.fingerprint,
        made_on=machine.host_id,
        log_position=report.log_position,
    )
    _make(draft, waiting.session_ids, waiting.metadata, lineage, context)


def rollback(draft: Draft, command: RollbackSession, context: Context) -> None:
    """Stop the machine, if there is one; without one the session is woken from the checkpoint at once."""
    check_checkpoint_id(command.checkpoint_id)
    session = draft.session
    refuse_stale(session, command.incarnation)
    _check_can_go_back(session)
    facts = usable(context, command.checkpoint_id)
    machine = session.machine
    if machine is not None and not loads(context.offers, facts.fingerprint):
        # Once the machine is stopped there is no way back to it.
        raise Rejected(
            "checkpoint-not-loadable",
            f"no host can load a checkpoint of {facts.fingerprint}",
            "bring such a host up first; the session goes on as it is",
        )
    drop_checkpoint(draft, context, "rolled-back", "the session goes back to an earlier checkpoint")
    draft.record(
        RollbackRequested(
            session_id=session.session_id,
            host_id=None if machine is None else machine.host_id,
            vm_id=None if machine is None else machine.vm_id,
            incarnation=session.incarnation,
            checkpoint_id=facts.checkpoint_id,
            checkpoint_incarnation=facts.incarnation,
            fingerprint=facts.fingerprint,
            log_position=facts.log_position,
            recorded_at=facts.recorded_at,
            requested_at=context.now,
            deadline_at=context.after(context.rules.stop_timeout_s),
        )
    )
    for program in session.execs:
        end_exec(draft, context, program, "lost", ROLLED_BACK)
    if machine is None:
        request_resume(draft, context, "rollback")


def _fork_fresh(draft: Draft, session_ids: list[SessionId], metadata: dict[str, str], context: Context) -> None:
    session = draft.session
    if session.phase is not Phase.RUNNING:
        raise Rejected(
            "not-running", f"the session is {session.phase}", "fork it from its newest checkpoint, or once it runs"
        )
    refuse_second(session)
    draft.record(
        ForkRequested(
            session_id=session.session_id,
            incarnation=session.incarnation,
            checkpoint_id=context.checkpoint_id,
            session_ids=session_ids,
            metadata=metadata,
            requested_at=context.now,
        )
    )
    request_checkpoint(draft, context, context.checkpoint_id, "", "fork")


def _make(
    draft: Draft, session_ids: Sequence[SessionId], metadata: dict[str, str], lineage: Lineage, context: Context
) -> None:
    """Make the sessions, and ask for their machines: each takes its room from what hosts have left for the next."""
    source, offers = draft.session, context.offers
    draft.record(
        SessionForked(
            session_id=source.session_id,
            incarnation=source.incarnation,
            checkpoint_id=lineage.checkpoint_id,
            session_ids=list(session_ids),
            log_position=lineage.log_position,
            forked_at=context.now,
        )
    )
    for session_id, seed in zip(session_ids, context.seeds_of(session_ids), strict=True):
        made = draft.made[session_id] = Draft(INITIAL)
        made.record(
            SessionRequested(
                session_id=session_id,
                tenant_id=source.tenant_id,
                machine=source.spec,
                idle_after_s=source.idle_after_s,
                start_retry=source.start_retry,
                metadata=metadata,
                requested_at=context.now,
                lineage=lineage,
            )
        )
        place(made, replace(context, vm_id=seed.vm_id, offers=offers))
        for event in made.events:
            if isinstance(event, VmStartRequested):
                offers = tuple(
                    taken(offer, event.machine) if offer.host_id == event.host_id else offer for offer in offers
                )


def _taken(context: Context, session_ids: Sequence[SessionId]) -> list[SessionId]:
    """Those of the ids under which something stands already."""
    seeds = zip(session_ids, context.seeds_of(session_ids), strict=True)
    return [session_id for session_id, seed in seeds if seed.session is None or seed.session.phase is not Phase.ABSENT]


def _check_can_go_back(session: Session) -> None:
    match session.phase:
        case Phase.RUNNING | Phase.SUSPENDED | Phase.LOST | Phase.FAILED:
            return
        case Phase.ROLLING_BACK:
            raise Rejected("already-rolling-back", "the session goes back already", "wait until it runs")
        case Phase.SUSPENDING:
            raise Rejected("already-suspending", "the session is being suspended", "wait until it is suspended")
        case Phase.REQUESTED | Phase.PLACING | Phase.STARTING | Phase.RESUMING:
            raise Rejected("not-running", f"the session is {session.phase}", "wait until it runs")
        case _:
            raise InvariantViolation(f"rollback of a session in phase {session.phase}")

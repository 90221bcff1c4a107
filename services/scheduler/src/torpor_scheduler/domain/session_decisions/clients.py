"""Decides what clients ask of a session: each command happens, or is refused with what to do instead."""

from typing import assert_never

from torpor_contracts.errors import InvariantViolation, Rejected
from torpor_contracts.session import (
    ClientSessionCommand,
    CreateSession,
    ExecRequested,
    ExecSession,
    ResumeDeferred,
    ResumeSession,
    SessionRequested,
    SessionTerminated,
    SuspendSession,
    TerminateRequested,
    TerminateSession,
)
from torpor_contracts.session_branches import CheckpointSession, ForkSession, RollbackSession
from torpor_scheduler.domain.folding import RECENT_EXECS_MAX
from torpor_scheduler.domain.session import Phase
from torpor_scheduler.domain.session_decisions.asking import (
    check_addressee,
    check_program,
    check_reason,
    check_session,
)
from torpor_scheduler.domain.session_decisions.branches import fork, rollback
from torpor_scheduler.domain.session_decisions.checkpointing import checkpoint, drop_checkpoint, refuse_second
from torpor_scheduler.domain.session_decisions.context import Addressee, Context, Draft, HistoryNeeded
from torpor_scheduler.domain.session_decisions.refusing import failed, refuse_ended, refuse_stale
from torpor_scheduler.domain.session_decisions.sleeping import request_suspend
from torpor_scheduler.domain.session_decisions.waking import end_exec, place, request_resume


def decide_client(draft: Draft, command: ClientSessionCommand, addressee: Addressee, context: Context) -> None:
    """Let the command happen, or raise `Rejected`."""
    if isinstance(command, CreateSession):
        _create(draft, command, addressee, context)
        return
    session = draft.session
    if session.phase is Phase.ABSENT or session.tenant_id != addressee.tenant_id:
        # The answer is the same for a foreign session: whether it exists is nobody else's business.
        raise Rejected(
            "session-not-found", f"there is no session {addressee.session_id}", "see the list of sessions, or create it"
        )
    refuse_ended(session)
    match command:
        case ExecSession():
            _exec(draft, command, context)
        case SuspendSession():
            _suspend(draft, command, context)
        case ResumeSession():
            _resume(draft, command, context)
        case TerminateSession():
            _terminate(draft, command, context)
        case CheckpointSession():
            checkpoint(draft, command, context)
        case ForkSession():
            fork(draft, command, addressee, context)
        case RollbackSession():
            rollback(draft, command, context)
        case _ as never:
            assert_never(never)


def _create(draft: Draft, command: CreateSession, addressee: Addressee, context: Context) -> None:
    check_addressee(addressee)
    check_session(command, context.rules.limits)
    if draft.session.phase is not Phase.ABSENT:
        raise Rejected("session-exists", f"there is a session {addressee.session_id} already", "choose another id")
    draft.record(
        SessionRequested(
            session_id=addressee.session_id,
            tenant_id=addressee.tenant_id,
            machine=command.machine,
            idle_after_s=command.idle_after_s,
            start_retry=command.start_retry,
            metadata=command.metadata,
            requested_at=context.now,
        )
    )
    place(draft, context)


def _exec(draft: Draft, command: ExecSession, context: Context) -> None:
    session, limits = draft.session, context.rules.limits
    check_program(command, limits)
    if session.phase is Phase.FAILED:
        raise failed(session)
    refuse_stale(session, command.incarnation)
    in_flight = (program.exec_id for program in session.execs)
    if command.exec_id in in_flight or command.exec_id in session.recent_execs or context.exec_known:
        raise Rejected(
            "exec-exists", f"exec id {command.exec_id} was used in this session before", "choose another exec id"
        )
    if len(session.execs) >= limits.execs_max:
        raise Rejected(
            "too-many-execs",
            f"{len(session.execs)} programs of the session have not ended",
            "wait until one of them ends",
        )
    if context.exec_known is None and len(session.recent_execs) >= RECENT_EXECS_MAX:
        raise HistoryNeeded
    draft.record(ExecRequested(exec_id=command.exec_id, program=command.program, requested_at=context.now))
    if session.phase in (Phase.SUSPENDED, Phase.LOST):
        request_resume(draft, context, "work")


def _suspend(draft: Draft, command: SuspendSession, context: Context) -> None:
    session = draft.session
    refuse_stale(session, command.incarnation)
    match session.phase:
        case Phase.RUNNING:
            refuse_second(session)
            request_suspend(draft, context, "client")
        case Phase.SUSPENDED:
            raise Rejected("already-suspended", "the session is suspended", "nothing is left to do")
        case Phase.SUSPENDING:
            raise Rejected("already-suspending", "the session is being suspended", "wait until it is suspended")
        case Phase.REQUESTED | Phase.PLACING | Phase.STARTING | Phase.RESUMING | Phase.ROLLING_BACK:
            raise Rejected("not-running", f"the session is {session.phase}", "wait until it runs, or terminate it")
        case Phase.LOST:
            raise Rejected(
                "session-lost", "the session's machine is gone: there is nothing to suspend", "resume or terminate it"
            )
        case Phase.FAILED:
            raise failed(session)
        case _:
            raise InvariantViolation(f"suspend of a session in phase {session.phase}")


def _resume(draft: Draft, command: ResumeSession, context: Context) -> None:
    session = draft.session
    refuse_stale(session, command.incarnation)
    match session.phase:
        case Phase.SUSPENDED | Phase.LOST:
            request_resume(draft, context, "client")
        case Phase.FAILED:
            if session.checkpoint is None:
                raise Rejected(
                    "nothing-to-resume", "the failed session has no checkpoint", "terminate it, and create another"
                )
            request_resume(draft, context, "client")
        case Phase.SUSPENDING:
            if session.resume_wanted:
                raise Rejected("already-resuming", "the session resumes once it is suspended", "wait until it runs")
            draft.record(ResumeDeferred(incarnation=session.incarnation, requested_at=context.now))
        case Phase.RUNNING:
            raise Rejected("already-running", "the session runs", "nothing is left to do")
        case Phase.RESUMING | Phase.ROLLING_BACK:
            raise Rejected("already-resuming", "the session is being resumed", "wait until it runs")
        case Phase.REQUESTED | Phase.PLACING | Phase.STARTING:
            raise Rejected("already-starting", "the session is being started", "wait until it runs")
        case _:
            raise InvariantViolation(f"resume of a session in phase {session.phase}")


def _terminate(draft: Draft, command: TerminateSession, context: Context) -> None:
    check_reason(command.reason)
    drop_checkpoint(draft, context, "terminated", "the session is terminated")
    session = draft.session
    for program in session.execs:
        end_exec(draft, context, program, "cancelled", "the session was terminated")
    machine = session.machine
    draft.record(
        TerminateRequested(
            session_id=session.session_id,
            host_id=None if machine is None else machine.host_id,
            vm_id=None if machine is None else machine.vm_id,
            incarnation=session.incarnation,
            reason=command.reason,
            requested_at=context.now,
            deadline_at=context.after(context.rules.stop_timeout_s),
        )
    )
    if machine is None:
        draft.record(SessionTerminated(incarnation=session.incarnation, cause="no-machine", observed_at=context.now))

"""The one door to all decisions about a session, and about those that a fork of it makes."""

from collections.abc import Mapping
from typing import NamedTuple, assert_never

from torpor_contracts.ids import SessionId
from torpor_contracts.session import (
    CreateSession,
    ExecSession,
    ResumeSession,
    SessionCommand,
    SessionEvent,
    SuspendSession,
    TerminateSession,
)
from torpor_contracts.session_branches import CheckpointSession, ForkSession, RollbackSession
from torpor_contracts.session_reports import (
    FireSessionTimer,
    ReportExecEnded,
    ReportExecStarted,
    ReportHostDraining,
    ReportHostLost,
    ReportVmCheckpointed,
    ReportVmCheckpointFailed,
    ReportVmStarted,
    ReportVmStartFailed,
    ReportVmStopped,
    ReportVmSuspended,
    ReportVmSuspendFailed,
)
from torpor_scheduler.domain.session import Phase, Session
from torpor_scheduler.domain.session_decisions.clients import decide_client
from torpor_scheduler.domain.session_decisions.context import Addressee, Context, Draft
from torpor_scheduler.domain.session_decisions.reports import (
    decide_exec_report,
    decide_host_report,
    decide_machine_report,
)
from torpor_scheduler.domain.session_decisions.timeouts import decide_timer


class Decided(NamedTuple):
    """The events of the session itself, and those of each session that was made."""

    events: list[SessionEvent]
    made: Mapping[SessionId, list[SessionEvent]]


def decide(session: Session, command: SessionCommand, addressee: Addressee, context: Context) -> Decided:
    """The events of a command. A client's command makes some or raises `Rejected`; a report may make none."""
    draft = Draft(session)
    match command:
        case (
            CreateSession()
            | ExecSession()
            | SuspendSession()
            | ResumeSession()
            | TerminateSession()
            | CheckpointSession()
            | ForkSession()
            | RollbackSession()
        ):
            decide_client(draft, command, addressee, context)
        case _ if session.phase is Phase.ABSENT or session.tenant_id != addressee.tenant_id:
            pass  # a report that went astray: nothing here answers to it
        case (
            ReportVmStarted()
            | ReportVmStartFailed()
            | ReportVmSuspended()
            | ReportVmSuspendFailed()
            | ReportVmCheckpointed()
            | ReportVmCheckpointFailed()
            | ReportVmStopped()
        ):
            decide_machine_report(draft, command, context)
        case ReportExecStarted() | ReportExecEnded():
            decide_exec_report(draft, command, context)
        case ReportHostLost() | ReportHostDraining():
            decide_host_report(draft, command, context)
        case FireSessionTimer():
            decide_timer(draft, command, context)
        case _ as never:
            assert_never(never)
    return Decided(draft.events, {session_id: made.events for session_id, made in draft.made.items()})

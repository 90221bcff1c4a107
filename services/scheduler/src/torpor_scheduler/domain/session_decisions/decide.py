"""The one door to all decisions about a session."""

from typing import assert_never

from torpor_contracts.session import (
    CreateSession,
    ExecSession,
    ResumeSession,
    SessionCommand,
    SessionEvent,
    SuspendSession,
    TerminateSession,
)
from torpor_contracts.session_reports import (
    FireSessionTimer,
    ReportExecEnded,
    ReportExecStarted,
    ReportHostDraining,
    ReportHostLost,
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


def decide(session: Session, command: SessionCommand, addressee: Addressee, context: Context) -> list[SessionEvent]:
    """The events of a command. A client's command makes some or raises `Rejected`; a report may make none."""
    draft = Draft(session)
    match command:
        case CreateSession() | ExecSession() | SuspendSession() | ResumeSession() | TerminateSession():
            decide_client(draft, command, addressee, context)
        case _ if session.phase is Phase.ABSENT or session.tenant_id != addressee.tenant_id:
            pass  # a report that went astray: nothing here answers to it
        case (
            ReportVmStarted()
            | ReportVmStartFailed()
            | ReportVmSuspended()
            | ReportVmSuspendFailed()
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
    return draft.events

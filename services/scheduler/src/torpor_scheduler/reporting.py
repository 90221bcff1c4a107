"""What events of a machine mean to its session: the reports made from them, now or when they are found again later."""

from typing import Any, Final, NamedTuple, assert_never

from torpor_contracts.ids import SessionId, VmId
from torpor_contracts.session_reports import (
    ReportExecEnded,
    ReportExecStarted,
    ReportVmCheckpointed,
    ReportVmCheckpointFailed,
    ReportVmStarted,
    ReportVmStartFailed,
    ReportVmStopped,
    ReportVmSuspended,
    ReportVmSuspendFailed,
    SessionReport,
)
from torpor_contracts.vm import (
    VmCheckpointed,
    VmCheckpointFailed,
    VmExecContinued,
    VmExecEnded,
    VmExecStarted,
    VmStarted,
    VmStartFailed,
    VmStopped,
    VmSuspended,
    VmSuspendFailed,
)
from torpor_eventlog.codec import decode_event
from torpor_eventlog.port import EventLog, Recorded

OfMachine = VmStarted | VmStartFailed | VmSuspended | VmSuspendFailed | VmStopped
OfProgram = VmExecStarted | VmExecContinued | VmExecEnded
OfCheckpoint = VmCheckpointed | VmCheckpointFailed
Reported = OfMachine | OfProgram | OfCheckpoint
REPORTED: Final[tuple[type[Any], ...]] = (
    VmStarted,
    VmStartFailed,
    VmExecStarted,
    VmExecContinued,
    VmExecEnded,
    VmSuspended,
    VmSuspendFailed,
    VmCheckpointed,
    VmCheckpointFailed,
    VmStopped,
)
"""The events of a machine that its session is told of."""

ENDS: Final = (VmStartFailed, VmSuspended, VmStopped)
"""Those after which the machine is gone."""


class Told(NamedTuple):
    """A report, and the session it is for."""

    session_id: SessionId
    report: SessionReport


def report_of(event: Reported, position: int) -> Told:
    """The report that the event at `position` makes."""
    if isinstance(event, OfProgram):
        return Told(event.session_id, _of_program(event, position))
    if isinstance(event, OfCheckpoint):
        return Told(event.session_id, _of_checkpoint(event, position))
    return Told(event.session_id, _of_machine(event, position))


async def told_by(log: EventLog, vm_id: VmId) -> list[tuple[Recorded, Reported]]:
    """All that a machine's own stream has to say to its session, in order."""
    decoded = [(recorded, decode_event(recorded)) for recorded in await log.load(vm_id)]
    return [(recorded, event) for recorded, event in decoded if isinstance(event, REPORTED)]


def _of_machine(event: OfMachine, position: int) -> SessionReport:
    vm_id, incarnation = event.vm_id, event.incarnation
    match event:
        case VmStarted():
            return ReportVmStarted(
                vm_id=vm_id,
                incarnation=incarnation,
                observed_at=event.observed_at,
                position=position,
                execs=event.execs,
            )
        case VmStartFailed():
            return ReportVmStartFailed(
                vm_id=vm_id,
                incarnation=incarnation,
                code=event.code,
                detail=event.detail,
                retryable=event.retryable,
                position=position,
            )
        case VmSuspended():
            return ReportVmSuspended(
                vm_id=vm_id,
                incarnation=incarnation,
                checkpoint_id=event.checkpoint_id,
                fingerprint=event.fingerprint,
                observed_at=event.observed_at,
                position=position,
            )
        case VmSuspendFailed():
            return ReportVmSuspendFailed(
                vm_id=vm_id,
                incarnation=incarnation,
                checkpoint_id=event.checkpoint_id,
                code=event.code,
                detail=event.detail,
                position=position,
            )
        case VmStopped():
            return ReportVmStopped(
                vm_id=vm_id,
                incarnation=incarnation,
                expected=event.expected,
                cause=event.cause,
                observed_at=event.observed_at,
                position=position,
            )
        case _ as never:
            assert_never(never)


def _of_checkpoint(event: OfCheckpoint, position: int) -> SessionReport:
    match event:
        case VmCheckpointed():
            return ReportVmCheckpointed(
                vm_id=event.vm_id,
                incarnation=event.incarnation,
                checkpoint_id=event.checkpoint_id,
                fingerprint=event.fingerprint,
                pause_ms=event.pause_ms,
                log_position=event.log_position,
                taken_at=event.taken_at,
                observed_at=event.observed_at,
                position=position,
            )
        case VmCheckpointFailed():
            return ReportVmCheckpointFailed(
                vm_id=event.vm_id,
                incarnation=event.incarnation,
                checkpoint_id=event.checkpoint_id,
                code=event.code,
                detail=event.detail,
                retryable=event.retryable,
                position=position,
            )
        case _ as never:
            assert_never(never)


def _of_program(event: OfProgram, position: int) -> SessionReport:
    vm_id, incarnation = event.vm_id, event.incarnation
    match event:
        case VmExecStarted() | VmExecContinued():
            return ReportExecStarted(
                vm_id=vm_id,
                incarnation=incarnation,
                exec_id=event.exec_id,
                observed_at=event.observed_at,
                position=position,
            )
        case VmExecEnded():
            return ReportExecEnded(
                vm_id=vm_id,
                incarnation=incarnation,
                exec_id=event.exec_id,
                outcome=event.outcome,
                exit_code=event.exit_code,
                detail=event.detail,
                output_bytes=event.output_bytes,
                observed_at=event.observed_at,
                position=position,
            )
        case _ as never:
            assert_never(never)

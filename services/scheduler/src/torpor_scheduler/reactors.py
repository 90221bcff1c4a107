"""Turns events into commands: to vm-hosts what sessions ask for, to sessions what hosts observed; and sets timers.

At least once, in order per stream: a program asked for before a suspend reaches the host before it. Command ids are
made from the event's position, so a repeat changes nothing.
"""

from typing import Any, Final

import msgspec

from torpor_contracts.host import HostDraining, HostLost
from torpor_contracts.ids import HostId, SessionId, TenantId, VmId
from torpor_contracts.session import (
    ExecRequested,
    SessionRecovered,
    SessionResumed,
    SessionStarted,
    SessionStartFailed,
    SuspendFailed,
    SuspendRequested,
    SuspendWithdrawn,
    TerminateRequested,
    VmStartRequested,
)
from torpor_contracts.session_branches import CheckpointRequested, RollbackRequested
from torpor_contracts.session_reports import TimerKind
from torpor_contracts.vm import StartVm, StopVm, SuspendVm, VmStarted
from torpor_eventlog.port import Recorded
from torpor_messaging.service import ReactorRoute
from torpor_messaging.service_ports import ServicePorts
from torpor_scheduler.domain.session import Phase, Session, unstarted
from torpor_scheduler.domain.timers import timer_of
from torpor_scheduler.evacuation import Evacuation
from torpor_scheduler.orders import Order, checkpoint_order, exec_order, exec_orders, pending_order
from torpor_scheduler.projections import SESSION_EVENTS
from torpor_scheduler.reporting import ENDS, REPORTED, OfCheckpoint, OfProgram, Reported, report_of, told_by
from torpor_scheduler.sending import SERVICE, Sender
from torpor_scheduler.streams import Streams
from torpor_scheduler.timing import TIMER, TimerNote

NAME: Final = "scheduler"

SWEPT_ONLY: Final[tuple[TimerKind, ...]] = ("exec",)
"""Timers that may be late by a sweep, and would be set anew with every program: left to the sweeper."""

UNHEARD: Final = ("start-timed-out", "host-lost")
"""Failures of a start that the host has not reported: its machine may come up yet, and must not stay."""


class Reactor:
    """The scheduler's reactions; one follower, so that what belongs to one stream keeps its order."""

    def __init__(self, ports: ServicePorts, streams: Streams, sender: Sender, evacuation: Evacuation) -> None:
        self._log = ports.log
        self._timers = ports.timers
        self._streams = streams
        self._sender = sender
        self._evacuation = evacuation

    def route(self) -> ReactorRoute:
        """For the service."""
        return ReactorRoute(name=NAME, reacts_to=(*SESSION_EVENTS, *REPORTED, HostLost, HostDraining), react=self.react)

    async def react(self, event: Any, recorded: Recorded) -> None:
        """React to one event."""
        if isinstance(event, SESSION_EVENTS):
            await self._follow_session(event, recorded)
        elif isinstance(event, REPORTED):
            await self._report(event, recorded)
        elif isinstance(event, HostLost):
            await self._evacuation.host_lost(event.host_id, event.last_seen_at, recorded.position)
        elif isinstance(event, HostDraining):
            await self._evacuation.host_draining(event.host_id, recorded.position)

    async def _follow_session(self, event: Any, recorded: Recorded) -> None:
        session = await self._streams.session(SessionId(recorded.stream))
        if session is None:
            return
        match event:
            case VmStartRequested():
                await self._ask(event.vm_id, StartVm, session, recorded)
            case SuspendRequested():
                await self._ask(event.vm_id, SuspendVm, session, recorded)
            case TerminateRequested() if event.host_id is not None and event.vm_id is not None:
                await self._stop(event.host_id, event.vm_id, event.incarnation, event.reason, recorded)
            case RollbackRequested() if event.host_id is not None and event.vm_id is not None:
                await self._stop(event.host_id, event.vm_id, event.incarnation, "its session goes back", recorded)
            case CheckpointRequested():
                await self._checkpoint(event, session, recorded)
            case SessionStartFailed() if event.code in UNHEARD:
                await self._stop(event.host_id, event.vm_id, event.incarnation, event.code, recorded)
            case ExecRequested():
                await self._dispatch(event, session, recorded)
            case SessionStarted() | SessionResumed() | SessionRecovered() | SuspendFailed() | SuspendWithdrawn():
                await self._dispatch_waiting(event.incarnation, session, recorded)
            case _:
                pass
        await self._set_timer(session, recorded)

    async def _ask(self, vm_id: VmId, wanted: type[StartVm | SuspendVm], session: Session, recorded: Recorded) -> None:
        """Ask for what the event asked for, unless the session has gone on since and needs it no longer.

        Never for something else: the id is made from the event, and one id is for one command only.
        """
        current = session.machine is not None and session.machine.vm_id == vm_id
        order = pending_order(session) if current else None
        if order is not None and isinstance(order.command, wanted):
            await self._order(order, recorded)

    async def _checkpoint(self, event: CheckpointRequested, session: Session, recorded: Recorded) -> None:
        """Ask for a checkpoint while this very try is waited for."""
        order, pending = checkpoint_order(session), session.checkpointing
        if order is None or pending is None:
            return
        if (pending.checkpoint_id, pending.attempt) == (event.checkpoint_id, event.attempt):
            await self._order(order, recorded)

    async def _stop(self, host_id: HostId, vm_id: VmId, incarnation: int, reason: str, recorded: Recorded) -> None:
        command = StopVm(session_id=SessionId(recorded.stream), incarnation=incarnation, reason=reason)
        await self._order(Order(host_id=host_id, vm_id=vm_id, command=command), recorded)

    async def _dispatch(self, event: ExecRequested, session: Session, recorded: Recorded) -> None:
        """Send a program to a machine that runs, also to one about to be suspended: it takes its place in the order."""
        machine = session.machine
        waits = any(program.exec_id == event.exec_id for program in unstarted(session))
        if waits and machine is not None and session.phase in (Phase.RUNNING, Phase.SUSPENDING):
            await self._order(exec_order(session.session_id, machine, event), recorded)

    async def _dispatch_waiting(self, incarnation: int, session: Session, recorded: Recorded) -> None:
        """Send the programs that waited for this machine; those asked for later follow by themselves."""
        machine = session.machine
        if machine is None or machine.incarnation != incarnation or machine.started_at is None:
            return
        versions = {program.version for program in unstarted(session) if program.version < recorded.version}
        for version, order in await exec_orders(self._log, session, versions):
            await self._order(order, recorded, f"-{version}")

    async def _order(self, order: Order, recorded: Recorded, suffix: str = "") -> None:
        command_id = f"{NAME}-{recorded.position}{suffix}"
        await self._sender.order(TenantId(recorded.tenant_id), order, command_id, recorded)

    async def _set_timer(self, session: Session, recorded: Recorded) -> None:
        timer = timer_of(session)
        if timer is None or timer.generation != recorded.version or timer.kind in SWEPT_ONLY:
            return
        note = TimerNote(
            kind=timer.kind,
            incarnation=session.incarnation,
            generation=timer.generation,
            position=recorded.position,
        )
        await self._timers.set(
            session.tenant_id, SERVICE, TIMER, session.session_id, timer.due_at, msgspec.json.encode(note)
        )

    async def _report(self, event: Reported, recorded: Recorded) -> None:
        if isinstance(event, ENDS):
            await self._report_again(event, recorded)
        session_id, report = report_of(event, recorded.position)
        command_id = f"{NAME}-{recorded.position}"
        await self._sender.to_session(TenantId(recorded.tenant_id), session_id, report, command_id, recorded)
        if isinstance(event, VmStarted):
            await self._stop_stray(event, recorded)

    async def _report_again(self, event: Reported, recorded: Recorded) -> None:
        """What a machine said of what its session still waits for: before its end, lest that be lost."""
        session = await self._streams.session(event.session_id)
        if session is None or not (session.execs or session.checkpointing):
            return
        for earlier, told in await told_by(self._log, event.vm_id):
            if earlier.position < recorded.position and _waits_for(session, told):
                session_id, report = report_of(told, earlier.position)
                command_id = f"{NAME}-{earlier.position}-again"
                await self._sender.to_session(TenantId(recorded.tenant_id), session_id, report, command_id, earlier)

    async def _stop_stray(self, event: VmStarted, recorded: Recorded) -> None:
        """A machine is asked for before it starts: if it is not its session's now, it never will be again."""
        session = await self._streams.session(event.session_id)
        if session is None or event.vm_id in _kept(session):
            return
        command = StopVm(
            session_id=event.session_id, incarnation=event.incarnation, reason="its session has gone on without it"
        )
        await self._order(Order(host_id=event.host_id, vm_id=event.vm_id, command=command), recorded, "-stray")


def _waits_for(session: Session, told: Reported) -> bool:
    """Whether the session has not been told yet, or may not have."""
    if isinstance(told, OfProgram):
        return any(program.exec_id == told.exec_id for program in session.execs)
    pending = session.checkpointing
    return isinstance(told, OfCheckpoint) and pending is not None and pending.checkpoint_id == told.checkpoint_id


def _kept(session: Session) -> set[VmId]:
    """The machines that a session may yet run on: its own, and one given up that it has not replaced."""
    machines = [session.machine, session.lost.machine if session.lost and session.phase is Phase.LOST else None]
    return {machine.vm_id for machine in machines if machine is not None}

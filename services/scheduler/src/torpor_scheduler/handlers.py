"""Turns commands into events of sessions and hosts: loads, decides, appends; it asks no host for anything itself."""

from collections.abc import Sequence
from typing import get_args

from torpor_contracts.errors import Rejected
from torpor_contracts.host import HostCommand, HostEvent
from torpor_contracts.ids import SYSTEM_TENANT, CheckpointId, HostId, SessionId, VmId, is_token
from torpor_contracts.replies import Receipt
from torpor_contracts.session import CreateSession, ExecSession, SessionEvent, VmStartRequested
from torpor_contracts.session_reports import (
    ReportExecEnded,
    ReportExecStarted,
    ReportHostDraining,
    ReportVmStarted,
    ReportVmSuspendFailed,
)
from torpor_messaging.service import Incoming
from torpor_messaging.service_ports import ServicePorts
from torpor_scheduler.domain.host import Host, HostContext, decide_host
from torpor_scheduler.domain.session import Session
from torpor_scheduler.domain.session_decisions import Addressee, Context, HistoryNeeded, Rules, decide
from torpor_scheduler.domain.session_decisions.asking import check_addressee
from torpor_scheduler.fleet import Fleet
from torpor_scheduler.projections import EXECS, exec_key
from torpor_scheduler.streams import Streams
from torpor_scheduler.watch import HostWatch

HOST_COMMANDS = get_args(HostCommand)
PLACES_NOTHING = (
    ReportVmStarted,
    ReportVmSuspendFailed,
    ReportExecStarted,
    ReportExecEnded,
    ReportHostDraining,
)
"""Commands that never lead to a placement, so that hosts need not be looked at."""


class Handlers:
    """Handles every command of the scheduler."""

    def __init__(self, ports: ServicePorts, rules: Rules, streams: Streams, fleet: Fleet, watch: HostWatch) -> None:
        self._ports = ports
        self._rules = rules
        self._streams = streams
        self._fleet = fleet
        self._watch = watch

    async def handle(self, incoming: Incoming) -> Receipt | None:
        """Answer the receipt, or None when there was nothing to record; raises `Rejected` to refuse."""
        if isinstance(incoming.command, HOST_COMMANDS):
            return await self._host(incoming)
        return await self._session(incoming)

    async def _host(self, incoming: Incoming) -> Receipt | None:
        if incoming.tenant_id != SYSTEM_TENANT:
            raise Rejected("operators-only", "hosts belong to the operator", "use the tenant 'system'")
        host_id = HostId(incoming.target)
        if not is_token(host_id) or not host_id.startswith("host-"):
            raise Rejected("illegal-host-id", f"{host_id!r} cannot be a host's id", "begin it with 'host-'")

        def decide_it(host: Host) -> Sequence[HostEvent]:
            seen_at = self._watch.seen_at(host_id, host.boot_id)
            return decide_host(
                host, incoming.command, host_id, HostContext(now=self._ports.clock.now(), seen_at=seen_at)
            )

        receipt = await self._streams.decide_host(incoming, host_id, decide_it)
        self._fleet.forget()
        return receipt

    async def _session(self, incoming: Incoming) -> Receipt | None:
        command = incoming.command
        addressee = Addressee(session_id=SessionId(incoming.target), tenant_id=incoming.tenant_id)
        if isinstance(command, CreateSession):
            # Before the stream is read: nobody may as much as ask for a stream by a name that is no session's.
            check_addressee(addressee)
        if not isinstance(command, PLACES_NOTHING):
            await self._fleet.refresh()
        try:
            return await self._decide(incoming, addressee, exec_known=None)
        except HistoryNeeded:
            return await self._decide(incoming, addressee, exec_known=await self._exec_known(addressee, command))

    async def _decide(self, incoming: Incoming, addressee: Addressee, *, exec_known: bool | None) -> Receipt | None:
        vm_id = VmId(self._ports.ids.new("vm"))
        checkpoint_id = CheckpointId(self._ports.ids.new("ckp"))

        def decide_it(session: Session) -> Sequence[SessionEvent]:
            # A race that was lost is decided again: its claim must not count twice.
            self._fleet.settle(vm_id, None)
            context = Context(
                now=self._ports.clock.now(),
                vm_id=vm_id,
                checkpoint_id=checkpoint_id,
                offers=self._fleet.offers(),
                exec_known=exec_known,
                rules=self._rules,
            )
            events = decide(session, incoming.command, addressee, context)
            for event in events:
                if isinstance(event, VmStartRequested):
                    self._fleet.claim(event)
            return events

        position: int | None = None
        try:
            receipt = await self._streams.decide_session(incoming, addressee.session_id, decide_it)
            position = None if receipt is None else receipt.position
            return receipt
        finally:
            self._fleet.settle(vm_id, position)

    async def _exec_known(self, addressee: Addressee, command: ExecSession) -> bool:
        """Whether the id was used before, as far as the view has come."""
        async with self._ports.views.reading() as rows:
            row = await rows.get(EXECS, exec_key(addressee.session_id, command.exec_id))
        return row is not None

"""Turns commands into events of sessions and hosts: loads, decides, appends; it asks no host for anything itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

import msgspec
from msgspec.structs import replace

from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.host import HostCommand, HostEvent
from torpor_contracts.ids import SYSTEM_TENANT, CheckpointId, HostId, SessionId, VmId, is_token
from torpor_contracts.replies import Receipt
from torpor_contracts.session import CreateSession, ExecSession, VmStartRequested
from torpor_contracts.session_branches import ForkSession
from torpor_contracts.session_reports import (
    ReportExecEnded,
    ReportExecStarted,
    ReportHostDraining,
    ReportVmCheckpointFailed,
    ReportVmStarted,
    ReportVmSuspendFailed,
)
from torpor_messaging.service import Incoming
from torpor_messaging.service_ports import ServicePorts
from torpor_scheduler.domain.host import Host, HostContext, decide_host
from torpor_scheduler.domain.session import Session
from torpor_scheduler.domain.session_decisions import (
    Addressee,
    CheckpointNeeded,
    Context,
    HistoryNeeded,
    LookedUp,
    Rules,
    Seed,
    SeedsNeeded,
    decide,
)
from torpor_scheduler.domain.session_decisions.asking import check_addressee
from torpor_scheduler.fleet import Fleet
from torpor_scheduler.projections import EXECS, exec_key
from torpor_scheduler.streams import Streams
from torpor_scheduler.trees import Trees
from torpor_scheduler.watch import HostWatch

HOST_COMMANDS = get_args(HostCommand)
PLACES_NOTHING = (
    ReportVmStarted,
    ReportVmSuspendFailed,
    ReportVmCheckpointFailed,
    ReportExecStarted,
    ReportExecEnded,
    ReportHostDraining,
)
"""Commands that never lead to a placement, so that hosts need not be looked at."""


QUESTIONS_MAX: Final = 6
"""How often a decision may ask for something that is to be looked up first."""


class Handlers:
    """Handles every command of the scheduler."""

    def __init__(self, ports: ServicePorts, rules: Rules, streams: Streams, fleet: Fleet, watch: HostWatch) -> None:
        self._ports = ports
        self._rules = rules
        self._streams = streams
        self._trees = Trees(ports.log)
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
        if isinstance(command, ForkSession):
            command = self._with_ids(command)
        if not isinstance(command, PLACES_NOTHING):
            await self._fleet.refresh()
        known = _Known()
        for _ in range(QUESTIONS_MAX):
            try:
                return await self._decide(incoming, command, addressee, known)
            except HistoryNeeded:
                known.exec_id = await self._exec_known(addressee, command)
            except CheckpointNeeded as needed:
                known.checkpoint_ids.append(needed.checkpoint_id)
            except SeedsNeeded as needed:
                known.vm_ids = {session_id: VmId(self._ports.ids.new("vm")) for session_id in needed.session_ids}
        raise Transient(f"{addressee.session_id} changes faster than its surroundings can be looked at", 0.2)

    async def _decide(self, incoming: Incoming, command: Any, addressee: Addressee, known: "_Known") -> Receipt | None:
        context = Context(
            now=self._ports.clock.now(),
            vm_id=VmId(self._ports.ids.new("vm")),
            checkpoint_id=CheckpointId(self._ports.ids.new("ckp")),
            exec_known=known.exec_id,
            rules=self._rules,
        )
        vm_ids = [context.vm_id, *known.vm_ids.values()]
        checkpoints: dict[CheckpointId, LookedUp] = {}

        async def look_up() -> Mapping[str, int]:
            session = await self._streams.session(addressee.session_id) if known.checkpoint_ids else None
            for checkpoint_id in known.checkpoint_ids:
                checkpoints[checkpoint_id] = (
                    LookedUp(version=0, facts=None)
                    if session is None
                    else await self._trees.look_up(session, checkpoint_id)
                )
            return {checkpoint_id: found.version for checkpoint_id, found in checkpoints.items()}

        def decide_it(session: Session, others: Mapping[SessionId, Session | None]) -> list[tuple[str, msgspec.Struct]]:
            # A race that was lost is decided again: its claims must not count twice.
            self._settle(vm_ids, None)
            decided = decide(
                session,
                command,
                addressee,
                replace(
                    context,
                    now=self._ports.clock.now(),
                    offers=self._fleet.offers(),
                    checkpoints=checkpoints,
                    seeds={other: Seed(session=others[other], vm_id=known.vm_ids[other]) for other in others},
                ),
            )
            events: list[tuple[str, msgspec.Struct]] = [(addressee.session_id, event) for event in decided.events]
            events += [(made, event) for made, its in decided.made.items() for event in its]
            for _, event in events:
                if isinstance(event, VmStartRequested):
                    self._fleet.claim(event)
            return events

        position: int | None = None
        try:
            receipt = await self._streams.decide_session(
                incoming, addressee.session_id, list(known.vm_ids), decide_it, look_up
            )
            position = None if receipt is None else receipt.position
            return receipt
        finally:
            self._settle(vm_ids, position)

    def _settle(self, vm_ids: Sequence[VmId], position: int | None) -> None:
        for vm_id in vm_ids:
            self._fleet.settle(vm_id, position)

    def _with_ids(self, command: ForkSession) -> ForkSession:
        """The command with ids for the new sessions, as far as it asks for a number that may be."""
        wanted = command.count if not command.session_ids else 0
        if not 1 <= wanted <= self._rules.limits.forks_max:
            return command
        return replace(command, session_ids=[SessionId(self._ports.ids.new("ses")) for _ in range(wanted)])

    async def _exec_known(self, addressee: Addressee, command: ExecSession) -> bool:
        """Whether the id was used before, as far as the view has come."""
        async with self._ports.views.reading() as rows:
            row = await rows.get(EXECS, exec_key(addressee.session_id, command.exec_id))
        return row is not None


@dataclass
class _Known:
    """What a decision has asked for so far: an exec id's past, checkpoints, and ids for machines of new sessions."""

    exec_id: bool | None = None
    checkpoint_ids: list[CheckpointId] = field(default_factory=list)
    vm_ids: dict[SessionId, VmId] = field(default_factory=dict)

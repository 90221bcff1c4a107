"""What the log says of this host's machines: records decisions and observations, knows every machine that may exist.

This process alone writes the streams of its machines, so what it knows of them is what the log says.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.host import HostCapacity
from torpor_contracts.ids import CommandId, ExecId, SessionId, TenantId, VmId
from torpor_contracts.replies import Receipt
from torpor_contracts.session import MachineSpec, RetryRule
from torpor_contracts.vm import VmEvent
from torpor_eventlog.deciding import Decisions
from torpor_messaging.service import Incoming
from torpor_messaging.service_ports import ServicePorts
from torpor_vm_host.domain import tenure
from torpor_vm_host.domain.observations import Place
from torpor_vm_host.domain.tenure import UNSAID, Tenure, follow
from torpor_vm_host.domain.vm import ABSENT, Claim, Ended, VmState, claim_of, evolve, execs_of, may_exist
from torpor_vm_host.host import Host

STREAMS_KEPT: Final = 512
RECORD_RETRY: Final = RetryRule(attempts_max=8, backoff_s=0.1, backoff_s_max=5.0, deadline_s=30.0)
"""How an observation is recorded again while the log is away; afterwards upkeep makes it anew."""

Decide = Callable[[VmState, Place], Sequence[VmEvent]]
Given = Callable[[], Awaitable[Mapping[str, int]]]


class About(msgspec.Struct, frozen=True, kw_only=True):
    """On whose behalf an observation is recorded, and what led to it."""

    tenant_id: TenantId
    causation_id: str
    correlation_id: str

    @staticmethod
    def command(incoming: Incoming) -> "About":
        """What a command led to."""
        return About(
            tenant_id=incoming.tenant_id,
            causation_id=incoming.command_id,
            correlation_id=incoming.correlation_id,
        )


class _Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of an observation's commit; its id is new, so what makes it happen once is the state it is made of."""

    tenant_id: TenantId
    command_id: CommandId
    causation_id: str
    correlation_id: str
    request_digest: bytes


class _Foreign(msgspec.Struct, frozen=True):
    """A stream that is not a machine's."""


_FOREIGN: Final = _Foreign()


class Ledger:
    """Folds and appends to the streams of this host's machines. `capacity` is what they may take in all."""

    def __init__(self, host: Host, ports: ServicePorts) -> None:
        self._host = host
        self._ports = ports
        self._decisions = Decisions[VmState | _Foreign](ports.log, _initial, _fold, ports.clock.now, STREAMS_KEPT)
        self._sessions = Decisions[Tenure](ports.log, lambda: UNSAID, follow, ports.clock.now, STREAMS_KEPT)
        self._reserved: dict[VmId, MachineSpec] = {}
        self.known: dict[VmId, VmState] = {}
        """Every machine of this host that may exist, or may hold something still."""

    def place(self, vm_id: VmId) -> Place:
        """Here and now."""
        host = self._host
        return Place(vm_id=vm_id, host_id=host.host_id, boot_id=host.boot_id, now=self._ports.clock.now())

    async def state(self, vm_id: VmId) -> VmState:
        """The machine's present state."""
        folded, _ = await self._decisions.fold(vm_id)
        state = _own(folded, vm_id)
        self._note(vm_id, state)
        return state

    async def wanted(self, claim: Claim) -> bool:
        """Whether the session would have the machine run on."""
        tenure_now, _ = await self._sessions.fold(claim.session_id)
        return tenure_now.wants(claim.vm_id)

    async def last_position(self, vm_id: VmId) -> int:
        """The position of the last event in the machine's stream; 0 when there is none."""
        recorded = await self._ports.log.load(vm_id)
        return recorded[-1].position if recorded else 0

    async def command(self, incoming: Incoming, vm_id: VmId, decide: Decide) -> Receipt | None:
        """Decide a command and record its events; see `Decisions.execute`.

        What the operator does to a tenant's machine is recorded as the tenant's.
        """
        claim = claim_of(await self.state(vm_id))
        cause = incoming if claim is None else msgspec.structs.replace(incoming, tenant_id=claim.tenant_id)
        return await self._decisions.execute(
            cause, vm_id, lambda folded: decide(_own(folded, vm_id), self.place(vm_id))
        )

    async def command_of(
        self,
        incoming: Incoming,
        vm_id: VmId,
        session_id: SessionId,
        decide: Decide,
        exec_id: ExecId | None = None,
    ) -> Receipt | None:
        """Decide a command that begins something in the name of a session, and record its events.

        Refused when the session has another machine by now, or none; should it come to that before the events are in
        the log, it is decided again. A program that an earlier machine of the session had begun is not begun again.
        """
        seen, begun = UNSAID, False

        async def session() -> Mapping[str, int]:
            nonlocal seen, begun
            seen, version = await self._sessions.fold(session_id)
            begun = exec_id is not None and await self._begun(exec_id, seen.before)
            return {session_id: version}

        def decide_for_session(folded: VmState | _Foreign) -> Sequence[VmEvent]:
            place = self.place(vm_id)
            events = decide(_own(folded, vm_id), place)
            if events:
                tenure.check(seen, place)
            return [] if begun else events

        return await self._decisions.execute(incoming, vm_id, decide_for_session, given=session)

    async def _begun(self, exec_id: ExecId, machines: Sequence[VmId]) -> bool:
        for vm_id in machines:
            state, _ = await self._decisions.fold(vm_id)
            if not isinstance(state, _Foreign) and exec_id in execs_of(state):
                return True
        return False

    async def observe(self, about: About, vm_id: VmId, decide: Decide, *, given: Given | None = None) -> VmState:
        """Record what was observed, and answer the state after it; raises `Transient` when the log stays away.

        `given`: other streams that it rests on, see `Decisions.execute`.
        """
        command_id = self._ports.ids.new("system/vm-host")
        cause = _Observation(
            tenant_id=about.tenant_id,
            command_id=CommandId(command_id),
            causation_id=about.causation_id,
            correlation_id=about.correlation_id,
            request_digest=hashlib.sha256(command_id.encode()).digest(),
        )
        clock = self._ports.clock
        give_up_s = clock.monotonic_s() + RECORD_RETRY.deadline_s
        for attempt in range(1, RECORD_RETRY.attempts_max + 1):
            try:
                await self._decisions.execute(
                    cause, vm_id, lambda folded: decide(_own(folded, vm_id), self.place(vm_id)), given=given
                )
                return await self.state(vm_id)
            except Transient as error:
                pause_s = min(RECORD_RETRY.backoff_s * 2 ** (attempt - 1), RECORD_RETRY.backoff_s_max)
                if attempt == RECORD_RETRY.attempts_max or clock.monotonic_s() + pause_s > give_up_s:
                    raise
                await clock.sleep(max(pause_s, min(error.retry_after_s, RECORD_RETRY.backoff_s_max)))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def reserve(self, vm_id: VmId, machine: MachineSpec, capacity: HostCapacity) -> bool:
        """Set room aside for a machine that is about to be claimed; whether there is enough."""
        taken = {vm_id_: spec for vm_id_, state in self.known.items() if (spec := _spec(state)) is not None}
        taken |= self._reserved
        taken[vm_id] = machine
        fits = (
            len(taken) <= capacity.vms_max
            and sum(spec.vcpus for spec in taken.values()) <= capacity.vcpus
            and sum(spec.memory_mib for spec in taken.values()) <= capacity.memory_mib
            and sum(spec.disk_mib for spec in taken.values()) <= capacity.disk_mib
        )
        if fits:
            self._reserved[vm_id] = machine
        return fits

    def settle_reservation(self, vm_id: VmId) -> None:
        """Drop the room set aside: from now on the machine's claim counts, if it has one."""
        self._reserved.pop(vm_id, None)

    def _note(self, vm_id: VmId, state: VmState) -> None:
        claim = claim_of(state)
        if may_exist(state) and (claim is None or claim.host_id == self._host.host_id):
            self.known[vm_id] = state
        else:
            self.known.pop(vm_id, None)


def _initial() -> VmState | _Foreign:
    return ABSENT


def _fold(state: VmState | _Foreign, event: Any) -> VmState | _Foreign:
    if isinstance(state, _Foreign) or not isinstance(event, VmEvent):
        return _FOREIGN
    return evolve(state, event)


def _own(state: VmState | _Foreign, vm_id: VmId) -> VmState:
    if isinstance(state, _Foreign):
        raise Rejected("id-taken", f"{vm_id} is the id of something else", "name a machine")
    return state


def _spec(state: VmState) -> MachineSpec | None:
    claim = claim_of(state)
    return None if claim is None or isinstance(state, Ended) else claim.machine

"""The `resources` view: every claim and release, whose each machine is, and how far its clean-up has come."""

from typing import Any, Final, get_args

import msgspec

from torpor_contracts.cleanup import CleanupEvent, CleanupProposed
from torpor_contracts.ids import SYSTEM_TENANT, HostId, SessionId, TenantId, VmId
from torpor_contracts.vm import ResourceRef, VmClaimed, VmEvent, VmReleased
from torpor_eventlog.instants import to_us
from torpor_eventlog.port import Recorded
from torpor_eventlog.views_port import Rows, Table, WritableRows
from torpor_reaper.domain.cleanup import IDLE, CleanupState, Confirmed, GivenUp, Proposed, evolve
from torpor_reaper.domain.standing import (
    SESSION_STEPS,
    Held,
    MachineFacts,
    SessionFacts,
    evolve_machine,
    evolve_session,
    whose,
)

PAGE: Final = 500
"""Rows read at a time where one event concerns many."""

_VM_EVENTS: Final = get_args(VmEvent)
_CLEANUP_EVENTS: Final = get_args(CleanupEvent)


class ResourceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One claim; `held` is 1 until it was observed gone."""

    key: str
    tenant_id: str
    session_id: str
    vm_id: VmId
    host_id: HostId
    incarnation: int
    kind: str
    name: str
    held: int
    claimed_us: int
    claimed_position: int
    released_us: int | None = None
    released_position: int | None = None


class MachineRow(msgspec.Struct, frozen=True, kw_only=True):
    """A machine the log has heard of.

    `held_on`: its host, while a session holds it there. `candidate_on`: its host, while there is something to clean up.
    `living_for`: the session it was claimed for, until it has ended.
    """

    vm_id: VmId
    tenant_id: TenantId
    held_on: str | None
    candidate_on: str | None
    candidate: int
    living_for: str | None
    facts: MachineFacts
    cleanup: CleanupState


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Which machine a session holds."""

    session_id: str
    facts: SessionFacts


RESOURCES: Final = Table(name="resources", row=ResourceRow, key="key", indexed=("tenant_id", "session_id", "held"))
MACHINES: Final = Table(
    name="machines",
    row=MachineRow,
    key="vm_id",
    indexed=("tenant_id", "held_on", "candidate_on", "candidate", "living_for"),
)
SESSIONS: Final = Table(name="holders", row=SessionRow, key="session_id")


class Resources:
    """Folds claims, releases, what sessions hold, and clean-ups."""

    name = "resources"
    tables: tuple[Table, ...] = (RESOURCES, MACHINES, SESSIONS)

    async def fold(self, rows: WritableRows, event: Any, recorded: Recorded) -> None:
        """See `Projection.fold`; an event that moves no claim changes nothing."""
        if isinstance(event, _VM_EVENTS):
            await _fold_vm(rows, event, recorded)
        elif isinstance(event, SESSION_STEPS):
            await _fold_session(rows, event, recorded)
        elif isinstance(event, _CLEANUP_EVENTS):
            await _fold_cleanup(rows, event)


async def machine_row(rows: Rows, vm_id: VmId) -> MachineRow:
    """The machine's row; an empty one when the log has not heard of it."""
    row: MachineRow | None = await rows.get(MACHINES, vm_id)
    return row if row is not None else _row(MachineFacts(vm_id=vm_id), IDLE, SessionFacts())


async def session_facts(rows: Rows, machine: MachineFacts) -> SessionFacts:
    """What the session holds that the machine was claimed for."""
    if machine.claim is None:
        return SessionFacts()
    row: SessionRow | None = await rows.get(SESSIONS, machine.claim.session_id)
    return row.facts if row is not None else SessionFacts()


async def _fold_vm(rows: WritableRows, event: Any, recorded: Recorded) -> None:
    row = await machine_row(rows, event.vm_id)
    facts = evolve_machine(row.facts, event, recorded.position)
    if facts == row.facts:
        return
    await _put(rows, facts, row.cleanup)
    if isinstance(event, VmClaimed):
        await _claim(rows, event, recorded.position)
    elif isinstance(event, VmReleased):
        await _release(rows, event, recorded.position)


async def _fold_session(rows: WritableRows, event: Any, recorded: Recorded) -> None:
    session_id = SessionId(recorded.stream)
    row: SessionRow | None = await rows.get(SESSIONS, session_id)
    facts = evolve_session(row.facts if row is not None else SessionFacts(), event, recorded.position)
    await rows.put(SESSIONS, SessionRow(session_id=session_id, facts=facts))
    after: str | None = None
    while page := await rows.find(MACHINES, {"living_for": session_id}, after_key=after, limit=PAGE):
        for machine in page:
            await _put(rows, machine.facts, machine.cleanup)
        after = page[-1].vm_id


async def _fold_cleanup(rows: WritableRows, event: Any) -> None:
    row = await machine_row(rows, event.vm_id)
    await _put(rows, row.facts, evolve(row.cleanup, event))


async def _put(rows: WritableRows, facts: MachineFacts, cleanup: CleanupState) -> None:
    await rows.put(MACHINES, _row(facts, cleanup, await session_facts(rows, facts)))


def _row(facts: MachineFacts, cleanup: CleanupState, session: SessionFacts) -> MachineRow:
    claim, proposal = facts.claim, proposal_of(cleanup)
    held = isinstance(whose(facts, session), Held)
    unwanted = claim is not None and not held and (facts.end is None or bool(facts.held))
    is_candidate = proposal is not None or unwanted
    host_id = proposal.host_id if proposal is not None else claim.host_id if claim is not None else None
    tenant_id = claim.tenant_id if claim is not None else proposal.tenant_id if proposal is not None else SYSTEM_TENANT
    return MachineRow(
        vm_id=facts.vm_id,
        tenant_id=tenant_id,
        held_on=claim.host_id if claim is not None and held else None,
        candidate_on=host_id if is_candidate else None,
        candidate=int(is_candidate),
        living_for=claim.session_id if claim is not None and facts.end is None else None,
        facts=facts,
        cleanup=cleanup,
    )


def proposal_of(cleanup: CleanupState) -> CleanupProposed | None:
    """The proposal of a clean-up that has not come to its end."""
    return cleanup.proposal if isinstance(cleanup, Proposed | Confirmed | GivenUp) else None


async def _claim(rows: WritableRows, event: VmClaimed, position: int) -> None:
    for resource in event.resources:
        await rows.put(
            RESOURCES,
            ResourceRow(
                key=_key(event.vm_id, resource),
                tenant_id=event.tenant_id,
                session_id=event.session_id,
                vm_id=event.vm_id,
                host_id=event.host_id,
                incarnation=event.incarnation,
                kind=resource.kind,
                name=resource.name,
                held=1,
                claimed_us=to_us(event.claimed_at),
                claimed_position=position,
            ),
        )


async def _release(rows: WritableRows, event: VmReleased, position: int) -> None:
    for resource in event.resources:
        row: ResourceRow | None = await rows.get(RESOURCES, _key(event.vm_id, resource))
        if row is not None and row.held:
            released = to_us(event.released_at)
            await rows.put(
                RESOURCES,
                msgspec.structs.replace(row, held=0, released_us=released, released_position=position),
            )


def _key(vm_id: VmId, resource: ResourceRef) -> str:
    return f"{vm_id}:{resource.kind}:{resource.name}"

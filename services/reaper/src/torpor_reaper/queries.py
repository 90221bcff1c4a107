"""Answers what is claimed and by whom, and what may be cleaned up: `qry.<tenant>.reaper.<type>.<session id or ->`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from torpor_contracts.cleanup import (
    CandidatesAnswer,
    CandidatesQuery,
    ClaimedResource,
    CleanupCandidate,
    ResourcesAnswer,
    ResourcesQuery,
)
from torpor_contracts.errors import Rejected
from torpor_contracts.ids import SYSTEM_TENANT, HostId, SessionId, TenantId
from torpor_eventlog.instants import from_us
from torpor_eventlog.views_port import Rows, ViewStore
from torpor_messaging.ports import Clock
from torpor_reaper.domain.cleanup import Confirmed, GivenUp, Proposed
from torpor_reaper.domain.reasons import why_not_yet
from torpor_reaper.domain.standing import Held, Nobodys, whose
from torpor_reaper.handlers import Heartbeats, Oddity
from torpor_reaper.projections import (
    MACHINES,
    RESOURCES,
    MachineRow,
    ResourceRow,
    Resources,
    machine_row,
    session_facts,
)

PAGE_MAX: Final = 500
"""Rows in one answer: more would not fit a NATS message of 1 MiB."""

_Query = TypeVar("_Query", ResourcesQuery, CandidatesQuery)
_Where = dict[str, str | int | None]


class ReaperQueries:
    """Reads the `resources` view; what hosts were last heard to have comes from the heartbeats of this process."""

    def __init__(self, views: ViewStore, clock: Clock, heartbeats: Heartbeats, silent_after_s: float) -> None:
        self._views = views
        self._clock = clock
        self._heartbeats = heartbeats
        self._silent_after_s = silent_after_s

    async def resources(self, tenant_id: TenantId, target: str, parameters: Mapping[str, Any]) -> ResourcesAnswer:
        """Claims of a session, or of the tenant; `Rejected("illegal-query")` for parameters it cannot take."""
        query = _query(parameters, ResourcesQuery)
        where = _scope(tenant_id)
        if target != "-":
            where["session_id"] = target
        if query.held_only:
            where["held"] = 1
        position = await self._views.position(Resources.name)
        async with self._views.reading() as rows:
            page: Sequence[ResourceRow] = await rows.find(RESOURCES, where, after_key=query.after, limit=query.limit)
            claims = [await self._claim(rows, row) for row in page]
        return ResourcesAnswer(
            tenant_id=tenant_id,
            session_id=None if target == "-" else SessionId(target),
            as_of=self._clock.now(),
            position=position,
            resources=claims,
            next=page[-1].key if len(page) == query.limit else None,
        )

    async def candidates(self, tenant_id: TenantId, _target: str, parameters: Mapping[str, Any]) -> CandidatesAnswer:
        """What may be cleaned up, on which evidence, and what that waits for."""
        query = _query(parameters, CandidatesQuery)
        position = await self._views.position(Resources.name)
        where: _Where = {**_scope(tenant_id), "candidate": 1}
        async with self._views.reading() as rows:
            page: Sequence[MachineRow] = await rows.find(MACHINES, where, after_key=query.after, limit=query.limit)
            found = [await self._candidate(rows, row) for row in page]
        if tenant_id == SYSTEM_TENANT and query.after is None:
            found += [_odd(oddity) for oddity in self._heartbeats.oddities()[:PAGE_MAX]]
        return CandidatesAnswer(
            tenant_id=tenant_id,
            as_of=self._clock.now(),
            position=position,
            candidates=found,
            next=page[-1].vm_id if len(page) == query.limit else None,
        )

    async def _claim(self, rows: Rows, row: ResourceRow) -> ClaimedResource:
        machine = await machine_row(rows, row.vm_id)
        session = await session_facts(rows, machine.facts)
        found = whose(machine.facts, session)
        host = self._heartbeats.word_of(row.host_id, self._silent_after_s)
        why = why_not_yet(machine.facts, session, machine.cleanup, host) if row.held else None
        return ClaimedResource(
            kind=row.kind,
            name=row.name,
            vm_id=row.vm_id,
            host_id=row.host_id,
            session_id=SessionId(row.session_id),
            incarnation=row.incarnation,
            holder=found.holder if isinstance(found, Held) else f"nobody: {found.evidence}",
            claimed_at=from_us(row.claimed_us),
            claimed_position=row.claimed_position,
            released_at=from_us(row.released_us) if row.released_us is not None else None,
            released_position=row.released_position,
            why_not_yet=why,
        )

    async def _candidate(self, rows: Rows, row: MachineRow) -> CleanupCandidate:
        facts, session = row.facts, await session_facts(rows, row.facts)
        host_id = HostId(row.candidate_on or "")
        host = self._heartbeats.word_of(host_id, self._silent_after_s)
        found = _evidence(row, whose(facts, session))
        return CleanupCandidate(
            vm_id=row.vm_id,
            host_id=host_id,
            tenant_id=row.tenant_id,
            session_id=facts.claim.session_id if facts.claim is not None else None,
            incarnation=facts.claim.incarnation if facts.claim is not None else None,
            reason=found.reason,
            evidence=found.evidence,
            evidence_position=found.position,
            state=_state(row),
            attempts=_attempts(row),
            unreleased=len(facts.held),
            why_not_yet=why_not_yet(facts, session, row.cleanup, host),
        )


def _query(parameters: Mapping[str, Any], kind: type[_Query]) -> _Query:
    try:
        query = msgspec.convert(dict(parameters), kind)
    except msgspec.ValidationError as error:
        raise Rejected("illegal-query", str(error), "see schemas/queries/reaper") from error
    if not 1 <= query.limit <= PAGE_MAX:
        raise Rejected("illegal-query", f"limit is {query.limit}", f"ask for 1 to {PAGE_MAX} rows at a time")
    return query


def _scope(tenant_id: TenantId) -> _Where:
    """The operator sees the claims of all tenants."""
    return {} if tenant_id == SYSTEM_TENANT else {"tenant_id": tenant_id}


def _evidence(row: MachineRow, found: Held | Nobodys) -> Nobodys:
    """What the open proposal rests on; without one, what the log says now."""
    if isinstance(row.cleanup, Proposed | Confirmed | GivenUp):
        proposal = row.cleanup.proposal
        return Nobodys(reason=proposal.reason, evidence=proposal.evidence, position=proposal.evidence_position)
    assert isinstance(found, Nobodys), "the view calls nothing a candidate that a session holds, but for a proposal"
    if found.reason == "ended":
        return Nobodys(reason="unreleased", evidence=found.evidence, position=found.position)
    return found


def _state(row: MachineRow) -> Any:
    match row.cleanup:
        case Confirmed():
            return "confirmed"
        case GivenUp():
            return "given-up"
        case Proposed():
            return "quarantined" if row.facts.frozen is not None else "proposed"
        case _:
            return "noticed"


def _attempts(row: MachineRow) -> int:
    match row.cleanup:
        case Confirmed():
            return row.cleanup.confirmation.attempt
        case Proposed():
            return row.cleanup.proposal.attempt
        case GivenUp():
            return row.cleanup.ending.attempts
        case _:
            return 0


def _odd(oddity: Oddity) -> CleanupCandidate:
    return CleanupCandidate(
        vm_id=oddity.vm_id,
        host_id=oddity.host_id,
        tenant_id=SYSTEM_TENANT,
        session_id=None,
        incarnation=None,
        reason=oddity.found.reason,
        evidence=oddity.found.evidence,
        evidence_position=oddity.found.position,
        state="noticed",
        attempts=0,
        unreleased=0,
        why_not_yet=f"an operator must look at {oddity.host_id}: no command can be addressed to this machine",
    )

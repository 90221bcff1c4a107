"""Answers reads from the views: a tenant sees its own sessions, the operator all of them and the hosts."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import msgspec

from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.ids import SYSTEM_TENANT, HostId, SessionId, TenantId
from torpor_contracts.scheduling import (
    DesiredState,
    ExecInFlight,
    ExecQuery,
    ExecView,
    HostsAnswer,
    HostsQuery,
    HostView,
    ObservedState,
    SessionQuery,
    SessionsAnswer,
    SessionsQuery,
    SessionState,
    SessionView,
)
from torpor_eventlog.views_port import Rows
from torpor_messaging.service import QueryRoute
from torpor_messaging.service_ports import ServicePorts
from torpor_scheduler.domain.host import HostPhase
from torpor_scheduler.domain.session import Phase, Session
from torpor_scheduler.domain.timers import idle_at
from torpor_scheduler.projections import EXECS, HOSTS, SESSIONS, ExecRow, HostRow, SessionRow, Views, exec_key
from torpor_scheduler.sending import SERVICE
from torpor_scheduler.watch import HostWatch

LIMIT_MAX: Final = 1_000
BEHIND_MAX_S: Final = 3.0
BEHIND_PAUSE_S: Final = 0.02

Parameters = TypeVar("Parameters", SessionQuery, SessionsQuery, ExecQuery, HostsQuery)

DESIRED: Final[Mapping[Phase, DesiredState]] = {
    Phase.REQUESTED: "running",
    Phase.PLACING: "running",
    Phase.STARTING: "running",
    Phase.RUNNING: "running",
    Phase.SUSPENDING: "suspended",
    Phase.SUSPENDED: "suspended",
    Phase.RESUMING: "running",
    Phase.ROLLING_BACK: "running",
    Phase.LOST: "running",
    Phase.FAILED: "running",
    Phase.TERMINATING: "terminated",
    Phase.TERMINATED: "terminated",
}
"""What is wanted of a session in each phase."""


class Queries:
    """Answers the scheduler's queries."""

    def __init__(self, ports: ServicePorts, watch: HostWatch) -> None:
        self._views = ports.views
        self._clock = ports.clock
        self._watch = watch

    def routes(self) -> tuple[QueryRoute, ...]:
        """For the service."""
        return (
            QueryRoute(service=SERVICE, type="session", handle=self.session),
            QueryRoute(service=SERVICE, type="sessions", handle=self.sessions),
            QueryRoute(service=SERVICE, type="exec", handle=self.exec),
            QueryRoute(service=SERVICE, type="hosts", handle=self.hosts),
        )

    async def session(self, tenant_id: TenantId, target: str, parameters: Mapping[str, Any]) -> SessionView:
        """One session."""
        query = _parsed(parameters, SessionQuery)
        await self._catch_up(query.at_least)
        async with self._views.reading() as rows:
            return session_view(await _own_session(rows, tenant_id, target))

    async def sessions(self, tenant_id: TenantId, _: str, parameters: Mapping[str, Any]) -> SessionsAnswer:
        """A page of sessions."""
        query = _parsed(parameters, SessionsQuery)
        limit = _checked_limit(query.limit)
        await self._catch_up(query.at_least)
        where: dict[str, str | int | None] = {}
        if tenant_id != SYSTEM_TENANT:
            where["tenant_id"] = tenant_id
        if query.state is not None:
            where["phase"] = query.state
        position = await self._views.position(Views.name)
        async with self._views.reading() as rows:
            found: list[SessionRow] = list(await rows.find(SESSIONS, where, after_key=query.after, limit=limit + 1))
        page = found[:limit]
        return SessionsAnswer(
            position=position,
            sessions=[session_view(row) for row in page],
            next=page[-1].session_id if len(found) > limit else None,
        )

    async def exec(self, tenant_id: TenantId, target: str, parameters: Mapping[str, Any]) -> ExecView:
        """One program."""
        query = _parsed(parameters, ExecQuery)
        await self._catch_up(query.at_least)
        async with self._views.reading() as rows:
            await _own_session(rows, tenant_id, target)
            row: ExecRow | None = await rows.get(EXECS, exec_key(target, query.exec_id))
        if row is None:
            raise Rejected("exec-not-found", f"session {target} has no exec {query.exec_id}", "check the exec id")
        return ExecView(
            session_id=SessionId(row.session_id),
            exec_id=query.exec_id,
            state=row.state,
            requested_at=row.requested_at,
            started_at=row.started_at,
            ended_at=row.ended_at,
            incarnation=row.incarnation,
            outcome=row.outcome,
            exit_code=row.exit_code,
            detail=row.detail,
            output_bytes=row.output_bytes,
            position=row.position,
        )

    async def hosts(self, tenant_id: TenantId, _: str, parameters: Mapping[str, Any]) -> HostsAnswer:
        """A page of hosts."""
        if tenant_id != SYSTEM_TENANT:
            raise Rejected("operators-only", "hosts belong to the operator", "ask as the tenant 'system'")
        query = _parsed(parameters, HostsQuery)
        limit = _checked_limit(query.limit)
        await self._catch_up(query.at_least)
        position = await self._views.position(Views.name)
        async with self._views.reading() as rows:
            found: list[HostRow] = list(await rows.find(HOSTS, after_key=query.after, limit=limit + 1))
        page = found[:limit]
        return HostsAnswer(
            position=position,
            hosts=[self._host_view(row) for row in page],
            next=page[-1].host_id if len(found) > limit else None,
        )

    async def _catch_up(self, at_least: int) -> None:
        """Wait, within a bound, until the view has come to a position that the caller knows of."""
        deadline_s = self._clock.monotonic_s() + BEHIND_MAX_S
        while (position := await self._views.position(Views.name)) < at_least:
            if self._clock.monotonic_s() >= deadline_s:
                raise Transient(f"the view is at position {position}, not yet at {at_least}", retry_after_s=0.5)
            await self._clock.sleep(BEHIND_PAUSE_S)

    def _host_view(self, row: HostRow) -> HostView:
        host = row.folded
        return HostView(
            host_id=HostId(row.host_id),
            state="lost" if host.phase is HostPhase.LOST else "up",
            draining=host.draining,
            boot_id=host.boot_id,
            driver=host.driver,
            fingerprint=host.fingerprint,
            capacity=host.capacity,
            vcpus_taken=row.vcpus,
            memory_mib_taken=row.memory_mib,
            disk_mib_taken=row.disk_mib,
            vms=row.vms,
            registered_at=host.registered_at or _moment(row.step_us),
            last_seen_at=self._watch.seen_at(host.host_id, host.boot_id),
            position=row.position,
        )


def session_view(row: SessionRow) -> SessionView:
    """What is published of a session."""
    session = row.folded
    machine, checkpoint, starting = session.machine, session.checkpoint, session.starting
    return SessionView(
        session_id=session.session_id,
        tenant_id=session.tenant_id,
        state=msgspec.convert(row.phase, SessionState),
        desired=DESIRED[session.phase],
        observed=observed(session),
        incarnation=session.incarnation,
        version=session.version,
        position=row.position,
        machine=session.spec,
        idle_after_s=session.idle_after_s,
        metadata=session.metadata,
        requested_at=session.requested_at or _moment(row.step_us),
        changed_at=_moment(row.step_us),
        host_id=None if machine is None else machine.host_id,
        vm_id=None if machine is None else machine.vm_id,
        checkpoint_id=None if checkpoint is None else checkpoint.checkpoint_id,
        checkpointed_at=None if checkpoint is None else checkpoint.observed_at,
        execs=[
            ExecInFlight(exec_id=program.exec_id, requested_at=program.requested_at, started_at=program.started_at)
            for program in session.execs
        ],
        suspends_at=idle_at(session),
        retries_at=None if starting is None else starting.retry_at,
        lost_since=None if session.lost is None else session.lost.since,
        problem=session.problem,
        checkpointing_id=None if session.checkpointing is None else session.checkpointing.checkpoint_id,
        lineage=session.lineage,
    )


def observed(session: Session) -> ObservedState:
    """What was seen last: of its machine, else of its newest checkpoint."""
    if session.phase is Phase.TERMINATED:
        return "gone"
    if session.machine is not None and session.machine.started_at is not None:
        return "running"
    if session.lost is not None:
        return "lost"
    return "none" if session.checkpoint is None else "suspended"


async def _own_session(rows: Rows, tenant_id: TenantId, session_id: str) -> SessionRow:
    row: SessionRow | None = await rows.get(SESSIONS, session_id)
    if row is None or tenant_id not in (row.tenant_id, SYSTEM_TENANT):
        raise Rejected(
            "session-not-found", f"there is no session {session_id}", "see the list of sessions, or create it"
        )
    return row


def _parsed(parameters: Mapping[str, Any], kind: type[Parameters]) -> Parameters:
    try:
        return msgspec.convert(dict(parameters), kind)
    except msgspec.ValidationError as error:
        raise Rejected("illegal-parameters", str(error), "correct the query's parameters") from error


def _checked_limit(limit: int) -> int:
    if not 1 <= limit <= LIMIT_MAX:
        raise Rejected("illegal-parameters", f"limit is {limit}", f"give 1 to {LIMIT_MAX}")
    return limit


def _moment(us: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)

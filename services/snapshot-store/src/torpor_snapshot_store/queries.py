"""Answers reads from the view of checkpoints: a tenant sees its own, the operator all of them."""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from torpor_contracts.checkpoint import (
    CheckpointQuery,
    CheckpointsAnswer,
    CheckpointsQuery,
    CheckpointVerification,
    CheckpointView,
    VerifyCheckpointQuery,
)
from torpor_contracts.errors import Rejected
from torpor_contracts.ids import SYSTEM_TENANT, TenantId
from torpor_eventlog.instants import from_us
from torpor_eventlog.views_port import Rows
from torpor_messaging.service import QueryRoute
from torpor_messaging.service_ports import ServicePorts
from torpor_messaging.subjects import NO_TARGET
from torpor_snapshot_store.projections import CHECKPOINTS, SESSIONS, CheckpointRow, Checkpoints, SessionRow
from torpor_snapshot_store.verifying import Verifying

LIMIT_MAX: Final = 500
SHOWN_MAX: Final = 200
"""Sessions that are looked at to say what pins a checkpoint."""

BEHIND_S_MAX: Final = 3.0
BEHIND_PAUSE_S: Final = 0.02

Parameters = TypeVar("Parameters", CheckpointQuery, CheckpointsQuery, VerifyCheckpointQuery)


class Queries:
    """Answers the snapshot store's queries."""

    def __init__(self, ports: ServicePorts, verifying: Verifying) -> None:
        self._verifying = verifying
        self._views = ports.views
        self._clock = ports.clock

    def routes(self, service: str) -> tuple[QueryRoute, ...]:
        """For the service."""
        return (
            QueryRoute(service=service, type="checkpoint", handle=self.checkpoint),
            QueryRoute(service=service, type="checkpoints", handle=self.checkpoints),
            QueryRoute(service=service, type="verify-checkpoint", handle=self.verify),
        )

    async def checkpoint(self, tenant_id: TenantId, target: str, parameters: Mapping[str, Any]) -> CheckpointView:
        """One checkpoint."""
        query = _parsed(parameters, CheckpointQuery)
        await self._catch_up(query.at_least)
        async with self._views.reading() as rows:
            return await _view(rows, await _row(rows, tenant_id, target))

    async def verify(self, tenant_id: TenantId, target: str, parameters: Mapping[str, Any]) -> CheckpointVerification:
        """Read one checkpoint whole."""
        query = _parsed(parameters, VerifyCheckpointQuery)
        await self._catch_up(query.at_least)
        async with self._views.reading() as rows:
            row = await _row(rows, tenant_id, target)
        if row.state != "kept":
            raise Rejected("checkpoint-freed", f"{target} is freed", "verify a checkpoint that is kept")
        return await self._verifying.verify(row)

    async def checkpoints(self, tenant_id: TenantId, target: str, parameters: Mapping[str, Any]) -> CheckpointsAnswer:
        """A page of checkpoints, of one session or of all."""
        query = _parsed(parameters, CheckpointsQuery)
        if not 1 <= query.limit <= LIMIT_MAX:
            raise Rejected("illegal-query", f"limit is {query.limit}", f"ask for 1 to {LIMIT_MAX} at a time")
        await self._catch_up(query.at_least)
        where: dict[str, str | int | None] = {} if tenant_id == SYSTEM_TENANT else {"tenant_id": tenant_id}
        if target != NO_TARGET:
            where["session_id"] = target
        position = await self._views.position(Checkpoints.name)
        async with self._views.reading() as rows:
            found: list[CheckpointRow] = list(
                await rows.find(CHECKPOINTS, where, after_key=query.after, limit=query.limit + 1)
            )
            page = found[: query.limit]
            views = [await _view(rows, row) for row in page]
        more = len(found) > query.limit
        return CheckpointsAnswer(position=position, checkpoints=views, next=page[-1].checkpoint_id if more else None)

    async def _catch_up(self, at_least: int) -> None:
        """Wait, within a bound, until the view has come to a position that the caller knows of."""
        deadline_s = self._clock.monotonic_s() + BEHIND_S_MAX
        while (position := await self._views.position(Checkpoints.name)) < at_least:
            if self._clock.monotonic_s() >= deadline_s:
                raise Rejected(
                    "view-behind", f"the view is at position {position}, not yet at {at_least}", "ask again in a moment"
                )
            await self._clock.sleep(BEHIND_PAUSE_S)


async def _row(rows: Rows, tenant_id: TenantId, target: str) -> CheckpointRow:
    row: CheckpointRow | None = await rows.get(CHECKPOINTS, target)
    if row is None or tenant_id not in {row.tenant_id, SYSTEM_TENANT}:
        raise Rejected("checkpoint-unknown", f"there is no checkpoint {target}", "see the list of checkpoints")
    return row


async def _view(rows: Rows, row: CheckpointRow) -> CheckpointView:
    session: SessionRow | None = await rows.get(SESSIONS, row.session_id)
    return CheckpointView(
        checkpoint_id=row.checkpoint_id,
        tenant_id=row.tenant_id,
        session_id=row.session_id,
        incarnation=row.manifest.incarnation,
        parent_id=row.manifest.parent_id,
        fingerprint=row.manifest.fingerprint,
        state=row.state,
        size_bytes=sum(part.size_bytes for part in row.manifest.parts),
        stored_bytes=row.stored_bytes,
        parts=row.manifest.parts,
        packs=row.manifest.packs,
        pinned_by=[*_pins(row, session), *await _others(rows, row)] if row.state == "kept" else [],
        recorded_at=from_us(row.recorded_us),
        freed_at=None if row.freed_us is None else from_us(row.freed_us),
        position=row.position,
        label=row.label,
    )


def _pins(row: CheckpointRow, session: SessionRow | None) -> list[str]:
    """What would refuse a free now; the command itself reads the log, not this view."""
    own = session or SessionRow(session_id=row.session_id)
    superseded = own.newest_position > row.recorded_position and own.newest_id != row.checkpoint_id
    pins = [] if own.over or superseded else [f"session {row.session_id}"]
    return pins + [f"checkpoint {child}" for child in row.children]


async def _others(rows: Rows, row: CheckpointRow) -> list[str]:
    """Other sessions that rest on it, as far as they are few."""
    found: list[SessionRow] = list(await rows.find(SESSIONS, {"newest_id": row.checkpoint_id}, limit=SHOWN_MAX))
    return [f"session {one.session_id}" for one in found if not one.over and one.session_id != row.session_id]


def _parsed(parameters: Mapping[str, Any], kind: type[Parameters]) -> Parameters:
    try:
        return msgspec.convert(dict(parameters), kind)
    except msgspec.ValidationError as error:
        raise Rejected("illegal-query", str(error), "correct the query's parameters") from error

"""The `meters` view: one row for each interval of running or stored time, and which machine each session has now."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from torpor_billing.domain import meters
from torpor_billing.domain.meters import GivenUp, Meter, RunningEnd, Tenure
from torpor_contracts.checkpoint import CheckpointFreed, CheckpointRecorded
from torpor_contracts.host import HostLost
from torpor_contracts.ids import SessionId, TenantId, VmId
from torpor_contracts.session import (
    SessionFailed,
    SessionLost,
    SessionRecovered,
    SessionStartFailed,
    SessionSuspended,
    SessionTerminated,
    VmStartRequested,
)
from torpor_contracts.vm import VmQuarantined, VmReaped, VmReleased, VmStarted, VmStopped, VmSuspended
from torpor_eventlog.instants import to_us
from torpor_eventlog.port import Recorded
from torpor_eventlog.views_port import Table, WritableRows

PAGE: Final = 500
"""Rows read at a time where one event concerns many."""


class MeterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A meter, with the fields it is looked up by."""

    meter_id: str
    tenant_id: str
    session_id: str
    vm_id: str | None
    open_on_host: str | None
    alarm: int
    meter: Meter


class TenureRow(msgspec.Struct, frozen=True, kw_only=True):
    """Which machine a session has."""

    session_id: str
    tenure: Tenure


METERS: Final = Table(
    name="meters", row=MeterRow, key="meter_id", indexed=("tenant_id", "session_id", "vm_id", "open_on_host", "alarm")
)
TENURES: Final = Table(name="tenures", row=TenureRow, key="session_id")

_ENDS: Final[dict[type[msgspec.Struct], RunningEnd]] = {
    VmSuspended: "vm-suspended",
    VmStopped: "vm-stopped",
    VmQuarantined: "vm-quarantined",
    VmReaped: "vm-reaped",
}


class Meters:
    """Folds what hosts, sessions and the store observed into meters."""

    name = "meters"
    tables: tuple[Table, ...] = (METERS, TENURES)

    async def fold(self, rows: WritableRows, event: Any, recorded: Recorded) -> None:
        """See `Projection.fold`; an event of no meter changes nothing."""
        at = recorded.position
        match event:
            case VmStarted():
                await _open_running(rows, event, recorded)
            case VmSuspended() | VmStopped() | VmQuarantined() | VmReaped():
                await _end(rows, event.vm_id, to_us(event.observed_at), at, _ENDS[type(event)])
            case VmReleased() if any(resource.kind == "process" for resource in event.resources):
                await _give_up(rows, event.vm_id, to_us(event.released_at), at, "vm-released")
            case HostLost():
                await _close_host(rows, event, at)
            case CheckpointRecorded():
                if await rows.get(METERS, event.checkpoint_id) is None:
                    await _put(rows, meters.stored(event, at))
            case CheckpointFreed():
                row: MeterRow | None = await rows.get(METERS, event.checkpoint_id)
                if row is not None:
                    await _put(rows, meters.closed(row.meter, to_us(event.freed_at), at, "freed"))
            case _:
                await _fold_session(rows, event, recorded)


async def _fold_session(rows: WritableRows, event: Any, recorded: Recorded) -> None:
    at = recorded.position
    session_id = SessionId(recorded.stream)
    match event:
        case VmStartRequested():
            tenure = await _tenure(rows, event.session_id)
            await _put_tenure(rows, msgspec.structs.replace(tenure, asked=True, vm_id=event.vm_id))
        case SessionStartFailed():
            await _leave(rows, session_id, event.vm_id)
            await _give_up(rows, event.vm_id, to_us(event.observed_at), at, "start-given-up")
        case SessionLost():
            await _leave(rows, session_id, event.vm_id)
            await _give_up(rows, event.vm_id, to_us(event.observed_at), at, "session-lost")
        case SessionRecovered():
            await _recover(rows, event, at)
        case SessionSuspended():
            await _leave(rows, session_id, None)
        case SessionTerminated():
            await _leave(rows, session_id, None)
            await _give_up_newest(rows, session_id, to_us(event.observed_at), at, "session-terminated")
        case SessionFailed():
            await _leave(rows, session_id, None)
            await _give_up_newest(rows, session_id, to_us(event.observed_at), at, "session-failed")
        case _:
            pass


async def _open_running(rows: WritableRows, event: VmStarted, recorded: Recorded) -> None:
    if await rows.get(METERS, event.vm_id) is not None:
        return
    tenure = await _tenure(rows, event.session_id)
    previous = await _meter(rows, tenure.meter_id) if tenure.meter_id else None
    meter = meters.running(event, TenantId(recorded.tenant_id), recorded.position, previous, tenure)
    await _put(rows, meter)
    if not tenure.holds(event.vm_id):
        return
    if previous is not None:
        await _put(rows, meters.given_up(previous, meter.opened_us, recorded.position, "superseded"))
    await _put_tenure(rows, msgspec.structs.replace(tenure, meter_id=meter.meter_id))


async def _close_host(rows: WritableRows, event: HostLost, position: int) -> None:
    after: str | None = None
    while page := await rows.find(METERS, {"open_on_host": event.host_id}, after_key=after, limit=PAGE):
        for row in page:
            await _put(rows, meters.closed(row.meter, to_us(event.last_seen_at), position, "host-lost"))
        after = page[-1].meter_id


async def _end(rows: WritableRows, vm_id: VmId, end_us: int, position: int, cause: RunningEnd) -> None:
    meter = await _last_of(rows, vm_id)
    if meter is not None:
        await _put(rows, meters.closed(meter, end_us, position, cause))


async def _recover(rows: WritableRows, event: SessionRecovered, position: int) -> None:
    meter = await _last_of(rows, event.vm_id)
    if meter is None:
        return
    tenure = await _tenure(rows, meter.session_id)
    newest = await _meter(rows, tenure.meter_id) if tenure.meter_id else None
    again = meters.recovered(meter, newest, to_us(event.observed_at), position)
    await _put(rows, again)
    meter_id = again.meter_id if again.is_open else tenure.meter_id
    await _put_tenure(rows, msgspec.structs.replace(tenure, vm_id=event.vm_id, meter_id=meter_id))


async def _give_up(rows: WritableRows, vm_id: VmId, at_us: int, position: int, cause: GivenUp) -> None:
    meter = await _last_of(rows, vm_id)
    if meter is not None:
        await _put(rows, meters.given_up(meter, at_us, position, cause))


async def _give_up_newest(rows: WritableRows, session_id: SessionId, at_us: int, position: int, cause: GivenUp) -> None:
    tenure = await _tenure(rows, session_id)
    meter = await _meter(rows, tenure.meter_id) if tenure.meter_id is not None else None
    if meter is not None:
        await _put(rows, meters.given_up(meter, at_us, position, cause))


async def _leave(rows: WritableRows, session_id: SessionId, vm_id: VmId | None) -> None:
    """The session has no machine any more; with `vm_id`, only if it is that one."""
    tenure = await _tenure(rows, session_id)
    if vm_id is None or tenure.vm_id == vm_id:
        await _put_tenure(rows, msgspec.structs.replace(tenure, vm_id=None))


async def _last_of(rows: WritableRows, vm_id: VmId) -> Meter | None:
    """The machine's last interval; it has more than one only if its host was lost and came back."""
    found: Sequence[MeterRow] = await rows.find(METERS, {"vm_id": vm_id}, limit=PAGE)
    return max((row.meter for row in found), key=lambda meter: meter.opened_position, default=None)


async def _meter(rows: WritableRows, meter_id: str) -> Meter | None:
    row: MeterRow | None = await rows.get(METERS, meter_id)
    return row.meter if row is not None else None


async def _put(rows: WritableRows, meter: Meter) -> None:
    await rows.put(
        METERS,
        MeterRow(
            meter_id=meter.meter_id,
            tenant_id=meter.tenant_id,
            session_id=meter.session_id,
            vm_id=meter.vm_id,
            open_on_host=meter.host_id if meter.is_open else None,
            alarm=int(meter.is_alarm),
            meter=meter,
        ),
    )


async def _tenure(rows: WritableRows, session_id: SessionId) -> Tenure:
    row: TenureRow | None = await rows.get(TENURES, session_id)
    return row.tenure if row is not None else Tenure(session_id=session_id)


async def _put_tenure(rows: WritableRows, tenure: Tenure) -> None:
    await rows.put(TENURES, TenureRow(session_id=tenure.session_id, tenure=tenure))

"""The machines that may exist, by host: what a vm-host looks at first when it starts."""

from typing import Any, Final, assert_never

import msgspec

from torpor_contracts.ids import HostId, VmId
from torpor_contracts.vm import (
    ResourceRef,
    VmCheckpointed,
    VmCheckpointFailed,
    VmCheckpointStarted,
    VmClaimed,
    VmEvent,
    VmExecContinued,
    VmExecEnded,
    VmExecStarted,
    VmQuarantined,
    VmReaped,
    VmReleased,
    VmStarted,
    VmStartFailed,
    VmStopped,
    VmSuspended,
    VmSuspendFailed,
    VmSuspendStarted,
)
from torpor_eventlog.port import Recorded
from torpor_eventlog.views_port import Table, WritableRows


class VmRow(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that may be on its host, or may hold something there still."""

    vm_id: VmId
    host_id: HostId
    over: bool
    held: list[ResourceRef]


VMS: Final = Table(name="vms", row=VmRow, key="vm_id", indexed=("host_id",))


class Vms:
    """Keeps a row for each machine from its claim until it is over and nothing of it is left."""

    name = "vms"
    tables = (VMS,)

    async def fold(self, rows: WritableRows, event: Any, recorded: Recorded) -> None:
        """See `Projection.fold`."""
        if isinstance(event, VmEvent):
            row = _after(await rows.get(VMS, recorded.stream), event)
            if row is None or (row.over and not row.held):
                await rows.delete(VMS, recorded.stream)
            else:
                await rows.put(VMS, row)


def _after(row: VmRow | None, event: VmEvent) -> VmRow | None:
    held = [] if row is None else row.held
    match event:
        case VmClaimed():
            new = [one for one in event.resources if one not in held]
            return VmRow(vm_id=event.vm_id, host_id=event.host_id, over=False, held=[*held, *new])
        case VmQuarantined():
            return VmRow(vm_id=event.vm_id, host_id=event.host_id, over=False, held=held)
        case VmStartFailed() | VmSuspended() | VmStopped() | VmReaped():
            return None if row is None else msgspec.structs.replace(row, over=True)
        case VmReleased():
            kept = [one for one in held if one not in event.resources]
            return None if row is None else msgspec.structs.replace(row, held=kept)
        case VmStarted() | VmExecStarted() | VmExecEnded() | VmExecContinued() | VmSuspendStarted() | VmSuspendFailed():
            return row
        case VmCheckpointStarted() | VmCheckpointed() | VmCheckpointFailed():
            return row
        case _ as never:
            assert_never(never)

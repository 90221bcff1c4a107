"""Asks hosts to do what a clean-up has recorded; a host answers with events of the machine, not to the reaper."""

from typing import Final

import msgspec

from torpor_contracts.cleanup import CleanupConfirmed, CleanupProposed
from torpor_contracts.errors import InvariantViolation
from torpor_contracts.ids import CommandId, HostId, TenantId, VmId
from torpor_contracts.vm import QuarantineVm, ReapVm, StopVm
from torpor_eventlog.port import Recorded
from torpor_messaging.ports import Bus, OutgoingCommand

PROPOSED: Final = "reaper-proposed"
CONFIRMED: Final = "reaper-confirmed"


class HostRequests:
    """Sends the command that belongs to a step; its id is made of the step's position, so that it is done once."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def on_proposed(self, event: CleanupProposed, recorded: Recorded) -> None:
        """Ask the host to freeze the machine, or to let go of what an ended one claims."""
        command: msgspec.Struct
        if event.action == "reap":
            command = QuarantineVm(evidence=event.evidence)
        elif event.session_id is not None and event.incarnation is not None:
            command = StopVm(session_id=event.session_id, incarnation=event.incarnation, reason=event.evidence)
        else:
            raise InvariantViolation(f"claims of {event.vm_id} are to be let go, but nobody claimed anything")
        await self._send(event.host_id, event.vm_id, command, f"{PROPOSED}-{recorded.position}", recorded)

    async def on_confirmed(self, event: CleanupConfirmed, recorded: Recorded) -> None:
        """Ask the host to destroy the frozen machine."""
        command = ReapVm(evidence=event.evidence, checked_position=event.checked_position)
        await self._send(event.host_id, event.vm_id, command, f"{CONFIRMED}-{recorded.position}", recorded)

    async def _send(
        self, host_id: HostId, vm_id: VmId, command: msgspec.Struct, command_id: str, recorded: Recorded
    ) -> None:
        await self._bus.send(
            OutgoingCommand(
                tenant_id=TenantId(recorded.tenant_id),
                service="vm-host",
                target=f"{host_id}.{vm_id}",
                command=command,
                command_id=CommandId(command_id),
                causation_id=recorded.command_id,
                correlation_id=recorded.correlation_id,
            )
        )

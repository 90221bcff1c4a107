"""Sends the scheduler's commands: to vm-hosts, and to itself; every id is made from what caused the command."""

from typing import Final

import msgspec

from torpor_contracts.ids import SYSTEM_TENANT, CommandId, TenantId
from torpor_eventlog.port import Recorded
from torpor_messaging.ports import Bus, OutgoingCommand
from torpor_scheduler.orders import Order

SERVICE: Final = "scheduler"


class Sender:
    """Sends commands; `cause` is the event behind a command, None when there is only an observation."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def order(self, tenant_id: TenantId, order: Order, command_id: str, cause: Recorded | None = None) -> None:
        """Send a command to a vm-host."""
        await self._send("vm-host", tenant_id, order.target, order.command, command_id, cause=cause)

    async def to_session(
        self,
        tenant_id: TenantId,
        session_id: str,
        command: msgspec.Struct,
        command_id: str,
        cause: Recorded | None = None,
    ) -> None:
        """Send a report or a timer to a session."""
        await self._send(SERVICE, tenant_id, session_id, command, command_id, cause=cause)

    async def to_host(self, host_id: str, command: msgspec.Struct, command_id: str) -> None:
        """Send a command to a host's stream."""
        await self._send(SERVICE, SYSTEM_TENANT, host_id, command, command_id, cause=None)

    async def _send(
        self,
        service: str,
        tenant_id: TenantId,
        target: str,
        command: msgspec.Struct,
        command_id: str,
        *,
        cause: Recorded | None,
    ) -> None:
        await self._bus.send(
            OutgoingCommand(
                tenant_id=tenant_id,
                service=service,
                target=target,
                command=command,
                command_id=CommandId(command_id),
                causation_id="" if cause is None else f"event-{cause.position}",
                correlation_id="" if cause is None else cause.correlation_id,
            )
        )

"""Settles machines that a host has but the view of sessions does not: the log says whose they are, if anybody's."""

from datetime import datetime
from typing import Final

from torpor_contracts.host import VmObservation
from torpor_contracts.ids import HostId, VmId
from torpor_contracts.session_reports import ReportVmStarted
from torpor_contracts.vm import StopVm
from torpor_messaging.ports import Clock
from torpor_scheduler.domain.session import Phase
from torpor_scheduler.orders import Order
from torpor_scheduler.projections import microseconds
from torpor_scheduler.sending import Sender
from torpor_scheduler.spacing import Spacing
from torpor_scheduler.streams import Streams
from torpor_scheduler.watch import Inventory

STOPS_MAX: Final = 6
"""How often a machine is asked to stop; one that stays is the reaper's."""

SEEN_MAX: Final = 20_000


class Strays:
    """Takes a machine back for the session that gave it up, or has it stopped for the one that went on without it."""

    def __init__(self, clock: Clock, streams: Streams, sender: Sender, after_s: float) -> None:
        self._clock = clock
        self._streams = streams
        self._sender = sender
        self._spacing = Spacing(after_s)
        self._seen: dict[VmId, datetime] = {}

    async def settle(self, host_id: HostId, observation: VmObservation, inventory: Inventory, *, again: bool) -> None:
        """Look at one machine; `again` when the inventory before had it too.

        A machine of no known session is left to the reaper, and so is one that it has frozen.
        """
        if observation.session_id is None or observation.state not in ("starting", "running", "suspending"):
            return
        # The inventory is older than this fold, and a machine is asked for before it exists: what the session does
        # not want now, it has given up.
        session = await self._streams.session(observation.session_id)
        if session is None or (session.machine is not None and session.machine.vm_id == observation.vm_id):
            return
        lost = session.lost
        if session.phase is Phase.LOST and lost is not None and lost.machine.vm_id == observation.vm_id:
            if observation.state == "running":
                report = ReportVmStarted(
                    vm_id=observation.vm_id,
                    incarnation=lost.machine.incarnation,
                    observed_at=inventory.observed_at,
                    position=0,
                )
                command_id = f"alive-{observation.vm_id}-{microseconds(inventory.received_at)}"
                await self._sender.to_session(session.tenant_id, session.session_id, report, command_id)
            return
        number = self._stop_due(observation.vm_id) if again else None
        if number is not None and observation.incarnation is not None:
            command = StopVm(
                session_id=observation.session_id,
                incarnation=observation.incarnation,
                reason="its session has gone on without it",
            )
            order = Order(host_id=host_id, vm_id=observation.vm_id, command=command)
            await self._sender.order(session.tenant_id, order, f"stray-{observation.vm_id}-{number}")

    def _stop_due(self, vm_id: VmId) -> int | None:
        now = self._clock.now()
        first_seen_at = self._seen.setdefault(vm_id, now)
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]
        number = self._spacing.due(vm_id, (now - first_seen_at).total_seconds())
        return number if number is not None and number < STOPS_MAX else None

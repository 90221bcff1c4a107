"""Ends machines on command: stop, quarantine, reap. First the effect, then the record of it and of what is gone."""

from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.ids import VmId
from torpor_contracts.replies import Receipt
from torpor_contracts.vm import QuarantineVm, ReapVm, ResourceRef, StopVm
from torpor_messaging.service import Incoming
from torpor_vm_host.domain import decisions
from torpor_vm_host.domain.vm import VmState, held_by
from torpor_vm_host.hosting import Hosting
from torpor_vm_host.ports import DriverError
from torpor_vm_host.starting import find


class Ending:
    """Handles `StopVm`, `QuarantineVm` and `ReapVm`."""

    def __init__(self, hosting: Hosting) -> None:
        self._driver = hosting.driver
        self._clearing = hosting.clearing
        self._ledger = hosting.ledger
        self._programs = hosting.programs

    async def stop(self, incoming: Incoming, vm_id: VmId) -> Receipt | None:
        """Destroy a machine without a checkpoint; for one that has ended, let go of what it holds still."""
        command: StopVm = incoming.command
        state = await self._checked(incoming, vm_id)
        gone: list[ResourceRef] = []
        if decisions.check_stop(state, command, self._ledger.place(vm_id)):
            gone = await self._end(vm_id, state)
        receipt = await self._ledger.command(
            incoming, vm_id, lambda now, place: decisions.stop(now, command, place, gone)
        )
        await self._ledger.state(vm_id)
        return receipt

    async def quarantine(self, incoming: Incoming, vm_id: VmId) -> Receipt | None:
        """Freeze a machine; refused when there is none."""
        command: QuarantineVm = incoming.command
        state = await self._checked(incoming, vm_id)
        if decisions.check_quarantine(state, self._ledger.place(vm_id)):
            await self._freeze(vm_id)
        receipt = await self._ledger.command(
            incoming, vm_id, lambda now, place: decisions.quarantine(now, command, place)
        )
        await self._ledger.state(vm_id)
        return receipt

    async def reap(self, incoming: Incoming, vm_id: VmId) -> Receipt | None:
        """Destroy a quarantined machine, on evidence that knows the last event of its stream."""
        command: ReapVm = incoming.command
        state = await self._checked(incoming, vm_id)
        gone: list[ResourceRef] = []
        last_position = await self._ledger.last_position(vm_id)
        if decisions.check_reap(state, command, self._ledger.place(vm_id), last_position):
            gone = await self._end(vm_id, state)
        receipt = await self._ledger.command(
            incoming, vm_id, lambda now, place: decisions.reap(now, command, place, gone)
        )
        await self._ledger.state(vm_id)
        return receipt

    async def _checked(self, incoming: Incoming, vm_id: VmId) -> VmState:
        """The machine's state. What can be refused is refused here: afterwards the machine may be gone."""
        state = await self._ledger.state(vm_id)
        decisions.check_tenant(state, incoming.tenant_id)
        await self._ledger.command(incoming, vm_id, lambda _now, _place: [])  # raises if the id was used for another
        return state

    async def _end(self, vm_id: VmId, state: VmState) -> list[ResourceRef]:
        await self._programs.detach(vm_id)
        try:
            return await self._clearing.clear(vm_id, held_by(state))
        except DriverError as error:
            raise Transient(f"{vm_id} cannot be ended now: {error}") from error

    async def _freeze(self, vm_id: VmId) -> None:
        try:
            present = find(await self._driver.machines(), vm_id)
            if present is None:
                raise Rejected("vm-not-present", f"there is no machine {vm_id} here", "look at the next heartbeat")
            await self._programs.detach(vm_id)
            if present.state != "dead":
                await self._driver.freeze(vm_id)
        except DriverError as error:
            raise Transient(f"{vm_id} cannot be frozen now: {error}") from error

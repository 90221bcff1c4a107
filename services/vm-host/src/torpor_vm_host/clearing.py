"""Ends a machine and gives back what it held; says what was then observed gone."""

from collections.abc import Sequence

from torpor_chunks.port import ChunkError
from torpor_contracts.ids import VmId
from torpor_contracts.vm import ResourceRef
from torpor_vm_host.ports import Driver, DriverError, Workspace


class Clearing:
    """Destroys, then looks: nothing is called gone because somebody tried to remove it."""

    def __init__(self, driver: Driver, workspace: Workspace) -> None:
        self._driver = driver
        self._workspace = workspace

    async def clear(self, vm_id: VmId, held: Sequence[ResourceRef]) -> list[ResourceRef]:
        """End the machine; which of `held` is gone. Raises `DriverError` when the machine may be there still."""
        await self._driver.destroy(vm_id)
        try:
            await self._workspace.remove(vm_id)
            remaining = await self._remaining(vm_id, held)
        except (ChunkError, DriverError):
            return []
        return [one for one in held if one not in remaining]

    async def _remaining(self, vm_id: VmId, held: Sequence[ResourceRef]) -> list[ResourceRef]:
        ours = self._workspace.resource(vm_id)
        return [
            *await self._workspace.remaining([one for one in held if one == ours]),
            *await self._driver.remaining([one for one in held if one != ours]),
        ]

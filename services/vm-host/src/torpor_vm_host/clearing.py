"""Ends a machine and gives back what it held; says what was then observed gone."""

import logging
from collections.abc import Sequence
from typing import Final

from torpor_chunks.port import ChunkError
from torpor_contracts.ids import VmId
from torpor_contracts.vm import ResourceRef
from torpor_vm_host.ports import Driver, DriverError, Workspace

_log: Final = logging.getLogger(__name__)


class Clearing:
    """Destroys, then looks: nothing is called gone because somebody tried to remove it."""

    def __init__(self, driver: Driver, workspace: Workspace) -> None:
        self._driver = driver
        self._workspace = workspace

    async def end(self, vm_id: VmId, held: Sequence[ResourceRef]) -> list[ResourceRef]:
        """End the machine, but keep its directory; which of `held` is gone. See `clear`."""
        await self._driver.destroy(vm_id)
        return await self._gone(vm_id, held)

    async def clear(self, vm_id: VmId, held: Sequence[ResourceRef]) -> list[ResourceRef]:
        """End the machine; which of `held` is gone. Raises `DriverError` when the machine may be there still."""
        await self._driver.destroy(vm_id)
        try:
            await self._workspace.remove(vm_id)
        except ChunkError as error:
            _log.warning("the directory of %s cannot be removed yet: %s", vm_id, error)
        return await self._gone(vm_id, held)

    async def _gone(self, vm_id: VmId, held: Sequence[ResourceRef]) -> list[ResourceRef]:
        try:
            remaining = await self._remaining(vm_id, held)
        except (ChunkError, DriverError) as error:
            _log.warning("what %s holds still cannot be looked at: %s", vm_id, error)
            return []
        return [one for one in held if one not in remaining]

    async def _remaining(self, vm_id: VmId, held: Sequence[ResourceRef]) -> list[ResourceRef]:
        ours = self._workspace.resource(vm_id)
        return [
            *await self._workspace.remaining([one for one in held if one == ours]),
            *await self._driver.remaining([one for one in held if one != ours]),
        ]

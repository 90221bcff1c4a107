"""One lock for each machine: commands, observations and upkeep of a machine never overlap."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from torpor_contracts.ids import VmId


class VmLocks:
    """Locks by machine; those that nobody holds or waits for are dropped."""

    def __init__(self) -> None:
        self._locks: dict[VmId, asyncio.Lock] = {}
        self._wanted: dict[VmId, int] = {}

    def busy(self, vm_id: VmId) -> bool:
        """Whether somebody is at work on the machine."""
        return vm_id in self._locks

    @asynccontextmanager
    async def holding(self, vm_id: VmId) -> AsyncIterator[None]:
        """Work on the machine alone."""
        lock = self._locks.setdefault(vm_id, asyncio.Lock())
        self._wanted[vm_id] = self._wanted.get(vm_id, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._wanted[vm_id] -= 1
            if not self._wanted[vm_id]:
                del self._wanted[vm_id], self._locks[vm_id]

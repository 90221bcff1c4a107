"""Removes packs that nothing refers to: what suspends left that came to nothing, and hosts that died in the middle.

A pack is old enough to be swept long after it was too old to be recorded: the two cannot meet, and need no lock.
"""

import logging
from collections.abc import Iterator
from typing import Final

from torpor_chunks.port import SHARDS, ChunkError, ChunkStore
from torpor_contracts.ids import TenantId
from torpor_messaging.service_ports import ServicePorts
from torpor_snapshot_store.holders import Holders

SHARDS_AT_ONCE: Final = 256
"""How much of the store one pass looks at: a whole tenant's packs, or as many shards of several."""

_log: Final = logging.getLogger(__name__)


class Sweeping:
    """Goes round the store, a part of it in each pass."""

    def __init__(self, chunks: ChunkStore, ports: ServicePorts, grace_s: float) -> None:
        self._chunks = chunks
        self._holders = Holders(ports.log, ports.views)
        self._grace_s = grace_s
        self._round: Iterator[tuple[TenantId, int]] = iter(())

    async def sweep(self) -> None:
        """One pass; what cannot be looked at now is looked at in the next round."""
        for count in range(SHARDS_AT_ONCE):
            found = next(self._round, None)
            if found is None:
                if count:
                    return
                self._round = _shards(await self._chunks.tenants())
                continue
            try:
                await self._shard(*found)
            except ChunkError as error:
                _log.warning("shard %d of %s is not swept now: %s", found[1], found[0], error)

    async def _shard(self, tenant_id: TenantId, shard: int) -> None:
        present = await self._chunks.present(tenant_id, shard)
        old = {pack.address: pack.size_bytes for pack in present if pack.age_s > self._grace_s}
        if not old:
            return
        held = await self._holders.others(None, old)
        held |= await self._chunks.labelled(tenant_id)
        for address in sorted(set(old) - held):
            if await self._chunks.delete(tenant_id, address):
                _log.info("swept %s of %s: %d bytes nothing refers to", address, tenant_id, old[address])


def _shards(tenants: list[TenantId]) -> Iterator[tuple[TenantId, int]]:
    return ((tenant_id, shard) for tenant_id in tenants for shard in range(SHARDS))

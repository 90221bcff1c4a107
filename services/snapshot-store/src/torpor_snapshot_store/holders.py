"""Which checkpoints hold a pack, as of the end of the log: the view, and what the log has beyond it."""

from collections.abc import Iterable
from typing import Final

from torpor_contracts.checkpoint import CheckpointFreed, CheckpointRecorded
from torpor_contracts.errors import Transient
from torpor_contracts.ids import CheckpointId
from torpor_eventlog.codec import decode_event
from torpor_eventlog.port import EventLog
from torpor_eventlog.views_port import ViewStore
from torpor_snapshot_store.projections import PACKS, Checkpoints, addresses

READ_ROWS: Final = 1000
BEHIND_ROWS_MAX: Final = 200_000
"""How far the view may be behind the log before an answer is put off."""

HOLDERS_MAX: Final = 1000
"""Holders of one pack that are looked at; one other is enough to keep it."""

_TAGS: Final = {str(kind.__struct_config__.tag) for kind in (CheckpointRecorded, CheckpointFreed)}


class Holders:
    """Reads references. Ask only while holding `ChunkStore.exclusive`, or they change before the answer is used."""

    def __init__(self, log: EventLog, views: ViewStore) -> None:
        self._log = log
        self._views = views

    async def others(self, checkpoint_id: CheckpointId | None, wanted: Iterable[str]) -> set[str]:
        """Those of the addresses that another checkpoint holds too; raises `Transient` when the view is far behind."""
        wanted = set(wanted)
        # The position first: what is folded after it is read twice, which changes nothing.
        position = await self._views.position(Checkpoints.name)
        async with self._views.reading() as rows:
            holders = {
                address: {row.checkpoint_id for row in await rows.find(PACKS, {"address": address}, limit=HOLDERS_MAX)}
                for address in wanted
            }
        await self._read_on(position, holders)
        return {address for address, found in holders.items() if found - {checkpoint_id}}

    async def _read_on(self, position: int, holders: dict[str, set[CheckpointId]]) -> None:
        freed: set[CheckpointId] = set()
        for _ in range(BEHIND_ROWS_MAX // READ_ROWS):
            rest = await self._log.read(position, READ_ROWS)
            if not rest:
                break
            for recorded in rest:
                if recorded.tag not in _TAGS:
                    continue
                event = decode_event(recorded)
                if isinstance(event, CheckpointFreed):
                    freed.add(event.checkpoint_id)
                else:
                    for address in addresses(event.manifest):
                        if address in holders:
                            holders[address].add(event.checkpoint_id)
            position = rest[-1].position
        else:
            raise Transient("the view of checkpoints is far behind the log", retry_after_s=5.0)
        for found in holders.values():
            found.difference_update(freed)

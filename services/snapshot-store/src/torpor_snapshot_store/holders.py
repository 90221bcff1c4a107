"""Which checkpoints hold a pack, and which sessions a checkpoint, as of the end of the log.

Answered from the view, and from what the log has beyond it.
"""

from collections.abc import AsyncGenerator, Collection, Iterable
from typing import Final

from torpor_contracts.checkpoint import CheckpointFreed, CheckpointRecorded
from torpor_contracts.errors import Transient
from torpor_contracts.ids import CheckpointId, SessionId
from torpor_contracts.session import SessionTerminated
from torpor_eventlog.codec import decode_event
from torpor_eventlog.port import EventLog, Recorded
from torpor_eventlog.views_port import ViewStore
from torpor_snapshot_store.domain.pins import BASES, base_of
from torpor_snapshot_store.projections import PACKS, SESSIONS, Checkpoints, addresses

READ_ROWS: Final = 1000
BEHIND_ROWS_MAX: Final = 200_000
"""How far the view may be behind the log before an answer is put off."""

HOLDERS_MAX: Final = 1000
"""Holders of one pack that are looked at; one other is enough to keep it."""

_TAGS: Final = {str(kind.__struct_config__.tag) for kind in (CheckpointRecorded, CheckpointFreed)}
_SESSION_TAGS: Final = {str(kind.__struct_config__.tag) for kind in (*BASES, SessionTerminated)}


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

    async def sessions(self, checkpoint_id: CheckpointId) -> set[SessionId]:
        """The living sessions that rest on the checkpoint, whoever made it."""
        position = await self._views.position(Checkpoints.name)
        resting: set[SessionId] = set()
        after: str | None = None
        async with self._views.reading() as rows:
            while page := await rows.find(SESSIONS, {"newest_id": checkpoint_id}, after_key=after, limit=HOLDERS_MAX):
                resting.update(row.session_id for row in page if not row.over)
                after = page[-1].session_id
        async for recorded in self._beyond(position, _SESSION_TAGS):
            event, session_id = decode_event(recorded), SessionId(recorded.stream)
            base = base_of(event)
            if base == checkpoint_id:
                resting.add(session_id)
            elif base is not None or isinstance(event, SessionTerminated):
                resting.discard(session_id)
        return resting

    async def _read_on(self, position: int, holders: dict[str, set[CheckpointId]]) -> None:
        freed: set[CheckpointId] = set()
        async for recorded in self._beyond(position, _TAGS):
            event = decode_event(recorded)
            if isinstance(event, CheckpointFreed):
                freed.add(event.checkpoint_id)
            else:
                for address in addresses(event.manifest):
                    if address in holders:
                        holders[address].add(event.checkpoint_id)
        for found in holders.values():
            found.difference_update(freed)

    async def _beyond(self, position: int, tags: Collection[str]) -> AsyncGenerator[Recorded, None]:
        """The rows of these types that the log has behind a position; `Transient` when there are too many rows."""
        for _ in range(BEHIND_ROWS_MAX // READ_ROWS):
            rest = await self._log.read(position, READ_ROWS)
            if not rest:
                return
            for recorded in rest:
                if recorded.tag in tags:
                    yield recorded
            position = rest[-1].position
        raise Transient("the view of checkpoints is far behind the log", retry_after_s=5.0)

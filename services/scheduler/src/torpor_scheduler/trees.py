"""What the log says of checkpoints, and which of them are of a session's tree: its own, and those on the way to it.

Read from the checkpoints' own streams, never from a view: a decision rests on it.
"""

from collections import OrderedDict
from typing import Final

import msgspec

from torpor_contracts.checkpoint import CheckpointFreed, CheckpointFreeStarted, CheckpointRecorded
from torpor_contracts.errors import Rejected
from torpor_contracts.ids import CheckpointId
from torpor_eventlog.codec import decode_event
from torpor_eventlog.port import EventLog
from torpor_scheduler.domain.session import Session
from torpor_scheduler.domain.session_decisions import CheckpointFacts, LookedUp

ANCESTORS_MAX: Final = 1_000
"""How far back a fork's tree is followed beyond where it began."""

PARENTS_KEPT: Final = 4_096


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's stream; `recorded` None: nothing of a checkpoint stands there."""

    version: int
    position: int = 0
    recorded: CheckpointRecorded | None = None
    kept: bool = False


class Trees:
    """Looks up checkpoints for sessions; remembers parents, which never change."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._parents: OrderedDict[CheckpointId, CheckpointId | None] = OrderedDict()

    async def look_up(self, session: Session, checkpoint_id: CheckpointId) -> LookedUp:
        """What there is under the id, for this session; what it may not use looks as if it were not there."""
        found = await self._read(checkpoint_id)
        recorded = found.recorded
        if recorded is None or recorded.tenant_id != session.tenant_id:
            return LookedUp(version=found.version, facts=None)
        if recorded.manifest.session_id != session.session_id and not await self._is_before(session, checkpoint_id):
            return LookedUp(version=found.version, facts=None)
        manifest = recorded.manifest
        facts = CheckpointFacts(
            checkpoint_id=checkpoint_id,
            incarnation=manifest.incarnation if manifest.session_id == session.session_id else 0,
            fingerprint=manifest.fingerprint,
            log_position=manifest.log_position or found.position,
            recorded_at=recorded.recorded_at,
            kept=found.kept,
        )
        return LookedUp(version=found.version, facts=facts)

    async def _is_before(self, session: Session, checkpoint_id: CheckpointId) -> bool:
        """Whether the checkpoint is the one the session began in, or an ancestor of that."""
        if session.lineage is None:
            return False
        here: CheckpointId | None = session.lineage.checkpoint_id
        for _ in range(ANCESTORS_MAX):
            if here is None or here == checkpoint_id:
                return here is not None
            here = await self._parent(here)
        raise Rejected(
            "checkpoint-too-far",
            f"{checkpoint_id} is not among the {ANCESTORS_MAX} checkpoints before the session began",
            "fork the session that made it instead",
        )

    async def _parent(self, checkpoint_id: CheckpointId) -> CheckpointId | None:
        if checkpoint_id not in self._parents:
            recorded = (await self._read(checkpoint_id)).recorded
            self._parents[checkpoint_id] = None if recorded is None else recorded.manifest.parent_id
            if len(self._parents) > PARENTS_KEPT:
                self._parents.popitem(last=False)
        return self._parents[checkpoint_id]

    async def _read(self, checkpoint_id: CheckpointId) -> _Found:
        rows = await self._log.load(checkpoint_id)
        events = [decode_event(row) for row in rows]
        if not events or not isinstance(events[0], CheckpointRecorded):
            return _Found(version=len(rows))
        kept = not any(isinstance(event, CheckpointFreeStarted | CheckpointFreed) for event in events)
        return _Found(version=rows[-1].version, position=rows[0].position, recorded=events[0], kept=kept)

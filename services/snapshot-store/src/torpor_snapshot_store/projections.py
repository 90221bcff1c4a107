"""The checkpoints, which packs each of them holds, and which of them their sessions may go back to."""

from typing import Any, Final, Literal

import msgspec

from torpor_contracts.checkpoint import (
    CheckpointFreed,
    CheckpointFreeStarted,
    CheckpointManifest,
    CheckpointRecorded,
    CheckpointReferenced,
    CheckpointUnreferenced,
)
from torpor_contracts.ids import CheckpointId, SessionId, TenantId
from torpor_contracts.session import SessionTerminated
from torpor_contracts.session_branches import SessionCheckpointed
from torpor_eventlog.instants import to_us
from torpor_eventlog.port import Recorded
from torpor_eventlog.views_port import Table, WritableRows
from torpor_snapshot_store.domain.pins import BASES, base_of


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint; `position` is that of its last event, `recorded_position` that of its first."""

    checkpoint_id: CheckpointId
    tenant_id: TenantId
    session_id: SessionId
    manifest: CheckpointManifest
    state: Literal["kept", "freeing", "freed"]
    stored_bytes: int
    children: list[CheckpointId]
    recorded_us: int
    recorded_position: int
    freed_us: int | None = None
    position: int
    label: str = ""


class PackRow(msgspec.Struct, frozen=True, kw_only=True):
    """That a checkpoint that is not freed holds a pack."""

    key: str
    address: str
    checkpoint_id: CheckpointId


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a session says of its checkpoints: the one it rests on, since when, and whether it is over."""

    session_id: SessionId
    newest_id: CheckpointId | None = None
    newest_position: int = 0
    over: bool = False


CHECKPOINTS: Final = Table(
    name="checkpoints", row=CheckpointRow, key="checkpoint_id", indexed=("tenant_id", "session_id", "state")
)
PACKS: Final = Table(name="checkpoint_packs", row=PackRow, key="key", indexed=("address", "checkpoint_id"))
SESSIONS: Final = Table(name="checkpoint_sessions", row=SessionRow, key="session_id", indexed=("newest_id",))


class Checkpoints:
    """Folds the events of checkpoints, and those of sessions that say which checkpoint is theirs."""

    name = "checkpoints"
    tables = (CHECKPOINTS, PACKS, SESSIONS)

    async def fold(self, rows: WritableRows, event: Any, recorded: Recorded) -> None:
        """See `Projection.fold`."""
        match event:
            case CheckpointRecorded():
                await self._record(rows, event, recorded)
            case CheckpointReferenced() | CheckpointUnreferenced() | CheckpointFreeStarted() | CheckpointFreed():
                await self._change(rows, event, recorded)
            case SessionTerminated():
                await self._over(rows, recorded)
            case _ if isinstance(event, BASES):
                await self._rest(rows, event, recorded)
            case _:
                return

    async def _record(self, rows: WritableRows, event: CheckpointRecorded, recorded: Recorded) -> None:
        row = CheckpointRow(
            checkpoint_id=event.checkpoint_id,
            tenant_id=event.tenant_id,
            session_id=event.manifest.session_id,
            manifest=event.manifest,
            state="kept",
            stored_bytes=event.stored_bytes,
            children=[],
            recorded_us=to_us(event.recorded_at),
            recorded_position=recorded.position,
            position=recorded.position,
        )
        await rows.put(CHECKPOINTS, row)
        for address in addresses(event.manifest):
            key = pack_key(address, event.checkpoint_id)
            await rows.put(PACKS, PackRow(key=key, address=address, checkpoint_id=event.checkpoint_id))

    async def _change(
        self,
        rows: WritableRows,
        event: CheckpointReferenced | CheckpointUnreferenced | CheckpointFreeStarted | CheckpointFreed,
        recorded: Recorded,
    ) -> None:
        row: CheckpointRow | None = await rows.get(CHECKPOINTS, event.checkpoint_id)
        if row is None:
            return
        row = msgspec.structs.replace(row, position=recorded.position)
        match event:
            case CheckpointReferenced():
                row = msgspec.structs.replace(row, children=[*row.children, event.child_id])
            case CheckpointUnreferenced():
                left = [child for child in row.children if child != event.child_id]
                row = msgspec.structs.replace(row, children=left)
            case CheckpointFreeStarted():
                row = msgspec.structs.replace(row, state="freeing")
            case CheckpointFreed():
                row = msgspec.structs.replace(row, state="freed", freed_us=to_us(event.freed_at))
                for address in addresses(row.manifest):
                    await rows.delete(PACKS, pack_key(address, event.checkpoint_id))
        await rows.put(CHECKPOINTS, row)

    async def _over(self, rows: WritableRows, recorded: Recorded) -> None:
        row = await _session(rows, recorded)
        await rows.put(SESSIONS, msgspec.structs.replace(row, over=True))

    async def _rest(self, rows: WritableRows, event: Any, recorded: Recorded) -> None:
        """The session rests on another checkpoint, and may have given it a name."""
        base = base_of(event)
        if base is None:
            return
        row = await _session(rows, recorded)
        await rows.put(SESSIONS, msgspec.structs.replace(row, newest_id=base, newest_position=recorded.position))
        named: CheckpointRow | None = await rows.get(CHECKPOINTS, base)
        if isinstance(event, SessionCheckpointed) and event.label and named is not None:
            await rows.put(CHECKPOINTS, msgspec.structs.replace(named, label=event.label))


async def _session(rows: WritableRows, recorded: Recorded) -> SessionRow:
    session_id = SessionId(recorded.stream)
    row: SessionRow | None = await rows.get(SESSIONS, session_id)
    return row or SessionRow(session_id=session_id)


def addresses(manifest: CheckpointManifest) -> list[str]:
    """The addresses of a manifest's packs, each once."""
    return list(dict.fromkeys(pack.address for pack in manifest.packs))


def pack_key(address: str, checkpoint_id: CheckpointId) -> str:
    """The key of a pack that a checkpoint holds."""
    return f"{address}/{checkpoint_id}"

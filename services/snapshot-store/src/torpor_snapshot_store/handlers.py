"""Registers and frees checkpoints. What is recorded is in the store, what is called freed is gone from it.

No lock is needed for that. A checkpoint shares packs with its parent only, and the parent's stream is in the same
commit: while a parent is kept so are its packs, and one that is just being freed makes the commit a conflict. A pack
that nothing refers to is swept when it is old, and recorded only while it is young.
"""

import hashlib
import logging
from collections.abc import Mapping
from typing import Final, assert_never

import msgspec

from torpor_chunks.port import (
    ChunkError,
    ChunkStore,
    IllegalAddress,
    PartCorrupt,
    PartMissing,
    Stored,
)
from torpor_contracts.checkpoint import (
    CheckpointCommand,
    CheckpointEvent,
    CheckpointManifest,
    FreeCheckpoint,
    RegisterCheckpoint,
)
from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.ids import CheckpointId, CommandId, TenantId
from torpor_contracts.replies import Receipt
from torpor_eventlog.codec import decode_event
from torpor_eventlog.deciding import Decisions
from torpor_messaging.service import Incoming
from torpor_messaging.service_ports import ServicePorts
from torpor_snapshot_store.domain import checkpoint as domain
from torpor_snapshot_store.domain.checkpoint import ABSENT, Absent, CheckpointState, Freeing, Kept, evolve
from torpor_snapshot_store.domain.pins import Placed, session_pin
from torpor_snapshot_store.holders import Holders
from torpor_snapshot_store.projections import CHECKPOINTS, CheckpointRow

STREAMS_KEPT: Final = 256
FREEINGS_MAX: Final = 100
"""Broken-off frees that are finished in one pass."""

_log: Final = logging.getLogger(__name__)


class _Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of recording that parts are gone; the state it is made of makes it happen once."""

    tenant_id: TenantId
    command_id: CommandId
    causation_id: str
    correlation_id: str
    request_digest: bytes


class Handlers:
    """Commands to events."""

    def __init__(self, chunks: ChunkStore, ports: ServicePorts, *, young_s: float) -> None:
        """`young_s`: how old, seconds, a pack may be that nothing refers to, to be recorded still."""
        self._chunks = chunks
        self._young_s = young_s
        self._ports = ports
        self._holders = Holders(ports.log, ports.views)
        self._decisions = Decisions[CheckpointState](ports.log, _initial, _fold, ports.clock.now, STREAMS_KEPT)

    async def handle(self, incoming: Incoming) -> Receipt | None:
        """Carry out a command whose target is the checkpoint."""
        checkpoint_id = CheckpointId(incoming.target)
        command: CheckpointCommand = incoming.command
        known = await self._decisions.execute(incoming, checkpoint_id, lambda _: [])
        try:
            match command:
                case RegisterCheckpoint():
                    return known or await self._register(incoming, checkpoint_id, command.manifest)
                case FreeCheckpoint() if known is None:
                    return await self._free(incoming, checkpoint_id, command)
                case FreeCheckpoint():
                    await self._delete(checkpoint_id, incoming.command_id)
                    return known
                case _ as never:
                    assert_never(never)
        except ChunkError as error:
            raise Transient(f"the chunk store cannot be used now: {error}", retry_after_s=2.0) from error

    async def finish_freeing(self) -> None:
        """Delete what is left of checkpoints whose freeing was broken off."""
        async with self._ports.views.reading() as rows:
            left: list[CheckpointRow] = list(await rows.find(CHECKPOINTS, {"state": "freeing"}, limit=FREEINGS_MAX))
        for row in left:
            try:
                await self._delete(row.checkpoint_id, "snapshot-store/freeing")
            except (ChunkError, Transient) as error:
                _log.warning("%s is not freed yet: %s", row.checkpoint_id, error)

    async def _register(
        self, incoming: Incoming, checkpoint_id: CheckpointId, manifest: CheckpointManifest
    ) -> Receipt | None:
        domain.check_manifest(manifest)
        state, _ = await self._decisions.fold(checkpoint_id)
        if not isinstance(state, Absent):
            domain.check_same(state, checkpoint_id, incoming.tenant_id, manifest)
            return await self._first_receipt(incoming, checkpoint_id)
        await self._check_stored(incoming.tenant_id, manifest)
        # Its own pack is all that no checkpoint can hold yet: the others are its parent's.
        own = manifest.packs[0]
        rests = await self._rests(manifest)
        receipt = await self._decisions.execute_across(
            incoming,
            [checkpoint_id, *([manifest.parent_id] if manifest.parent_id else [])],
            lambda states: domain.register(
                states,
                checkpoint_id,
                incoming.tenant_id,
                manifest,
                stored_bytes=own.size_bytes,
                now=self._ports.clock.now(),
                rests=rests,
            ),
        )
        return receipt or await self._first_receipt(incoming, checkpoint_id)

    async def _rests(self, manifest: CheckpointManifest) -> bool:
        """Whether the checkpoint's session rests on its parent although that is about to be freed."""
        parent_id = manifest.parent_id
        if parent_id is None:
            return False
        parent, _ = await self._decisions.fold(parent_id)
        return isinstance(parent, Freeing) and manifest.session_id in await self._holders.sessions(parent_id)

    async def _free(self, incoming: Incoming, checkpoint_id: CheckpointId, command: FreeCheckpoint) -> Receipt | None:
        state, _ = await self._decisions.fold(checkpoint_id)
        domain.check_free(state, checkpoint_id, incoming.tenant_id)
        cause = incoming
        if not isinstance(state, Absent):
            # The operator may free a tenant's checkpoint; the event is the tenant's all the same.
            cause = msgspec.structs.replace(incoming, tenant_id=state.tenant_id)

        def decide(now: CheckpointState) -> list[CheckpointEvent]:
            domain.check_free(now, checkpoint_id, incoming.tenant_id)
            started = domain.free_started(now, checkpoint_id, command.reason, self._ports.clock.now())
            return [event for _, event in started]

        async def unpinned() -> Mapping[str, int]:
            now, _ = await self._decisions.fold(checkpoint_id)
            return await self._check_sessions(now, checkpoint_id) if isinstance(now, Kept) else {}

        receipt = await self._decisions.execute(cause, checkpoint_id, decide, given=unpinned)
        await self._delete(checkpoint_id, incoming.command_id)
        return receipt

    async def _delete(self, checkpoint_id: CheckpointId, causation_id: str) -> None:
        """Delete the packs that nothing else holds, then record that; may be repeated at any time.

        A session may have come to rest on it while that was last looked at: then it waits until that has gone on.
        """
        state, _ = await self._decisions.fold(checkpoint_id)
        if not isinstance(state, Freeing) or state.children or await self._holders.sessions(checkpoint_id):
            return
        sizes = sizes_of(state.manifest)
        held = await self._holders.others(checkpoint_id, sizes)
        alone = [address for address in sizes if address not in held]
        for address in alone:
            await self._chunks.delete(state.tenant_id, address)
        command_id = self._ports.ids.new("system/snapshot-store")
        cause = _Observation(
            tenant_id=state.tenant_id,
            command_id=CommandId(command_id),
            causation_id=causation_id,
            correlation_id=state.manifest.session_id,
            request_digest=hashlib.sha256(command_id.encode()).digest(),
        )
        parent_id = state.manifest.parent_id
        await self._decisions.execute_across(
            cause,
            [checkpoint_id, *([parent_id] if parent_id else [])],
            lambda states: domain.freed(
                states,
                checkpoint_id,
                freed_bytes=sum(sizes[address] for address in alone),
                now=self._ports.clock.now(),
            ),
        )

    async def _check_stored(self, tenant_id: TenantId, manifest: CheckpointManifest) -> None:
        """Refuse a manifest that is not what its pack says, under seal; all its packs are there. Reads no chunk."""
        try:
            found = await self._chunks.inspect(tenant_id, manifest.packs[0].address)
        except (PartMissing, PartCorrupt, IllegalAddress) as error:
            raise Rejected(error.code, str(error), "put the parts into the chunk store again, then register") from error
        if _claimed(manifest) != _sealed(found.stored):
            raise Rejected(
                PartCorrupt.code,
                f"the manifest is not what {found.stored.address} says it is",
                "register what putting the parts answered",
            )
        if found.age_s > self._young_s:
            raise Rejected(
                "pack-too-old",
                f"{found.stored.address} was put {found.age_s:.0f} s ago and may be swept at any moment",
                "put the parts into the chunk store again, then register",
            )

    async def _check_sessions(self, state: Kept, checkpoint_id: CheckpointId) -> Mapping[str, int]:
        """Refuse what a session may go back to; the version of its own session, which must not change meanwhile."""
        recorded = await self._ports.log.load(checkpoint_id)
        own_id = state.manifest.session_id
        session = await self._ports.log.load(own_id)
        placed = (Placed(one.position, decode_event(one)) for one in session)
        why = session_pin(checkpoint_id, recorded[0].position, placed)
        others = sorted(await self._holders.sessions(checkpoint_id) - {own_id})
        if why is None and others:
            why = f"{', '.join(others[:5])} may be resumed from it"
        if why is not None:
            raise domain.referenced(checkpoint_id, why, "terminate the session, or checkpoint it anew, first")
        return {own_id: session[-1].version if session else 0}

    async def _first_receipt(self, incoming: Incoming, checkpoint_id: CheckpointId) -> Receipt:
        """The receipt of the checkpoint's registration, also for who asks under another command id."""
        first = (await self._ports.log.load(checkpoint_id))[0]
        return Receipt(
            command_id=incoming.command_id,
            stream=first.stream,
            version=first.version,
            position=first.position,
            digest=first.digest.hex(),
        )


def sizes_of(manifest: CheckpointManifest) -> dict[str, int]:
    """The sizes of a manifest's packs."""
    return {pack.address: pack.size_bytes for pack in manifest.packs}


def _claimed(manifest: CheckpointManifest) -> tuple[Mapping[str, tuple[str, int, int]], list[tuple[str, int]]]:
    parts = {str(part.kind): (part.digest, part.size_bytes, part.unique_bytes) for part in manifest.parts}
    return parts, [(pack.address, pack.size_bytes) for pack in manifest.packs]


def _sealed(stored: Stored) -> tuple[Mapping[str, tuple[str, int, int]], list[tuple[str, int]]]:
    parts = {part.name: (part.digest, part.size_bytes, part.unique_bytes) for part in stored.parts}
    return parts, [(pack.address, pack.size_bytes) for pack in stored.packs]


def _initial() -> CheckpointState:
    return ABSENT


def _fold(state: CheckpointState, event: object) -> CheckpointState:
    if not isinstance(event, CheckpointEvent):
        raise Rejected("id-taken", "this is the id of something else", "name a checkpoint")
    return evolve(state, event)

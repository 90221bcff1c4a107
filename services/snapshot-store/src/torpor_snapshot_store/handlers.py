"""Registers and frees checkpoints. A part is verified before it is recorded, and deleted before it is called freed.

Both are decided while `ChunkStore.exclusive` is held: nothing is freed that is just being recorded.
"""

import hashlib
import logging
from typing import Final, assert_never

import msgspec

from torpor_chunks.port import (
    ChunkError,
    ChunkStore,
    IllegalDigest,
    NoSpace,
    PartCorrupt,
    PartMissing,
    StoreUnavailable,
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
from torpor_snapshot_store.projections import CHECKPOINTS, CheckpointRow, digests

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

    def __init__(self, chunks: ChunkStore, ports: ServicePorts) -> None:
        self._chunks = chunks
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
                    await self._go_on_freeing(checkpoint_id, incoming.command_id)
                    return known
                case _ as never:
                    assert_never(never)
        except (NoSpace, StoreUnavailable) as error:
            raise Transient(f"the chunk store cannot be used now: {error}", retry_after_s=2.0) from error

    async def finish_freeing(self) -> None:
        """Delete what is left of checkpoints whose freeing was broken off."""
        async with self._ports.views.reading() as rows:
            left: list[CheckpointRow] = list(await rows.find(CHECKPOINTS, {"state": "freeing"}, limit=FREEINGS_MAX))
        for row in left:
            try:
                await self._go_on_freeing(row.checkpoint_id, "snapshot-store/freeing")
            except (ChunkError, Transient) as error:
                _log.warning("%s is not freed yet: %s", row.checkpoint_id, error)

    async def _go_on_freeing(self, checkpoint_id: CheckpointId, causation_id: str) -> None:
        async with self._chunks.exclusive():
            await self._delete(checkpoint_id, causation_id)

    async def _register(
        self, incoming: Incoming, checkpoint_id: CheckpointId, manifest: CheckpointManifest
    ) -> Receipt | None:
        domain.check_manifest(manifest)
        state, _ = await self._decisions.fold(checkpoint_id)
        if not isinstance(state, Absent):
            domain.check_same(state, checkpoint_id, incoming.tenant_id, manifest)
            return await self._first_receipt(incoming, checkpoint_id)
        await self._verify(manifest)
        streams = [checkpoint_id, *([manifest.parent_id] if manifest.parent_id else [])]
        async with self._chunks.exclusive():
            await self._check_present(manifest)
            held = await self._holders.others(checkpoint_id, digests(manifest))
            sizes = {part.digest: part.size_bytes for part in manifest.parts}
            stored_bytes = sum(size for digest, size in sizes.items() if digest not in held)
            receipt = await self._decisions.execute_across(
                incoming,
                streams,
                lambda states: domain.register(
                    states,
                    checkpoint_id,
                    incoming.tenant_id,
                    manifest,
                    stored_bytes=stored_bytes,
                    now=self._ports.clock.now(),
                ),
            )
        return receipt or await self._first_receipt(incoming, checkpoint_id)

    async def _free(self, incoming: Incoming, checkpoint_id: CheckpointId, command: FreeCheckpoint) -> Receipt | None:
        async with self._chunks.exclusive():
            state, _ = await self._decisions.fold(checkpoint_id)
            domain.check_free(state, checkpoint_id, incoming.tenant_id)
            cause = incoming
            if isinstance(state, Kept):
                await self._check_session(state, checkpoint_id)
                # The operator may free a tenant's checkpoint; the event is the tenant's all the same.
                cause = msgspec.structs.replace(incoming, tenant_id=state.tenant_id)
            receipt = await self._decisions.execute(
                cause,
                checkpoint_id,
                lambda now: [
                    event
                    for _, event in domain.free_started(now, checkpoint_id, command.reason, self._ports.clock.now())
                ],
            )
            await self._delete(checkpoint_id, incoming.command_id)
        return receipt

    async def _delete(self, checkpoint_id: CheckpointId, causation_id: str) -> None:
        """Delete the parts that nothing else holds, then record that; may be repeated at any time."""
        state, _ = await self._decisions.fold(checkpoint_id)
        if not isinstance(state, Freeing):
            return
        wanted = digests(state.manifest)
        held = await self._holders.others(checkpoint_id, wanted)
        sizes = {part.digest: part.size_bytes for part in state.manifest.parts}
        alone = [digest for digest in wanted if digest not in held]
        for digest in alone:
            await self._chunks.delete(digest)
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
                freed_bytes=sum(sizes[digest] for digest in alone),
                now=self._ports.clock.now(),
            ),
        )

    async def _verify(self, manifest: CheckpointManifest) -> None:
        for part in manifest.parts:
            try:
                await self._chunks.verify(part.digest, part.size_bytes)
            except (PartMissing, PartCorrupt, IllegalDigest) as error:
                raise Rejected(
                    error.code, f"{part.kind}: {error}", "put the part into the chunk store again, then register"
                ) from error

    async def _check_present(self, manifest: CheckpointManifest) -> None:
        """Look again, now that nobody can free: what was verified a moment ago may have been freed since."""
        for part in manifest.parts:
            if await self._chunks.size(part.digest) != part.size_bytes:
                raise Rejected(
                    PartMissing.code, f"{part.kind}: {part.digest} was freed meanwhile", "put it again, then register"
                )

    async def _check_session(self, state: Kept, checkpoint_id: CheckpointId) -> None:
        recorded = await self._ports.log.load(checkpoint_id)
        session = await self._ports.log.load(state.manifest.session_id)
        placed = (Placed(one.position, decode_event(one)) for one in session)
        why = session_pin(checkpoint_id, recorded[0].position, placed)
        if why is not None:
            raise domain.referenced(checkpoint_id, why, "terminate the session, or suspend it to a newer one, first")

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


def _initial() -> CheckpointState:
    return ABSENT


def _fold(state: CheckpointState, event: object) -> CheckpointState:
    if not isinstance(event, CheckpointEvent):
        raise Rejected("id-taken", "this is the id of something else", "name a checkpoint")
    return evolve(state, event)

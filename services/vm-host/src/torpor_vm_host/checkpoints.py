"""Checkpoints as a host deals with them: kept in the chunk store, registered with the snapshot store, fetched again."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from torpor_chunks.port import ChunkError, ChunkStore, PackAddress, PartSource, WantedPart, named
from torpor_contracts.checkpoint import (
    CheckpointFreed,
    CheckpointFreeStarted,
    CheckpointManifest,
    CheckpointPack,
    CheckpointPart,
    CheckpointRecorded,
    RegisterCheckpoint,
)
from torpor_contracts.errors import TorporError, Transient
from torpor_contracts.ids import CheckpointId, CommandId, TenantId
from torpor_contracts.replies import Reply
from torpor_eventlog.codec import decode_event
from torpor_messaging.ports import OutgoingCommand
from torpor_messaging.service_ports import ServicePorts
from torpor_vm_host.domain.observations import Failure
from torpor_vm_host.host import Host
from torpor_vm_host.ledger import About
from torpor_vm_host.ports import CheckpointFiles, DriverError, PartFile, PartKind

CALL_S: Final = 10.0
"""How long one answer of the snapshot store is waited for; it looks for every pack before it answers."""

PAUSE_S: Final = 0.5
PAUSE_S_MAX: Final = 5.0


class NotDone(TorporError):  # noqa: N818  (says what is so)
    """A start or a suspend came to nothing; `failure` is what will be recorded."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.code}: {failure.detail}")
        self.failure = failure


def failure_of(error: DriverError | ChunkError | NotDone) -> Failure:
    """What a failed step is recorded as."""
    match error:
        case NotDone():
            return error.failure
        case DriverError():
            return Failure(error.code, error.detail, error.retryable)
        case ChunkError():
            return Failure(error.code, str(error), error.code not in FINAL)


FINAL: Final = frozenset({"checkpoint-part-missing", "checkpoint-part-corrupt", "illegal-address"})
"""Codes of what no other try will make good."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's parts as they are in the chunk store, and the packs that hold their chunks."""

    parts: list[CheckpointPart]
    packs: list[CheckpointPack]


class Checkpoints:
    """Puts, registers and fetches checkpoints for the machines of one host."""

    def __init__(self, host: Host, chunks: ChunkStore, ports: ServicePorts) -> None:
        self._host = host
        self._chunks = chunks
        self._ports = ports

    async def keep(self, tenant_id: TenantId, parts: Sequence[PartFile], parent_id: CheckpointId | None) -> Kept:
        """Put the parts of a checkpoint into the chunk store, durably, sharing with its parent what is the same."""
        sources = [PartSource(name=part.kind, path=part.path, head_bytes=part.head_bytes) for part in parts]
        stored = await self._chunks.put(tenant_id, sources, onto=await self._pack_of(tenant_id, parent_id))
        kept = named(stored.parts)
        return Kept(
            parts=[
                CheckpointPart(
                    kind=part.kind,
                    digest=kept[part.kind].digest,
                    size_bytes=kept[part.kind].size_bytes,
                    unique_bytes=kept[part.kind].unique_bytes,
                )
                for part in parts
            ],
            packs=[CheckpointPack(address=pack.address, size_bytes=pack.size_bytes) for pack in stored.packs],
        )

    async def _pack_of(self, tenant_id: TenantId, checkpoint_id: CheckpointId | None) -> PackAddress | None:
        """The pack of a checkpoint that others may be put onto; None for none, or one that is not kept."""
        if checkpoint_id is None:
            return None
        try:
            manifest = await self._recorded(checkpoint_id, tenant_id)
        except NotDone:
            return None
        return PackAddress(manifest.packs[0].address) if manifest.packs else None

    async def register(
        self, about: About, checkpoint_id: CheckpointId, manifest: CheckpointManifest, deadline_at: datetime
    ) -> None:
        """Have the checkpoint recorded; asked again with the same id until the deadline. Raises `NotDone`.

        Whether it is recorded the log says, not the answer: that may get lost, and the machine is destroyed after it.
        After `snapshot-store-unavailable` it may yet be recorded: a checkpoint that nobody refers to.
        """
        if await self._standing(checkpoint_id, manifest) is not None:
            return
        command = OutgoingCommand(
            tenant_id=about.tenant_id,
            service="snapshot-store",
            target=checkpoint_id,
            command=RegisterCheckpoint(host_id=self._host.host_id, manifest=manifest),
            command_id=CommandId(f"register-{checkpoint_id}"),
            causation_id=about.causation_id,
            correlation_id=about.correlation_id,
        )
        try:
            reply = msgspec.json.decode(await self._answer(command, deadline_at), type=Reply)
        except NotDone:
            if await self._standing(checkpoint_id, manifest) is not None:
                return
            raise
        if reply.receipt is None:
            refusal = reply.refusal
            code, detail = (refusal.code, refusal.message) if refusal else ("no-receipt", "the answer is empty")
            raise NotDone(Failure(code, f"the snapshot store refused the checkpoint: {detail}", retryable=False))
        await self.still_recorded(checkpoint_id, manifest)

    async def still_recorded(self, checkpoint_id: CheckpointId, manifest: CheckpointManifest) -> Mapping[str, int]:
        """The checkpoint's stream and its version, for a decision to rest on; raises `NotDone` once it is freed.

        A receipt is answered for ever, also for what a session that has gone on has let be freed meanwhile.
        """
        version = await self._standing(checkpoint_id, manifest)
        if version is None:
            raise _final("checkpoint-freed", f"{checkpoint_id} is freed, or is another checkpoint")
        return {checkpoint_id: version}

    async def log_position(self) -> int:
        """Up to where the log has come."""
        return (await self._ports.log.head()).position

    async def _answer(self, command: OutgoingCommand, deadline_at: datetime) -> bytes:
        clock, pause_s = self._ports.clock, PAUSE_S
        while True:
            try:
                return await self._ports.bus.call(command, CALL_S)
            except Transient as error:
                if (deadline_at - clock.now()).total_seconds() <= pause_s:
                    detail = f"the checkpoint could not be registered in time: {error}"
                    raise NotDone(Failure("snapshot-store-unavailable", detail, retryable=True)) from error
                await clock.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _standing(self, checkpoint_id: CheckpointId, manifest: CheckpointManifest) -> int | None:
        """The version of the checkpoint's stream, None unless it is recorded with this manifest and not freed."""
        stream = await self._ports.log.load(checkpoint_id)
        events = [decode_event(recorded) for recorded in stream]
        freed = any(isinstance(event, CheckpointFreeStarted | CheckpointFreed) for event in events)
        same = any(isinstance(one, CheckpointRecorded) and one.manifest == manifest for one in events)
        return stream[-1].version if same and not freed else None

    async def manifest(self, checkpoint_id: CheckpointId, tenant_id: TenantId, fingerprint: str) -> CheckpointManifest:
        """The manifest of a checkpoint that this host can load, from the log; raises `NotDone`."""
        found = await self._recorded(checkpoint_id, tenant_id)
        if found.fingerprint != fingerprint:
            raise _final(
                "fingerprint-mismatch",
                f"{checkpoint_id} was made by {found.fingerprint!r}, this host loads {fingerprint!r}",
            )
        if not found.packs:
            raise _final("checkpoint-missing", f"{checkpoint_id} was kept by an earlier release, in no pack")
        return found

    async def _recorded(self, checkpoint_id: CheckpointId, tenant_id: TenantId) -> CheckpointManifest:
        """The manifest of a checkpoint that is kept, from the log; raises `NotDone`."""
        found: CheckpointRecorded | None = None
        for recorded in await self._ports.log.load(checkpoint_id):
            event = decode_event(recorded)
            if isinstance(event, CheckpointRecorded) and event.tenant_id == tenant_id:
                found = event
            elif isinstance(event, CheckpointFreed):
                # One that is only about to be freed is kept for whoever came to rest on it before.
                raise _final("checkpoint-freed", f"{checkpoint_id} is freed")
        if found is None:
            raise _final("checkpoint-missing", f"there is no checkpoint {checkpoint_id} of this tenant")
        return found.manifest

    async def fetch(
        self, checkpoint_id: CheckpointId, tenant_id: TenantId, manifest: CheckpointManifest, directory: Path
    ) -> CheckpointFiles:
        """Write every part into `directory`, verified; raises `ChunkError`."""
        files: dict[PartKind, Path] = {part.kind: directory / part.kind for part in manifest.parts}
        wanted = [
            WantedPart(name=part.kind, digest=part.digest, size_bytes=part.size_bytes, into=files[part.kind])
            for part in manifest.parts
        ]
        await self._chunks.fetch(tenant_id, manifest.packs[0].address, wanted)
        return CheckpointFiles(checkpoint_id=checkpoint_id, files=files)


def _final(code: str, detail: str) -> NotDone:
    return NotDone(Failure(code, detail, retryable=False))

"""Commands and events of a checkpoint; stream `<checkpoint id>`, owned by the snapshot store."""

from datetime import datetime
from typing import Literal

import msgspec

from torpor_contracts.ids import CheckpointId, HostId, SessionId, TenantId


class CheckpointPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a checkpoint. `digest` is `sha256:<hex>` of its bytes.

    `unique_bytes` is what putting it added to the store: of its chunks those that were new, compressed and sealed.
    """

    kind: Literal["memory", "devices", "disk"]
    digest: str
    size_bytes: int
    unique_bytes: int


class CheckpointPack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pack of the chunk store: an immutable object of so many bytes."""

    address: str
    size_bytes: int


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What binds one memory image, one device state and one disk generation, and the engine that can load them.

    `packs` are the objects that hold the parts' chunks: the checkpoint's own first, then those it shares with earlier
    checkpoints. `template` is the digest (`sha256:<hex>`) of the template its memory and disk are changes of, None for
    an engine that knows no templates. `log_position`: up to where the log had come while the machine stood still; 0:
    not known.
    """

    session_id: SessionId
    incarnation: int
    parent_id: CheckpointId | None
    fingerprint: str
    parts: list[CheckpointPart]
    packs: list[CheckpointPack] = []
    template: str | None = None
    log_position: int = 0


class RegisterCheckpoint(
    msgspec.Struct, frozen=True, kw_only=True, tag="register-checkpoint.v1", forbid_unknown_fields=True
):
    """A host has put a checkpoint's parts into the store.

    Before it is recorded the store checks that the manifest is what the sealed pack says, and that every pack is there.
    """

    host_id: HostId
    manifest: CheckpointManifest


class FreeCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag="free-checkpoint.v1", forbid_unknown_fields=True):
    """Free the checkpoint's parts; refused while anything refers to it."""

    reason: str


CheckpointCommand = RegisterCheckpoint | FreeCheckpoint


class CheckpointRecorded(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint-recorded.v1"):
    """The store holds every part, under an authenticated list of its chunks; storage counts from `recorded_at`.

    `stored_bytes` are those of its packs that no checkpoint held before.
    """

    checkpoint_id: CheckpointId
    tenant_id: TenantId
    manifest: CheckpointManifest
    stored_bytes: int
    recorded_at: datetime


class CheckpointReferenced(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint-referenced.v1"):
    """Another checkpoint was recorded as a child of this one, which therefore may not be freed before it."""

    checkpoint_id: CheckpointId
    child_id: CheckpointId


class CheckpointUnreferenced(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint-unreferenced.v1"):
    """A child of this checkpoint is freed and no longer holds it."""

    checkpoint_id: CheckpointId
    child_id: CheckpointId


class CheckpointFreeStarted(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint-free-started.v1"):
    """The parts are deleted as soon as nothing rests on them; from now on nothing new can come to rest on them."""

    checkpoint_id: CheckpointId
    reason: str
    started_at: datetime


class CheckpointFreed(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint-freed.v1"):
    """The packs that no other checkpoint holds are gone, `freed_bytes` in all; storage stops counting at `freed_at`."""

    checkpoint_id: CheckpointId
    reason: str
    freed_bytes: int
    freed_at: datetime


CheckpointEvent = (
    CheckpointRecorded | CheckpointReferenced | CheckpointUnreferenced | CheckpointFreeStarted | CheckpointFreed
)

# --- queries: qry.<tenant>.snapshot-store.<type>.<target> ------------------------------------------------------


class CheckpointQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`checkpoint`: the one that is the target. `at_least`: wait until the view has come to that position."""

    at_least: int = 0


class CheckpointsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`checkpoints`: those of the session that is the target (`-`: of the tenant).

    `after` is the `next` of the page before.
    """

    after: str | None = None
    limit: int = 200
    at_least: int = 0


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint. `pinned_by` says what keeps it from being freed; `position` is that of its last event.

    `size_bytes` is the sum of its parts, `stored_bytes` those of its packs that no checkpoint held before. `label` is
    its owner's.
    """

    checkpoint_id: CheckpointId
    tenant_id: TenantId
    session_id: SessionId
    incarnation: int
    parent_id: CheckpointId | None
    fingerprint: str
    state: Literal["kept", "freeing", "freed"]
    size_bytes: int
    stored_bytes: int
    parts: list[CheckpointPart]
    packs: list[CheckpointPack]
    pinned_by: list[str]
    recorded_at: datetime
    freed_at: datetime | None
    position: int
    label: str = ""


class VerifyCheckpointQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`verify-checkpoint`: read every chunk of the one that is the target. Asked again while that goes on, it joins."""

    at_least: int = 0


class CheckpointVerification(msgspec.Struct, frozen=True, kw_only=True):
    """What reading a checkpoint whole has shown. `code` and `detail` say what is wrong unless it is `ok`.

    `size_bytes` is the sum of its parts, `packs` what they were read from.
    """

    checkpoint_id: CheckpointId
    ok: bool
    code: str
    detail: str
    size_bytes: int
    packs: list[CheckpointPack]
    took_ms: int


class CheckpointsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of checkpoints, derived from the log up to `position`; `next` asks for the page after, None ends."""

    position: int
    checkpoints: list[CheckpointView]
    next: str | None

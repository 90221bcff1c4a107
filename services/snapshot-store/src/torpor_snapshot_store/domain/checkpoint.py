"""The states of a checkpoint, the one table of what may follow what, and what commands make of them.

A checkpoint that anything refers to is never freed. Its children are written into its own stream, so that recording
a child and freeing its parent cannot pass each other by.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Final, assert_never

import msgspec

from torpor_contracts.checkpoint import (
    CheckpointEvent,
    CheckpointFreed,
    CheckpointFreeStarted,
    CheckpointManifest,
    CheckpointRecorded,
    CheckpointReferenced,
    CheckpointUnreferenced,
)
from torpor_contracts.errors import InvariantViolation, Rejected
from torpor_contracts.ids import CheckpointId, TenantId

PART_KINDS: Final = frozenset({"memory", "devices", "disk"})

Events = list[tuple[str, CheckpointEvent]]
"""Events with the streams they go to."""


class Absent(msgspec.Struct, frozen=True, kw_only=True, tag="absent"):
    """Nobody has recorded it."""


class Kept(msgspec.Struct, frozen=True, kw_only=True, tag="kept"):
    """It can be restored. `children` were recorded with it as their parent and are not freed."""

    tenant_id: TenantId
    manifest: CheckpointManifest
    children: frozenset[CheckpointId] = frozenset()


class Freeing(msgspec.Struct, frozen=True, kw_only=True, tag="freeing"):
    """Its packs are deleted as soon as nobody rests on them: one who came to just before may still be restored."""

    tenant_id: TenantId
    manifest: CheckpointManifest
    reason: str
    children: frozenset[CheckpointId] = frozenset()


class Freed(msgspec.Struct, frozen=True, kw_only=True, tag="freed"):
    """The packs that only it held are gone."""

    tenant_id: TenantId
    manifest: CheckpointManifest


CheckpointState = Absent | Kept | Freeing | Freed

ABSENT: Final = Absent()

TRANSITIONS: Final[Mapping[str, Mapping[type[msgspec.Struct], str]]] = {
    "absent": {CheckpointRecorded: "kept"},
    "kept": {CheckpointReferenced: "kept", CheckpointUnreferenced: "kept", CheckpointFreeStarted: "freeing"},
    "freeing": {CheckpointReferenced: "freeing", CheckpointUnreferenced: "freeing", CheckpointFreed: "freed"},
    "freed": {},
}
"""State -> event -> next state; what is not here cannot happen."""


def name_of(state: CheckpointState) -> str:
    """The state's name in `TRANSITIONS`."""
    return str(state.__struct_config__.tag)


def evolve(state: CheckpointState, event: CheckpointEvent) -> CheckpointState:
    """The state after an event; raises `InvariantViolation` for one that cannot follow."""
    now = name_of(state)
    if type(event) not in TRANSITIONS[now]:
        raise InvariantViolation(f"a checkpoint that is {now} cannot see {type(event).__name__}")
    if isinstance(event, CheckpointRecorded):
        return Kept(tenant_id=event.tenant_id, manifest=event.manifest)
    assert not isinstance(state, Absent), "the table allows nothing else of what nobody recorded"
    match event:
        case CheckpointReferenced():
            return _with_children(state, _children(state) | {event.child_id})
        case CheckpointUnreferenced():
            return _with_children(state, _children(state) - {event.child_id})
        case CheckpointFreeStarted():
            return Freeing(tenant_id=state.tenant_id, manifest=state.manifest, reason=event.reason)
        case CheckpointFreed():
            return Freed(tenant_id=state.tenant_id, manifest=state.manifest)
        case _ as never:
            assert_never(never)


def check_manifest(manifest: CheckpointManifest) -> None:
    """Refuse a manifest that does not bind exactly one part of each kind."""
    kinds = sorted(part.kind for part in manifest.parts)
    if kinds != sorted(PART_KINDS):
        raise Rejected(
            "manifest-incomplete",
            f"the manifest has the parts {', '.join(kinds) or 'none'}",
            f"give exactly one of each: {', '.join(sorted(PART_KINDS))}",
        )
    if not manifest.packs:
        raise Rejected(
            "manifest-incomplete", "the manifest names no pack", "name the packs that putting the parts answered"
        )
    if any(part.size_bytes < 0 for part in manifest.parts) or manifest.incarnation < 1 or not manifest.fingerprint:
        raise Rejected(
            "manifest-illegal",
            "a size is negative, the incarnation is not from 1 on, or there is no fingerprint",
            "give what the host observed",
        )


def register(
    states: Mapping[str, CheckpointState],
    checkpoint_id: CheckpointId,
    tenant_id: TenantId,
    manifest: CheckpointManifest,
    *,
    stored_bytes: int,
    now: datetime,
    rests: bool = False,
) -> Events:
    """Record a verified checkpoint, and with it that its parent is held; nothing when just that is recorded.

    `rests`: its session rests on the parent, which therefore is there although it is about to be freed.
    """
    state = states[checkpoint_id]
    if not isinstance(state, Absent):
        check_same(state, checkpoint_id, tenant_id, manifest)
        return []
    recorded = CheckpointRecorded(
        checkpoint_id=checkpoint_id,
        tenant_id=tenant_id,
        manifest=manifest,
        stored_bytes=stored_bytes,
        recorded_at=now,
    )
    if manifest.parent_id is None:
        _check_shared(manifest, frozenset())
        return [(checkpoint_id, recorded)]
    check_parent(states[manifest.parent_id], manifest.parent_id, tenant_id, manifest, rests=rests)
    held = CheckpointReferenced(checkpoint_id=manifest.parent_id, child_id=checkpoint_id)
    return [(checkpoint_id, recorded), (manifest.parent_id, held)]


def check_same(
    state: Kept | Freeing | Freed, checkpoint_id: CheckpointId, tenant_id: TenantId, manifest: CheckpointManifest
) -> None:
    """Refuse another checkpoint under an id that is taken, and one that is freed."""
    if state.tenant_id != tenant_id or state.manifest != manifest:
        raise Rejected(
            "checkpoint-exists",
            f"{checkpoint_id} is recorded with another manifest",
            "register this one under a new id",
        )
    if not isinstance(state, Kept):
        raise _freed(checkpoint_id)


def check_parent(
    parent: CheckpointState, parent_id: CheckpointId, tenant_id: TenantId, manifest: CheckpointManifest, *, rests: bool
) -> None:
    """Refuse a parent that is not there, is another tenant's, or is freed or about to be; and packs of anything else.

    `rests`: a session rests on the parent, which therefore will not be freed before it has gone on.
    """
    if isinstance(parent, Absent) or parent.tenant_id != tenant_id:
        raise Rejected("parent-unknown", f"there is no checkpoint {parent_id}", "name a parent that is recorded")
    if isinstance(parent, Freed) or (isinstance(parent, Freeing) and not rests):
        raise _freed(parent_id)
    _check_shared(manifest, frozenset(pack.address for pack in parent.manifest.packs))


def check_free(state: CheckpointState, checkpoint_id: CheckpointId, tenant_id: TenantId) -> None:
    """Refuse to free what is not there, is another tenant's, or has children."""
    if isinstance(state, Absent) or tenant_id not in {state.tenant_id, "system"}:
        raise Rejected("checkpoint-unknown", f"there is no checkpoint {checkpoint_id}", "see the list of checkpoints")
    if isinstance(state, Kept) and state.children:
        names = ", ".join(sorted(state.children)[:5])
        raise referenced(checkpoint_id, f"it is the parent of {names}", "free those first")


def referenced(checkpoint_id: CheckpointId, why: str, advice: str) -> Rejected:
    """The refusal to free what something refers to."""
    return Rejected("checkpoint-referenced", f"{checkpoint_id} is held: {why}", advice)


def free_started(state: CheckpointState, checkpoint_id: CheckpointId, reason: str, now: datetime) -> Events:
    """From now on it can be restored no more; nothing when that is so already."""
    if not isinstance(state, Kept):
        return []
    return [(checkpoint_id, CheckpointFreeStarted(checkpoint_id=checkpoint_id, reason=reason, started_at=now))]


def freed(
    states: Mapping[str, CheckpointState], checkpoint_id: CheckpointId, *, freed_bytes: int, now: datetime
) -> Events:
    """Its parts are gone, and with them what held its parent; nothing when that is recorded."""
    state = states[checkpoint_id]
    if not isinstance(state, Freeing) or state.children:
        return []
    gone = CheckpointFreed(checkpoint_id=checkpoint_id, reason=state.reason, freed_bytes=freed_bytes, freed_at=now)
    parent_id = state.manifest.parent_id
    if parent_id is None or not isinstance(states[parent_id], Kept | Freeing):
        return [(checkpoint_id, gone)]
    let_go = CheckpointUnreferenced(checkpoint_id=parent_id, child_id=checkpoint_id)
    return [(checkpoint_id, gone), (parent_id, let_go)]


def _check_shared(manifest: CheckpointManifest, of_parent: frozenset[str]) -> None:
    """Packs are held by those who are recorded with them: what a checkpoint shares must be its parent's."""
    foreign = [pack.address for pack in manifest.packs[1:] if pack.address not in of_parent]
    if foreign:
        raise Rejected(
            "manifest-illegal",
            f"it shares {foreign[0]}, which its parent does not hold",
            "put the parts onto the pack of the checkpoint's parent, or onto none",
        )


def _freed(checkpoint_id: CheckpointId) -> Rejected:
    return Rejected("checkpoint-freed", f"{checkpoint_id} is freed", "use a checkpoint that is kept")


def _children(state: Kept | Freeing | Freed) -> frozenset[CheckpointId]:
    assert not isinstance(state, Freed), "the table allows children of nothing that is gone"
    return state.children


def _with_children(state: Kept | Freeing | Freed, children: frozenset[CheckpointId]) -> Kept | Freeing:
    assert not isinstance(state, Freed), "the table allows children of nothing that is gone"
    return msgspec.structs.replace(state, children=children)

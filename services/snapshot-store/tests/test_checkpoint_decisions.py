"""Given what happened to checkpoints, when one is registered or freed: happens, rejected, ignored."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from torpor_contracts.checkpoint import (
    CheckpointEvent,
    CheckpointFreed,
    CheckpointFreeStarted,
    CheckpointManifest,
    CheckpointPack,
    CheckpointPart,
    CheckpointRecorded,
    CheckpointReferenced,
    CheckpointUnreferenced,
)
from torpor_contracts.errors import InvariantViolation, Rejected
from torpor_contracts.ids import CheckpointId, HostId, SessionId, TenantId
from torpor_contracts.session import MachineSpec, RetryRule, SessionRequested, SessionSuspended, SessionTerminated
from torpor_contracts.session_branches import Lineage, RollbackRequested, SessionCheckpointed
from torpor_snapshot_store.domain import checkpoint as domain
from torpor_snapshot_store.domain.checkpoint import ABSENT, TRANSITIONS, CheckpointState, Events, evolve, name_of
from torpor_snapshot_store.domain.pins import Placed, base_of, session_pin

NOW = datetime(2030, 1, 1, tzinfo=UTC)
ACME = TenantId("acme")
CKP, CHILD = CheckpointId("ckp-1"), CheckpointId("ckp-2")


def part(kind: Any = "memory", digit: str = "0") -> CheckpointPart:
    return CheckpointPart(kind=kind, digest="sha256:" + digit * 64, size_bytes=7, unique_bytes=7)


PARTS = [part("memory", "1"), part("devices", "2"), part("disk", "3")]
PACK, PACK_OF_CHILD = (CheckpointPack(address=f"pack-{digit * 32}", size_bytes=9) for digit in "ab")
MANIFEST = CheckpointManifest(
    session_id=SessionId("s-1"), incarnation=1, parent_id=None, fingerprint="f", parts=PARTS, packs=[PACK]
)
OF_CHILD = msgspec.structs.replace(MANIFEST, parent_id=CKP, incarnation=2, packs=[PACK_OF_CHILD, PACK])


def fold(events: Events) -> dict[str, CheckpointState]:
    states: dict[str, CheckpointState] = {CKP: ABSENT, CHILD: ABSENT}
    for stream, event in events:
        states[stream] = evolve(states[stream], event)
    return states


def register(
    states: Mapping[str, CheckpointState], manifest: CheckpointManifest = MANIFEST, tenant_id: TenantId = ACME
) -> Events:
    checkpoint_id = CKP if manifest.parent_id is None else CHILD
    return domain.register(states, checkpoint_id, tenant_id, manifest, stored_bytes=21, now=NOW)


def free(
    states: Mapping[str, CheckpointState], checkpoint_id: CheckpointId = CKP, tenant_id: TenantId = ACME
) -> Events:
    domain.check_free(states[checkpoint_id], checkpoint_id, tenant_id)
    return domain.free_started(states[checkpoint_id], checkpoint_id, "done with", NOW)


def freed(states: Mapping[str, CheckpointState], checkpoint_id: CheckpointId = CKP) -> Events:
    return domain.freed(states, checkpoint_id, freed_bytes=21, now=NOW)


KEPT = register(fold([]))
FAMILY = [*KEPT, *register(fold(KEPT), OF_CHILD)]
FREEING = [*KEPT, *free(fold(KEPT))]
FREED = [*FREEING, *freed(fold(FREEING))]


def kinds(events: Events) -> list[tuple[str, type[Any]]]:
    return [(stream, type(event)) for stream, event in events]


def code(call: Any) -> str:
    with pytest.raises(Rejected) as refused:
        call()
    assert refused.value.advice
    return refused.value.code


def test_a_checkpoint_is_recorded_and_holds_its_parent() -> None:
    assert kinds(KEPT) == [(CKP, CheckpointRecorded)]
    assert kinds(FAMILY[1:]) == [(CHILD, CheckpointRecorded), (CKP, CheckpointReferenced)]


def test_the_same_again_changes_nothing_and_another_is_refused() -> None:
    assert register(fold(KEPT)) == []
    assert code(lambda: register(fold(KEPT), msgspec.structs.replace(MANIFEST, incarnation=2))) == "checkpoint-exists"
    assert code(lambda: register(fold(KEPT), tenant_id=TenantId("other"))) == "checkpoint-exists"
    assert code(lambda: register(fold(FREEING))) == "checkpoint-freed"
    assert code(lambda: register(fold(FREED))) == "checkpoint-freed"


def test_a_parent_must_be_there_ones_own_and_kept() -> None:
    assert code(lambda: register(fold([]), OF_CHILD)) == "parent-unknown"
    assert code(lambda: register(fold(KEPT), OF_CHILD, TenantId("other"))) == "parent-unknown"
    assert code(lambda: register(fold(FREEING), OF_CHILD)) == "checkpoint-freed"
    assert code(lambda: register(fold(FREED), OF_CHILD)) == "checkpoint-freed"


def test_who_came_to_rest_on_a_checkpoint_before_it_was_to_be_freed_goes_on_from_it() -> None:
    states = fold(FREEING)
    late = domain.register(states, CHILD, ACME, OF_CHILD, stored_bytes=21, now=NOW, rests=True)
    history = [*FREEING, *late]
    assert [name_of(fold(history)[one]) for one in (CKP, CHILD)] == ["freeing", "kept"]
    assert freed(fold(history)) == [], "it is the parent of one that is kept"
    history += free(fold(history), CHILD)
    history += freed(fold(history), CHILD)
    history += freed(fold(history))
    assert [name_of(fold(history)[one]) for one in (CKP, CHILD)] == ["freed", "freed"]
    assert code(lambda: register(fold(FREED), OF_CHILD)) == "checkpoint-freed"


@pytest.mark.parametrize(
    "parts", [[], PARTS[:2], [*PARTS, part("disk", "4")], [PARTS[0], PARTS[0], PARTS[0]]], ids=["0", "2", "4", "same"]
)
def test_a_manifest_binds_one_part_of_each_kind(parts: list[CheckpointPart]) -> None:
    manifest = msgspec.structs.replace(MANIFEST, parts=parts)
    assert code(lambda: domain.check_manifest(manifest)) == "manifest-incomplete"


def test_a_checkpoint_shares_with_its_parent_only() -> None:
    """What nobody records as held could be freed at any moment."""
    orphan = msgspec.structs.replace(OF_CHILD, parent_id=None)
    assert code(lambda: domain.register(fold([]), CHILD, ACME, orphan, stored_bytes=9, now=NOW)) == "manifest-illegal"
    other = msgspec.structs.replace(OF_CHILD, packs=[*OF_CHILD.packs, CheckpointPack(address="pack-c", size_bytes=1)])
    assert code(lambda: register(fold(KEPT), other)) == "manifest-illegal"
    nothing = msgspec.structs.replace(MANIFEST, packs=[])
    assert code(lambda: domain.check_manifest(nothing)) == "manifest-incomplete"


@pytest.mark.parametrize("change", [{"incarnation": 0}, {"fingerprint": ""}])
def test_a_manifest_says_what_was_observed(change: dict[str, Any]) -> None:
    manifest = msgspec.structs.replace(MANIFEST, **change)
    assert code(lambda: domain.check_manifest(manifest)) == "manifest-illegal"
    domain.check_manifest(MANIFEST)


def test_a_parent_is_freed_after_its_child_and_not_before() -> None:
    assert code(lambda: free(fold(FAMILY))) == "checkpoint-referenced"
    going = [*FAMILY, *free(fold(FAMILY), CHILD)]
    assert code(lambda: free(fold(going))) == "checkpoint-referenced"
    gone = [*going, *freed(fold(going), CHILD)]
    assert kinds(gone[-2:]) == [(CHILD, CheckpointFreed), (CKP, CheckpointUnreferenced)]
    assert kinds(free(fold(gone))) == [(CKP, CheckpointFreeStarted)]


def test_freeing_happens_once_and_never_to_others() -> None:
    assert kinds(FREED[1:]) == [(CKP, CheckpointFreeStarted), (CKP, CheckpointFreed)]
    assert free(fold(FREEING)) == free(fold(FREED)) == []
    assert freed(fold(KEPT)) == freed(fold(FREED)) == []
    assert code(lambda: free(fold([]))) == "checkpoint-unknown"
    assert code(lambda: free(fold(KEPT), tenant_id=TenantId("other"))) == "checkpoint-unknown"
    assert kinds(free(fold(KEPT), tenant_id=TenantId("system"))) == [(CKP, CheckpointFreeStarted)]


def test_every_event_in_every_state_does_what_the_table_says() -> None:
    going = [*FAMILY, *free(fold(FAMILY), CHILD)]
    events = {type(event): event for _, event in [*going, *freed(fold(going), CHILD), *FREED]}
    assert set(events) == set(CheckpointEvent.__args__)
    for history in ([], KEPT, FAMILY, FREEING, FREED):
        state = fold(history)[CKP]
        for kind, event in events.items():
            after = TRANSITIONS[name_of(state)].get(kind)
            if after is None:
                with pytest.raises(InvariantViolation):
                    evolve(state, event)
            else:
                assert name_of(evolve(state, event)) == after
    assert {name_of(fold(history)[CKP]) for history in ([], KEPT, FREEING, FREED)} == set(TRANSITIONS)


def suspended(position: int, checkpoint_id: str) -> Placed:
    event = SessionSuspended(
        incarnation=1,
        host_id=HostId("host-a"),
        checkpoint_id=CheckpointId(checkpoint_id),
        fingerprint="f",
        observed_at=NOW,
    )
    return Placed(position, event)


def captured(position: int, checkpoint_id: str) -> Placed:
    event = SessionCheckpointed(
        incarnation=1,
        host_id=HostId("host-a"),
        checkpoint_id=CheckpointId(checkpoint_id),
        fingerprint="f",
        label="",
        pause_ms=1.0,
        log_position=1,
        taken_at=NOW,
        observed_at=NOW,
    )
    return Placed(position, event)


def went_back(position: int, checkpoint_id: str) -> Placed:
    event = RollbackRequested(
        session_id=SessionId("s-1"),
        host_id=None,
        vm_id=None,
        incarnation=1,
        checkpoint_id=CheckpointId(checkpoint_id),
        checkpoint_incarnation=1,
        fingerprint="f",
        log_position=1,
        recorded_at=NOW,
        requested_at=NOW,
        deadline_at=NOW,
    )
    return Placed(position, event)


def requested(position: int, lineage: Lineage | None) -> Placed:
    event = SessionRequested(
        session_id=SessionId("s-2"),
        tenant_id=ACME,
        machine=MachineSpec(),
        idle_after_s=None,
        start_retry=RetryRule(),
        metadata={},
        requested_at=NOW,
        lineage=lineage,
    )
    return Placed(position, event)


TERMINATED = Placed(90, SessionTerminated(incarnation=1, cause="", observed_at=NOW))


@pytest.mark.parametrize(
    ("session", "pinned"),
    [
        ([], True),
        ([suspended(12, "ckp-1")], True),
        ([suspended(8, "ckp-0")], True),
        ([suspended(12, "ckp-1"), suspended(20, "ckp-2")], False),
        ([suspended(20, "ckp-2")], False),
        ([suspended(12, "ckp-1"), TERMINATED], False),
        ([TERMINATED], False),
        ([requested(1, None)], True),
        ([captured(12, "ckp-1")], True),
        ([captured(12, "ckp-1"), captured(20, "ckp-2")], False),
        ([captured(12, "ckp-1"), captured(20, "ckp-2"), went_back(30, "ckp-1")], True),
        ([suspended(12, "ckp-1"), went_back(30, "ckp-0")], False),
        ([went_back(8, "ckp-0")], True),
    ],
    ids=[
        "unheard of",
        "newest",
        "not named yet",
        "superseded",
        "never named",
        "terminated",
        "at once terminated",
        "no checkpoint yet",
        "taken while it ran",
        "a newer one taken",
        "gone back to",
        "left behind",
        "recorded after going back",
    ],
)
def test_a_session_holds_what_it_may_go_back_to(session: list[Placed], pinned: bool) -> None:
    """The checkpoint was recorded at position 10."""
    assert (session_pin(CKP, 10, session) is not None) == pinned


def test_a_fork_rests_where_it_began() -> None:
    lineage = Lineage(
        session_id=SessionId("s-1"), checkpoint_id=CKP, fingerprint="f", made_on=HostId("host-a"), log_position=3
    )
    assert base_of(requested(1, lineage).event) == CKP
    assert base_of(requested(1, None).event) is None
    assert base_of(TERMINATED.event) is None

"""The snapshot store over a real chunk store: nothing is recorded that is not there, nothing referenced is freed."""

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.store_world import Put, StoreWorld
from torpor_contracts.checkpoint import CheckpointFreed, CheckpointPack, CheckpointRecorded
from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.ids import SYSTEM_TENANT, TenantId
from torpor_snapshot_store.projections import CHECKPOINTS, PACKS

MEMORY = os.urandom(64 * 4096)
CHANGED = MEMORY[: 40 * 4096] + os.urandom(24 * 4096)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def code(work: Coroutine[Any, Any, object]) -> str:
    with pytest.raises(Rejected) as refused:
        await work
    assert refused.value.advice
    return refused.value.code


async def whole(world: StoreWorld, put: Put, tenant_id: str = "acme") -> bool:
    await world.chunks.verify(TenantId(tenant_id), put.packs[0].address)
    return True


def test_a_registered_checkpoint_is_recorded_with_what_it_adds(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        put = await world.put(MEMORY, b"devices", b"disk")
        receipt = await world.register("ckp-1", put)
        assert receipt is not None
        assert (receipt.stream, receipt.version, receipt.position) == ("ckp-1", 1, 1)
        recorded: CheckpointRecorded = await world.last("ckp-1")
        assert recorded.stored_bytes == world.path_of(put).stat().st_size > len(MEMORY)
        assert recorded.stored_bytes == sum(part.unique_bytes for part in put.parts)
        more = await world.put(CHANGED, b"devices", b"disk", onto=put)
        await world.register("ckp-2", more, "ckp-1")
        added = (await world.last("ckp-2")).stored_bytes
        assert 24 * 4096 < added < 26 * 4096, "only what has changed"
        assert await world.tags("ckp-1") == ["checkpoint-recorded", "checkpoint-referenced"]

    run(scenario())


def test_the_same_registration_is_answered_with_the_same_receipt(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        put = await world.put(b"1", b"2", b"3")
        first = await world.register("ckp-1", put, command_id="acme/register")
        assert await world.register("ckp-1", put, command_id="acme/register") == first
        other = await world.register("ckp-1", put)
        assert first is not None
        assert other is not None
        assert (other.position, other.digest) == (first.position, first.digest)
        assert await code(world.register("ckp-1", await world.put(b"1", b"2", b"4"))) == "checkpoint-exists"
        assert await world.tags("ckp-1") == ["checkpoint-recorded"]

    run(scenario())


@pytest.mark.parametrize("damage", ["table flipped", "cut", "longer", "missing", "shared missing"])
def test_a_pack_that_is_not_what_it_should_be_is_not_recorded(tmp_path: Path, damage: str) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        first = await world.kept("ckp-1", MEMORY, b"devices", b"disk")
        put = await world.put(CHANGED, b"devices", b"disk", onto=first)
        path = world.path_of(first if damage == "shared missing" else put)
        content = path.read_bytes()
        path.chmod(0o600)
        if "missing" in damage:
            path.unlink()
        else:
            flipped = content[:-60] + bytes([content[-60] ^ 1]) + content[-59:]
            changed = {"table flipped": flipped, "cut": content[:-1], "longer": content + b"x"}
            path.write_bytes(changed[damage])
        expected = "checkpoint-part-missing" if "missing" in damage else "checkpoint-part-corrupt"
        assert await code(world.register("ckp-2", put, "ckp-1")) == expected
        assert await world.tags("ckp-2") == []
        again = await world.put(CHANGED, b"devices", b"disk")
        assert await world.register("ckp-2", again, "ckp-1") is not None

    run(scenario())


def test_illegal_registrations_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        put = await world.put(b"1", b"2", b"3")
        assert await code(world.register("ckp-1", Put(put.parts[:2], put.packs))) == "manifest-incomplete"
        assert await code(world.register("ckp-1", Put(put.parts, []))) == "manifest-incomplete"
        evil = CheckpointPack(address="pack-../../../etc/passwd", size_bytes=1)
        assert await code(world.register("ckp-1", Put(put.parts, [evil]))) == "illegal-address"
        for part in (replace(put.parts[0], size_bytes=2), replace(put.parts[0], unique_bytes=1)):
            claimed = Put([part, *put.parts[1:]], put.packs)
            assert await code(world.register("ckp-1", claimed)) == "checkpoint-part-corrupt"
        cheaper = Put(put.parts, [replace(put.packs[0], size_bytes=1)])
        assert await code(world.register("ckp-1", cheaper)) == "checkpoint-part-corrupt"
        assert await code(world.register("ckp-1", put, "ckp-0")) == "parent-unknown"
        await world.terminated("ckp-session")
        assert await code(world.register("ckp-session", put)) == "id-taken"

    run(scenario())


def test_what_is_shared_with_another_than_the_parent_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        first = await world.kept("ckp-1", MEMORY, b"devices", b"disk")
        await world.kept("ckp-2", b"1", b"2", b"3")
        put = await world.put(CHANGED, b"devices", b"disk", onto=first)
        assert await code(world.register("ckp-3", put)) == "manifest-illegal"
        assert await code(world.register("ckp-3", put, "ckp-2")) == "manifest-illegal"
        assert await world.register("ckp-3", put, "ckp-1") is not None

    run(scenario())


def test_a_store_that_cannot_be_read_now_is_tried_again_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        put = await world.put(b"1", b"2", b"3")
        tenants = tmp_path / "chunks" / "tenants"
        tenants.rename(tmp_path / "away")
        tenants.write_bytes(b"in the way")
        with pytest.raises(Transient):
            await world.register("ckp-1", put)
        tenants.unlink()
        (tmp_path / "away").rename(tenants)
        assert await world.register("ckp-1", put) is not None

    run(scenario())


def test_a_freed_checkpoint_is_gone_with_what_only_it_held(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        first = await world.kept("ckp-1", MEMORY, b"devices", b"disk")
        second = await world.kept("ckp-2", CHANGED, b"devices", b"disk", parent="ckp-1", onto=first)
        await world.suspended("ckp-1")
        receipt = await world.free("ckp-2", command_id="acme/free")
        assert receipt is not None
        assert await world.tags("ckp-2") == ["checkpoint-recorded", "checkpoint-free-started", "checkpoint-freed"]
        freed: CheckpointFreed = await world.last("ckp-2")
        assert freed.freed_bytes == second.packs[0].size_bytes
        assert world.packs() == 1
        assert await world.free("ckp-2", command_id="acme/free") == receipt
        assert await world.free("ckp-2") is None
        assert await whole(world, first)

    run(scenario())


def test_forks_share_with_their_origin_and_are_freed_one_by_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        origin = await world.kept("ckp-0", MEMORY, b"devices", b"disk")
        forks = [
            await world.kept(f"ckp-{n}", CHANGED, b"devices", bytes([n]), parent="ckp-0", onto=origin) for n in (1, 2)
        ]
        await world.terminated()
        assert await code(world.free("ckp-0")) == "checkpoint-referenced"
        assert await world.free("ckp-1") is not None
        assert await whole(world, forks[1])
        assert await world.free("ckp-2") is not None
        assert await world.free("ckp-0") is not None
        assert world.packs() == 0

    run(scenario())


def test_nothing_that_is_referenced_is_freed(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        await world.kept("ckp-1", b"1", b"2", b"3")
        assert await code(world.free("ckp-1")) == "checkpoint-referenced"
        await world.suspended("ckp-1")
        assert await code(world.free("ckp-1")) == "checkpoint-referenced"
        await world.kept("ckp-2", b"4", b"5", b"6", parent="ckp-1")
        await world.suspended("ckp-2")
        assert await code(world.free("ckp-1")) == "checkpoint-referenced"
        await world.terminated()
        assert await code(world.free("ckp-1")) == "checkpoint-referenced"
        assert world.packs() == 2
        assert await world.free("ckp-2") is not None
        assert await world.free("ckp-1", tenant_id=SYSTEM_TENANT) is not None
        assert world.packs() == 0
        recorded = (await world.outside.log.load("ckp-1"))[-1]
        assert recorded.tenant_id == "acme", "what the operator frees is the tenant's to see"

    run(scenario())


def test_another_tenants_checkpoint_cannot_be_freed_named_or_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        put = await world.kept("ckp-1", b"1", b"2", b"3")
        await world.terminated()
        other = TenantId("other")
        assert await code(world.free("ckp-1", tenant_id=other)) == "checkpoint-unknown"
        assert await code(world.register("ckp-2", put, tenant_id=other)) == "checkpoint-part-missing"
        own = await world.put(b"1", b"2", b"3", tenant_id=other)
        assert own.packs[0].size_bytes == put.packs[0].size_bytes, "what others have saves nothing, so it tells nothing"
        assert await code(world.register("ckp-2", own, "ckp-1", tenant_id=other)) == "parent-unknown"
        await world.fold()
        assert await code(world.ask("checkpoint", "ckp-1", "other")) == "checkpoint-unknown"
        assert (await world.ask("checkpoints", "-", "other")).checkpoints == []

    run(scenario())


@pytest.mark.parametrize("at", ["pack", "record"])
def test_a_broken_off_free_is_finished(tmp_path: Path, at: str) -> None:
    """What dies in the middle leaves a checkpoint that can be restored no more, and that is freed later."""

    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        put = await world.kept("ckp-1", b"1", b"22", b"333")
        await world.terminated()
        world.points.plan({"pack": "delete", "record": "append checkpoint-freed"}[at], dies)
        with pytest.raises(asyncio.CancelledError):
            await world.free("ckp-1", command_id="acme/free")
        assert await world.tags("ckp-1") == ["checkpoint-recorded", "checkpoint-free-started"]
        child = await world.put(b"1", b"2", b"3")
        assert await code(world.register("ckp-2", child, "ckp-1")) == "checkpoint-freed"
        await world.fold()
        await world.background("freeing")
        freed: CheckpointFreed = await world.last("ckp-1")
        assert freed.freed_bytes == put.packs[0].size_bytes, "the whole, though it may have been deleted before"
        assert world.packs() == 1

    run(scenario())


def test_a_repeated_free_finishes_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        await world.kept("ckp-1", b"1", b"22", b"333")
        await world.terminated()
        world.points.plan("delete", dies)
        with pytest.raises(asyncio.CancelledError):
            await world.free("ckp-1", command_id="acme/free")
        assert await world.free("ckp-1", command_id="acme/free") is not None
        assert (await world.tags("ckp-1"))[-1] == "checkpoint-freed"

    run(scenario())


def dies() -> None:
    raise asyncio.CancelledError


def test_a_parent_that_is_freed_while_its_child_is_looked_at_makes_the_registration_fail(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        first = await world.kept("ckp-1", MEMORY, b"devices", b"disk")
        await world.terminated()
        put = await world.put(CHANGED, b"devices", b"disk", onto=first)
        freeing: list[asyncio.Future[Any]] = []
        world.points.plan("inspected", lambda: freeing.append(asyncio.ensure_future(world.free("ckp-1"))))
        registering = asyncio.ensure_future(world.register("ckp-2", put, "ckp-1", session_id="s-2"))
        done = [*await asyncio.gather(registering, return_exceptions=True)]
        done += await asyncio.gather(*freeing, return_exceptions=True)
        refused = [one for one in done if isinstance(one, Rejected)]
        assert len(refused) == 1, "one of the two, never both"
        recorded = await world.tags("ckp-2") == ["checkpoint-recorded"]
        assert refused[0].code == ("checkpoint-referenced" if recorded else "checkpoint-freed")
        if recorded:
            assert await whole(world, put)

    run(scenario())


def test_a_session_that_wakes_while_its_checkpoint_is_freed_keeps_it(tmp_path: Path) -> None:
    """The session is suspended to the checkpoint after it was looked at and before freeing it was recorded."""

    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        put = await world.kept("ckp-1", b"1", b"2", b"3")
        await world.suspended("ckp-0")
        await world.suspended("ckp-other")
        suspending: list[asyncio.Future[Any]] = []
        world.points.plan(
            "append checkpoint-free-started",
            lambda: suspending.append(asyncio.ensure_future(world.suspended("ckp-1"))),
        )
        done = await asyncio.gather(world.free("ckp-1"), return_exceptions=True)
        await asyncio.gather(*suspending)
        assert suspending
        gone = (await world.tags("ckp-1"))[-1] == "checkpoint-freed"
        assert gone or (isinstance(done[0], Rejected) and await whole(world, put))

    run(scenario())


def test_registering_and_freeing_at_once_never_leaves_a_recorded_checkpoint_without_its_packs(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        before = await world.kept("ckp-0", MEMORY, b"2", b"3")
        await world.terminated()
        for number in range(1, 20):
            put = await world.put(CHANGED, bytes([number]), b"3", onto=before)
            old, new = f"ckp-{number - 1}", f"ckp-{number}"
            works = [world.free(old), world.register(new, put, old)]
            await asyncio.gather(*(works if number % 2 else reversed(works)), return_exceptions=True)
            if await world.tags(new) == ["checkpoint-recorded"]:
                assert await whole(world, put)
                before = put
            else:
                before = await world.kept(new, MEMORY, b"2", b"3")

    run(scenario())


def test_what_nothing_refers_to_is_swept_once_it_is_old(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path, sweep_grace_s=100.0)
        first = await world.kept("ckp-1", MEMORY, b"devices", b"disk")
        second = await world.kept("ckp-2", CHANGED, b"devices", b"disk", parent="ckp-1", onto=first)
        orphan, young = await world.put(b"1", b"2", b"3"), await world.put(b"1", b"2", b"3")
        template = await world.put(b"1", b"2", b"3", tenant_id=SYSTEM_TENANT)
        await world.chunks.set_label(SYSTEM_TENANT, "template-x", template.packs[0].address)  # type: ignore[arg-type]
        for put in (first, second, orphan, template):
            world.make_old(put, 101.0)
        await world.sweep()
        assert world.packs() == 4
        for put in (first, second, young):
            assert await whole(world, put)
        assert await whole(world, template, SYSTEM_TENANT)
        assert await code(world.register("ckp-3", orphan)) == "checkpoint-part-missing"
        world.make_old(young, 51.0)
        assert await code(world.register("ckp-3", young)) == "pack-too-old"
        await world.terminated()
        await world.free("ckp-2")
        await world.sweep()
        assert await whole(world, first)

    run(scenario())


def test_a_sweep_that_dies_in_the_middle_is_taken_up_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path, sweep_grace_s=100.0)
        kept = await world.kept("ckp-1", MEMORY, b"devices", b"disk")
        for _ in range(5):
            world.make_old(await world.put(b"1", b"2", b"3"), 101.0)
        world.make_old(kept, 101.0)
        world.points.plan("delete", dies)
        with pytest.raises(asyncio.CancelledError):
            await world.sweep()
        await world.sweep()
        assert world.packs() == 1
        assert await whole(world, kept)

    run(scenario())


def test_queries_answer_from_the_view(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        first = await world.kept("ckp-1", b"1", b"22", b"333")
        await world.suspended("ckp-1")
        await world.kept("ckp-2", b"1", b"22", b"4444", parent="ckp-1", onto=first)
        await world.fold()
        view = await world.ask("checkpoint", "ckp-1")
        assert (view.state, view.size_bytes, view.parent_id) == ("kept", 6, None)
        assert view.stored_bytes == first.packs[0].size_bytes
        assert view.pinned_by == ["session s-1", "checkpoint ckp-2"]
        await world.suspended("ckp-2")
        await world.fold()
        assert (await world.ask("checkpoint", "ckp-1")).pinned_by == ["checkpoint ckp-2"]
        assert (await world.ask("checkpoint", "ckp-2")).pinned_by == ["session s-1"]
        page = await world.ask("checkpoints", "s-1", limit=1)
        assert ([one.checkpoint_id for one in page.checkpoints], page.next) == (["ckp-1"], "ckp-1")
        page = await world.ask("checkpoints", "-", "system", after="ckp-1")
        assert ([one.checkpoint_id for one in page.checkpoints], page.next) == (["ckp-2"], None)
        await world.terminated()
        await world.free("ckp-2")
        await world.fold()
        assert (await world.ask("checkpoint", "ckp-2")).state == "freed"
        assert (await world.ask("checkpoint", "ckp-1")).pinned_by == []
        async with world.outside.views.reading() as rows:
            assert {row.checkpoint_id for row in await rows.find(PACKS)} == {"ckp-1"}
            assert len(await rows.find(CHECKPOINTS, {"state": "kept"})) == 1

    run(scenario())


def test_queries_refuse_what_they_cannot_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        assert await code(world.ask("checkpoint", "ckp-none")) == "checkpoint-unknown"
        assert await code(world.ask("checkpoints", "-", limit=0)) == "illegal-query"
        assert await code(world.ask("checkpoints", "-", colour="grey")) == "illegal-query"
        assert await code(world.ask("checkpoints", "-", at_least=7)) == "view-behind"

    run(scenario())


def test_verifying_says_what_is_wrong_and_reads_once_for_all_who_ask(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        first = await world.kept("ckp-1", MEMORY, b"devices", b"disk")
        await world.kept("ckp-2", CHANGED, b"devices", b"disk", parent="ckp-1", onto=first)
        await world.fold()
        good = await world.ask("verify-checkpoint", "ckp-2")
        assert (good.ok, good.code, len(good.packs)) == (True, "", 2)
        data = world.path_of(first).read_bytes()
        world.path_of(first).chmod(0o600)
        world.path_of(first).write_bytes(data[:300] + bytes([data[300] ^ 1]) + data[301:])
        world.outside.clock.pass_by(10.0)
        world.points.passed.clear()
        found = await asyncio.gather(*(world.ask("verify-checkpoint", "ckp-2") for _ in range(5)))
        assert {one.code for one in found} == {"checkpoint-part-corrupt"}
        assert not found[0].ok
        assert world.points.passed.count("verify") == 1
        assert await code(world.ask("verify-checkpoint", "ckp-2", "other")) == "checkpoint-unknown"
        await world.terminated()
        await world.free("ckp-2")
        await world.fold()
        assert await code(world.ask("verify-checkpoint", "ckp-2")) == "checkpoint-freed"

    run(scenario())

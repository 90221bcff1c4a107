"""The snapshot store over a real chunk store: nothing unverified is recorded, nothing referenced is freed."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.store_world import StoreWorld
from torpor_contracts.checkpoint import CheckpointFreed, CheckpointRecorded
from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.ids import SYSTEM_TENANT, TenantId
from torpor_snapshot_store.projections import CHECKPOINTS, PARTS


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def code(work: Coroutine[Any, Any, object]) -> str:
    with pytest.raises(Rejected) as refused:
        await work
    assert refused.value.advice
    return refused.value.code


def test_a_registered_checkpoint_is_recorded_with_what_it_adds(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        parts = await world.put(b"memory", b"devices", b"disk")
        receipt = await world.register("ckp-1", parts)
        assert receipt is not None
        assert (receipt.stream, receipt.version, receipt.position) == ("ckp-1", 1, 1)
        recorded: CheckpointRecorded = await world.last("ckp-1")
        assert recorded.stored_bytes == len(b"memory" + b"devices" + b"disk")
        more = await world.put(b"memory 2", b"devices", b"disk")
        await world.register("ckp-2", more, "ckp-1")
        assert (await world.last("ckp-2")).stored_bytes == len(b"memory 2")
        assert await world.tags("ckp-1") == ["checkpoint-recorded", "checkpoint-referenced"]

    run(scenario())


@pytest.mark.parametrize("folded", [True, False])
def test_what_is_shared_is_counted_once_whether_the_view_knows_or_not(tmp_path: Path, folded: bool) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        await world.kept("ckp-1", b"memory", b"devices", b"disk")
        if folded:
            await world.fold()
        await world.kept("ckp-2", b"memory", b"devices", b"disk 2")
        assert (await world.last("ckp-2")).stored_bytes == len(b"disk 2")

    run(scenario())


def test_the_same_registration_is_answered_with_the_same_receipt(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        parts = await world.put(b"1", b"2", b"3")
        first = await world.register("ckp-1", parts, command_id="acme/register")
        assert await world.register("ckp-1", parts, command_id="acme/register") == first
        other = await world.register("ckp-1", parts)
        assert first is not None
        assert other is not None
        assert (other.position, other.digest) == (first.position, first.digest)
        assert await code(world.register("ckp-1", await world.put(b"1", b"2", b"4"))) == "checkpoint-exists"
        assert await world.tags("ckp-1") == ["checkpoint-recorded"]

    run(scenario())


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_part_that_is_not_what_it_should_be_is_not_recorded(tmp_path: Path, which: int, damage: str) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        parts = await world.put(b"memory", b"devices", b"disk")
        path = world.path_of(parts[which])
        content = path.read_bytes()
        path.chmod(0o600)
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(content[:-1] + (b"" if damage == "cut" else bytes([content[-1] ^ 1])))
        expected = "checkpoint-part-missing" if damage == "missing" else "checkpoint-part-corrupt"
        assert await code(world.register("ckp-1", parts)) == expected
        assert await world.tags("ckp-1") == []
        again = await world.put(b"memory", b"devices", b"disk")
        assert await world.register("ckp-1", again) is not None

    run(scenario())


def test_illegal_registrations_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        parts = await world.put(b"1", b"2", b"3")
        assert await code(world.register("ckp-1", parts[:2])) == "manifest-incomplete"
        evil = replace(parts[0], digest="sha256:../../../etc/passwd")
        assert await code(world.register("ckp-1", [evil, *parts[1:]])) == "illegal-digest"
        larger = replace(parts[0], size_bytes=2)
        assert await code(world.register("ckp-1", [larger, *parts[1:]])) == "checkpoint-part-corrupt"
        assert await code(world.register("ckp-1", parts, "ckp-0")) == "parent-unknown"
        await world.terminated("ckp-session")
        assert await code(world.register("ckp-session", parts)) == "id-taken"

    run(scenario())


def test_a_store_that_cannot_be_read_now_is_tried_again_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        parts = await world.put(b"1", b"2", b"3")
        (tmp_path / "store" / "sha256").rename(tmp_path / "away")
        (tmp_path / "store" / "sha256").write_bytes(b"in the way")
        with pytest.raises(Transient):
            await world.register("ckp-1", parts)
        (tmp_path / "store" / "sha256").unlink()
        (tmp_path / "away").rename(tmp_path / "store" / "sha256")
        assert await world.register("ckp-1", parts) is not None

    run(scenario())


def test_a_freed_checkpoint_is_gone_with_what_only_it_held(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        await world.kept("ckp-1", b"memory", b"devices", b"disk")
        await world.kept("ckp-2", b"memory", b"devices", b"disk 2")
        await world.suspended("ckp-2")
        receipt = await world.free("ckp-1", command_id="acme/free")
        assert receipt is not None
        assert await world.tags("ckp-1") == ["checkpoint-recorded", "checkpoint-free-started", "checkpoint-freed"]
        freed: CheckpointFreed = await world.last("ckp-1")
        assert freed.freed_bytes == len(b"disk")
        assert world.parts() == 3
        assert await world.free("ckp-1", command_id="acme/free") == receipt
        assert await world.free("ckp-1") is None
        for part in await world.put(b"memory", b"devices", b"disk 2"):
            await world.chunks.verify(part.digest, part.size_bytes)

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
        assert world.parts() == 6
        assert await world.free("ckp-2") is not None
        assert await world.free("ckp-1", tenant_id=SYSTEM_TENANT) is not None
        assert world.parts() == 0
        recorded = (await world.outside.log.load("ckp-1"))[-1]
        assert recorded.tenant_id == "acme", "what the operator frees is the tenant's to see"

    run(scenario())


def test_another_tenants_checkpoint_cannot_be_freed_named_or_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        parts = await world.kept("ckp-1", b"1", b"2", b"3")
        await world.terminated()
        other = TenantId("other")
        assert await code(world.free("ckp-1", tenant_id=other)) == "checkpoint-unknown"
        assert await code(world.register("ckp-2", parts, "ckp-1", tenant_id=other)) == "parent-unknown"
        await world.fold()
        assert await code(world.ask("checkpoint", "ckp-1", "other")) == "checkpoint-unknown"
        assert (await world.ask("checkpoints", "-", "other")).checkpoints == []

    run(scenario())


@pytest.mark.parametrize("at", ["first part", "last part", "record"])
def test_a_broken_off_free_is_finished(tmp_path: Path, at: str) -> None:
    """What dies in the middle leaves a checkpoint that can be restored no more, and that is freed later."""

    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        parts = await world.kept("ckp-1", b"1", b"22", b"333")
        await world.terminated()
        point, after = {"first part": ("delete", 0), "last part": ("delete", 2)}.get(at, ("append checkpoint-freed", 0))
        world.points.plan(point, dies, after)
        with pytest.raises(asyncio.CancelledError):
            await world.free("ckp-1", command_id="acme/free")
        assert await world.tags("ckp-1") == ["checkpoint-recorded", "checkpoint-free-started"]
        assert await code(world.register("ckp-2", parts, "ckp-1")) in {"checkpoint-part-missing", "checkpoint-freed"}
        await world.fold()
        await world.service.background[0].run()
        freed: CheckpointFreed = await world.last("ckp-1")
        assert freed.freed_bytes == 6, "the whole, though some of it was deleted before"
        assert world.parts() == 0

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


def test_what_is_freed_between_verifying_and_recording_is_noticed(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        await world.kept("ckp-1", b"1", b"2", b"3")
        await world.terminated()
        parts = await world.put(b"1", b"2", b"3")
        async with world.chunks.exclusive():
            freeing = asyncio.ensure_future(world.free("ckp-1"))
            registering = asyncio.ensure_future(world.register("ckp-2", parts, session_id="s-2"))
            while world.points.passed.count("verified") < 6:  # noqa: ASYNC110  (a point of the other task)
                await asyncio.sleep(0)
        await freeing
        assert await code(_result(registering)) == "checkpoint-part-missing"
        assert await world.tags("ckp-2") == []

    run(scenario())


async def _result(task: "asyncio.Task[Any]") -> object:
    return await task


def dies() -> None:
    raise asyncio.CancelledError


def test_registering_and_freeing_at_once_never_leaves_a_recorded_checkpoint_without_its_parts(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        await world.kept("ckp-0", b"1", b"2", b"3")
        await world.terminated()
        for number in range(1, 20):
            parts = await world.put(b"1", b"2", b"3")
            old, new = f"ckp-{number - 1}", f"ckp-{number}"
            await asyncio.gather(world.free(old), world.register(new, parts), return_exceptions=True)
            if await world.tags(new) == ["checkpoint-recorded"]:
                for part in parts:
                    await world.chunks.verify(part.digest, part.size_bytes)
            else:
                await world.kept(new, b"1", b"2", b"3")

    run(scenario())


def test_queries_answer_from_the_view(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        await world.kept("ckp-1", b"1", b"22", b"333")
        await world.suspended("ckp-1")
        await world.kept("ckp-2", b"1", b"22", b"4444", parent="ckp-1")
        await world.fold()
        view = await world.ask("checkpoint", "ckp-1")
        assert (view.state, view.size_bytes, view.stored_bytes, view.parent_id) == ("kept", 6, 6, None)
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
            assert {row.checkpoint_id for row in await rows.find(PARTS)} == {"ckp-1"}
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

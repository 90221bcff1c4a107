"""What every chunk store promises, shown for each of them: in memory, in a directory, and on a real S3 server."""

import asyncio
import hashlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.chunk_stores import ACME, OTHER, PAGE, Change, StoreKit, flip, noise
from torpor_chunks.port import (
    SHARDS,
    IllegalAddress,
    PackAddress,
    PartCorrupt,
    PartMissing,
    StoreUnavailable,
    WantedPart,
)

CONTENT = noise(40) + bytes(range(256)) * 512
ABSENT = PackAddress("pack-" + "0" * 32)


@pytest.fixture(params=["memory", "directory", "s3"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> StoreKit:
    server = request.getfixturevalue("s3_server") if request.param == "s3" else None
    return StoreKit(request.param, tmp_path, server)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_what_was_put_is_fetched(kit: StoreKit) -> None:
    async def scenario() -> None:
        stored = await kit.put(CONTENT)
        (part,) = stored.parts
        assert part.digest == f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
        assert (part.name, part.size_bytes) == ("memory", len(CONTENT))
        assert part.unique_bytes == stored.packs[0].size_bytes
        assert await kit.get(stored) == CONTENT
        assert (await kit.store.inspect(ACME, stored.address)).stored == stored
        assert await kit.store.verify(ACME, stored.address) == stored

    run(scenario())


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 300_001])
def test_a_part_may_have_any_size(kit: StoreKit, size: int) -> None:
    async def scenario() -> None:
        content = noise(80)[:size]
        stored = await kit.put(content)
        assert await kit.get(stored) == content
        await kit.store.verify(ACME, stored.address)

    run(scenario())


def test_several_parts_are_one_pack_and_any_of_them_can_be_had(kit: StoreKit) -> None:
    async def scenario() -> None:
        contents = {"memory": CONTENT, "devices": b"few", "disk": bytes(5 * PAGE) + noise(2)}
        stored = await kit.store.put(ACME, [kit.source(name, content) for name, content in contents.items()])
        assert [part.name for part in stored.parts] == list(contents)
        assert sum(part.unique_bytes for part in stored.parts) == stored.packs[0].size_bytes
        wanted = [
            WantedPart(name=one.name, digest=one.digest, size_bytes=one.size_bytes, into=kit.directory / one.name)
            for one in stored.parts
        ]
        await kit.store.fetch(ACME, stored.address, wanted[::-1])
        for one in wanted:
            assert one.into.read_bytes() == contents[one.name]
        with pytest.raises(PartMissing):
            await kit.store.fetch(ACME, stored.address, [replace(wanted[0], name="other", into=kit.directory / "x")])

    run(scenario())


def test_what_the_parent_has_is_not_stored_again(kit: StoreKit) -> None:
    async def scenario() -> None:
        first = await kit.put(CONTENT)
        again = await kit.put(CONTENT, onto=first.address)
        assert again.address != first.address
        assert again.packs[1:] == first.packs
        assert again.parts[0].unique_bytes < 2000
        assert await kit.get(again) == CONTENT
        alone = await kit.put(CONTENT)
        assert alone.packs[0].size_bytes == pytest.approx(first.packs[0].size_bytes, rel=0.01)

    run(scenario())


def test_a_child_depends_on_what_it_shares_and_on_nothing_else(kit: StoreKit) -> None:
    async def scenario() -> None:
        first = await kit.put(CONTENT)
        second = await kit.put(CONTENT, onto=first.address)
        other = await kit.put(noise(9, seed=2), onto=second.address)
        assert await kit.store.delete(ACME, first.address)
        assert len(other.packs) == 1
        assert await kit.get(other) == noise(9, seed=2)
        for reading in (kit.store.inspect(ACME, second.address), kit.store.verify(ACME, second.address)):
            with pytest.raises(PartMissing):
                await reading
        with pytest.raises(PartMissing):
            await kit.get(second)

    run(scenario())


def test_a_parent_that_is_gone_or_damaged_only_costs_space(kit: StoreKit) -> None:
    async def scenario() -> None:
        assert await kit.get(await kit.put(CONTENT, onto=ABSENT)) == CONTENT
        first = await kit.put(CONTENT)
        kit.damage(first.address, flip(-50))
        second = await kit.put(CONTENT, onto=first.address)
        assert len(second.packs) == 1
        assert await kit.get(second) == CONTENT

    run(scenario())


def test_puts_at_once_do_not_disturb_each_other(kit: StoreKit) -> None:
    async def scenario() -> None:
        first = await kit.put(CONTENT)
        contents = [CONTENT + noise(1, seed) for seed in range(8)]
        stored = await asyncio.gather(*(kit.put(content, onto=first.address) for content in contents))
        assert len({one.address for one in stored}) == 8
        for one, content in zip(stored, contents, strict=True):
            assert await kit.get(one) == content

    run(scenario())


def test_a_missing_pack_is_said_to_be_missing(kit: StoreKit) -> None:
    async def scenario() -> None:
        stored = await kit.put(CONTENT)
        gone = replace(stored, packs=[replace(stored.packs[0], address=ABSENT)])
        with pytest.raises(PartMissing):
            await kit.get(gone)
        for reading in (kit.store.inspect(ACME, ABSENT), kit.store.verify(ACME, ABSENT)):
            with pytest.raises(PartMissing):
                await reading

    run(scenario())


@pytest.mark.parametrize(
    "change",
    [flip(100), flip(len(CONTENT) // 2), lambda content: content[:-1], lambda content: content + b"x", lambda _: b""],
    ids=["early byte", "middle byte", "cut", "longer", "emptied"],
)
def test_a_damaged_pack_is_never_handed_out(kit: StoreKit, change: Change) -> None:
    async def scenario() -> None:
        stored = await kit.put(CONTENT)
        kit.damage(stored.address, change)
        with pytest.raises(PartCorrupt):
            await kit.get(stored)
        with pytest.raises(PartCorrupt):
            await kit.store.verify(ACME, stored.address)

    run(scenario())


def test_damage_in_a_shared_pack_is_found_where_it_is_shared(kit: StoreKit) -> None:
    async def scenario() -> None:
        first = await kit.put(CONTENT)
        second = await kit.put(CONTENT, onto=first.address)
        kit.damage(first.address, flip(1000))
        with pytest.raises(PartCorrupt):
            await kit.get(second)
        with pytest.raises(PartCorrupt):
            await kit.store.verify(ACME, second.address)

    run(scenario())


def test_another_digest_or_size_than_the_pack_has_is_refused(kit: StoreKit) -> None:
    async def scenario() -> None:
        stored = await kit.put(CONTENT)
        (part,) = stored.parts
        for other in (replace(part, size_bytes=part.size_bytes + 1), replace(part, digest="sha256:" + "0" * 64)):
            with pytest.raises(PartCorrupt):
                await kit.get(replace(stored, parts=[other]))

    run(scenario())


def test_a_file_in_the_way_is_not_overwritten(kit: StoreKit) -> None:
    async def scenario() -> None:
        stored = await kit.put(CONTENT)
        (part,) = stored.parts
        into, free = kit.directory / "into", kit.directory / "free"
        into.write_bytes(b"mine")
        wanted = [
            WantedPart(name=part.name, digest=part.digest, size_bytes=part.size_bytes, into=path)
            for path in (free, into)
        ]
        with pytest.raises(StoreUnavailable, match="exists"):
            await kit.store.fetch(ACME, stored.address, wanted)
        assert into.read_bytes() == b"mine"
        assert not free.exists()

    run(scenario())


def test_a_source_that_is_not_there_is_a_typed_error(kit: StoreKit) -> None:
    async def scenario() -> None:
        source = kit.source("memory", b"")
        source.path.unlink()
        with pytest.raises(StoreUnavailable):
            await kit.store.put(ACME, [source])

    run(scenario())


def test_tenants_have_nothing_in_common(kit: StoreKit) -> None:
    async def scenario() -> None:
        mine = await kit.put(CONTENT)
        with pytest.raises(PartMissing):
            await kit.get(mine, OTHER)
        theirs = await kit.put(CONTENT, onto=mine.address, tenant_id=OTHER)
        assert len(theirs.packs) == 1
        assert theirs.packs[0].size_bytes == pytest.approx(mine.packs[0].size_bytes, abs=64)
        assert not await kit.store.delete(OTHER, mine.address)
        assert await kit.get(mine) == CONTENT
        assert await kit.store.tenants() == [ACME, OTHER]

    run(scenario())


def test_delete_removes_and_says_whether_there_was_anything(kit: StoreKit) -> None:
    async def scenario() -> None:
        stored = await kit.put(CONTENT)
        assert await kit.store.delete(ACME, stored.address)
        assert not await kit.store.delete(ACME, stored.address)
        with pytest.raises(PartMissing):
            await kit.get(stored)

    run(scenario())


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_all_packs_are_told_with_size_and_age(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        kit = StoreKit(kind, tmp_path)
        stored = [await kit.put(noise(1, seed)) for seed in range(4)]
        found = [pack for shard in range(SHARDS) for pack in await kit.store.present(ACME, shard)]
        assert {pack.address: pack.size_bytes for pack in found} == {
            one.address: one.packs[0].size_bytes for one in stored
        }
        assert all(-5.0 < pack.age_s < 300.0 for pack in found)

    run(scenario())


def test_the_packs_of_a_shard_are_told(kit: StoreKit) -> None:
    async def scenario() -> None:
        stored = await kit.put(CONTENT)
        shard = 0 if kit.kind == "memory" else int(stored.address[5:7], 16)
        (found,) = await kit.store.present(ACME, shard)
        assert (found.address, found.size_bytes) == (stored.address, stored.packs[0].size_bytes)
        assert -5.0 < found.age_s < 300.0
        assert await kit.store.present(ACME, (shard + 1) % SHARDS) == []

    run(scenario())


def test_a_label_is_set_once(kit: StoreKit) -> None:
    async def scenario() -> None:
        first, second = await kit.put(b"1"), await kit.put(b"2")
        assert await kit.store.label(ACME, "template-1") is None
        assert await kit.store.labelled(ACME) == set()
        assert await kit.store.set_label(ACME, "template-1", first.address) == first.address
        assert await kit.store.set_label(ACME, "template-1", second.address) == first.address
        assert await kit.store.label(ACME, "template-1") == first.address
        assert await kit.store.label(OTHER, "template-1") is None
        assert await kit.store.labelled(ACME) == {first.address}

    run(scenario())


@pytest.mark.parametrize(
    "address", ["", "pack-../../etc/passwd", "sha256:" + "0" * 64, "pack-" + "A" * 32, ABSENT[:-1], ABSENT + "/x"]
)
def test_an_illegal_address_reaches_no_object(kit: StoreKit, address: str) -> None:
    async def scenario() -> None:
        store = kit.store
        for call in (store.inspect(ACME, address), store.delete(ACME, address), store.verify(ACME, address)):
            with pytest.raises(IllegalAddress):
                await call
        for naming in (store.label(ACME, address + "/.."), store.set_label(ACME, f"../{address}", ABSENT)):
            with pytest.raises(IllegalAddress):
                await naming

    run(scenario())

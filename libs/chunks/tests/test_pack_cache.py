"""Copies of packs near by: they save the journey, are trusted with nothing, and take no more room than allowed."""

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.support.chunk_stores import ACME, StoreKit, noise
from tests.support.s3 import S3Server
from torpor_chunks.object_storage import StoredObjects
from torpor_chunks.pack_cache import CachedObjects
from torpor_chunks.port import PartCorrupt, PartMissing
from torpor_chunks.store import PackStore

CONTENT = noise(30)


@pytest.fixture
def kit(tmp_path: Path, s3_server: S3Server) -> StoreKit:
    return StoreKit("s3", tmp_path, s3_server)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def opened(kit: StoreKit, monkeypatch: pytest.MonkeyPatch) -> tuple[PackStore, list[str]]:
    """The store with a cache, and what it really fetched of packs."""
    fetched: list[str] = []
    for name in ("tail", "read"):
        real = getattr(StoredObjects, name)

        def counted(self: StoredObjects, path: str, *given: Any, real: Any = real) -> Any:
            if "/packs/" in path:
                fetched.append(path.rpartition("/")[2])
            return real(self, path, *given)

        monkeypatch.setattr(StoredObjects, name, counted)
    return kit.open(cache=kit.directory / "cache", cache_bytes=10 << 20), fetched


def copies(kit: StoreKit) -> list[Path]:
    return [path for path in (kit.directory / "cache").rglob("*") if path.is_file()]


def test_what_was_put_here_is_read_here(kit: StoreKit, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store, fetched = opened(kit, monkeypatch)
        kit.store = store
        first = await kit.put(CONTENT)
        second = await kit.put(CONTENT + noise(1, 2), onto=first.address)
        assert await kit.get(second) == CONTENT + noise(1, 2)
        assert fetched == []
        assert len(copies(kit)) == 2
        assert all(b"pack" in path.name.encode() for path in copies(kit)), "keys and labels are not copied"

    run(scenario())


def test_what_is_read_once_is_near_the_second_time(kit: StoreKit, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        first = await kit.put(CONTENT)
        second = await kit.put(CONTENT + noise(1, 2), onto=first.address)
        store, fetched = opened(kit, monkeypatch)
        assert await kit.get(second, store=store) == CONTENT + noise(1, 2)
        assert set(fetched) == {first.address, second.address}
        fetched.clear()
        assert await kit.get(second, store=store) == CONTENT + noise(1, 2)
        assert fetched == []

    run(scenario())


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied"])
def test_a_damaged_copy_is_fetched_anew(kit: StoreKit, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    async def scenario() -> None:
        store, fetched = opened(kit, monkeypatch)
        kit.store = store
        first = await kit.put(CONTENT)
        second = await kit.put(CONTENT + noise(1, 2), onto=first.address)
        for path in copies(kit):
            data = path.read_bytes()
            flipped = data[:700] + bytes([data[700] ^ 1]) + data[701:]
            path.write_bytes({"flipped": flipped, "cut": data[:-1], "emptied": b""}[damage])
        assert await kit.get(second) == CONTENT + noise(1, 2)
        assert set(fetched) == {first.address, second.address}

    run(scenario())


def test_a_copy_hides_no_damage_or_loss_in_the_store(kit: StoreKit, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded as kept must be in the store, not just here."""

    async def scenario() -> None:
        store, _ = opened(kit, monkeypatch)
        kit.store = store
        stored = await kit.put(CONTENT)
        kit.damage(stored.address, None)
        with pytest.raises(PartMissing):
            await store.inspect(ACME, stored.address)
        kit.damage((await kit.put(CONTENT)).address, lambda data: data + b"x")

    run(scenario())


def test_damage_in_the_store_is_found_without_a_copy(kit: StoreKit, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        stored = await kit.put(CONTENT)
        kit.damage(stored.address, lambda data: data[:500] + b"x" + data[501:])
        store, _ = opened(kit, monkeypatch)
        for _ in range(2):
            with pytest.raises(PartCorrupt):
                await kit.get(stored, store=store)

    run(scenario())


def test_the_copies_unused_for_longest_go_first(tmp_path: Path) -> None:
    kit = StoreKit("directory", tmp_path)
    cached = CachedObjects(kit.objects(), tmp_path / "cache", 100_000)
    paths = [f"tenants/acme/packs/00/pack-{number:032x}" for number in range(40)]
    for number, path in enumerate(paths):
        cached.put(path, bytes(10_000))
        copy = tmp_path / "cache" / path
        os.utime(copy, (number, number))
        if number > 5:
            # Used again and again, the first copy stays.
            cached.read(paths[0], [(0, 1)])
    left = {path.name for path in copies(kit)}
    assert paths[0].rpartition("/")[2] in left
    assert sum(path.stat().st_size for path in copies(kit)) <= 100_000 + 16 * 10_000
    assert paths[1].rpartition("/")[2] not in left


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path, s3_server: S3Server) -> None:
    async def scenario() -> None:
        kit = StoreKit("s3", tmp_path, s3_server)
        (tmp_path / "cache").write_bytes(b"a file in the way")
        store = kit.open(cache=tmp_path / "cache", cache_bytes=1 << 20)
        stored = await store.put(ACME, [kit.source("memory", CONTENT)])
        assert await kit.get(stored, store=store) == CONTENT

    run(scenario())

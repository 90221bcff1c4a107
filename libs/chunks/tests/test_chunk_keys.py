"""Keys: made once, shared by processes, rotated, rewrapped; without the right one nothing is read."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.chunk_stores import ACME, OTHER, StoreKit, flip, noise
from torpor_chunks.keyring import path_of
from torpor_chunks.master_keys import make_master_keys, read_master_keys
from torpor_chunks.opening import open_store
from torpor_chunks.port import KeyUnusable, PartCorrupt
from torpor_chunks.sealing import derived
from torpor_chunks.store import PackStore

CONTENT = noise(30)


@pytest.fixture
def kit(tmp_path: Path) -> StoreKit:
    return StoreKit("directory", tmp_path)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def store_of(kit: StoreKit) -> PackStore:
    assert isinstance(kit.store, PackStore)
    return kit.store


def test_keys_are_derived_as_rfc_5869_says() -> None:
    """Its third test case (appendix A.3), the first block of whose output we use."""
    block = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
    assert derived(bytes.fromhex("0b" * 22), b"", "").hex() == block


def test_a_key_file_is_made_once_and_for_nobody_else(tmp_path: Path) -> None:
    file = tmp_path / "keys" / "chunks.key"
    with ThreadPoolExecutor(8) as processes:
        made = list(processes.map(make_master_keys, [file] * 8))
    assert len({keys.key(1) for keys in made}) == 1
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["chunks.key"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "1\n",
        "1 xyz\n",
        f"0 {'ab' * 32}\n",
        f"1 {'ab' * 31}\n",
        f"1 {'ab' * 32}\n1 {'cd' * 32}\n",
        "ключ",
    ],
)
def test_a_key_file_that_is_none_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    file = tmp_path / "chunks.key"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(KeyUnusable, match="openssl rand"):
        read_master_keys(file)


def test_a_store_that_hosts_share_makes_no_key_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(KeyUnusable, match="cannot be read"):
        open_store("s3://bucket/prefix", tmp_path / "chunks.key", region="us-east-1")
    assert not (tmp_path / "chunks.key").exists()


def test_with_another_master_key_nothing_is_read_and_nothing_is_changed(kit: StoreKit) -> None:
    async def scenario() -> None:
        stored = await kit.put(CONTENT)
        other = open_store(kit.url, kit.directory / "other.key")
        for call in (kit.get(stored, store=other), other.put(ACME, [kit.source("memory", CONTENT)])):
            with pytest.raises(KeyUnusable, match="TORPOR_CHUNKS_KEY_FILE"):
                await call
        assert await kit.get(stored) == CONTENT

    run(scenario())


def test_processes_that_come_first_at_once_agree_on_a_tenants_key(kit: StoreKit) -> None:
    async def scenario() -> None:
        stores = [kit.open() for _ in range(8)]
        sources = [kit.source("memory", CONTENT) for _ in stores]
        stored = await asyncio.gather(
            *(store.put(ACME, [source]) for store, source in zip(stores, sources, strict=True))
        )
        for one in stored:
            assert await kit.get(one, store=kit.open()) == CONTENT

    run(scenario())


def test_after_a_rotation_old_packs_are_read_and_new_ones_owe_nothing_to_the_old_key(kit: StoreKit) -> None:
    async def scenario() -> None:
        old, elsewhere = await kit.put(CONTENT), kit.open()
        assert await kit.get(old, store=elsewhere) == CONTENT
        assert store_of(kit).keyrings.rotate(ACME) == 2
        new = await kit.put(CONTENT, onto=old.address)
        assert len(new.packs) == 1, "shared with nothing"
        assert await kit.get(old) == await kit.get(new) == CONTENT
        assert await kit.get(new, store=elsewhere) == CONTENT, "a process that remembers the old keys looks again"
        shared = await kit.put(CONTENT, onto=new.address)
        assert len(shared.packs) == 2
        await kit.store.verify(ACME, shared.address)
        await kit.store.verify(ACME, old.address)

    run(scenario())


def test_tenants_keys_can_be_wrapped_under_a_new_master_key(kit: StoreKit) -> None:
    async def scenario() -> None:
        stored = await kit.put(CONTENT)
        first = kit.key_file.read_text()
        kit.key_file.write_text(f"{first}2 {os.urandom(32).hex()}\n")
        kit.open().keyrings.rewrap(ACME)
        kit.key_file.write_text("\n".join(line for line in kit.key_file.read_text().splitlines() if line[0] == "2"))
        assert await kit.get(stored, store=kit.open()) == CONTENT
        kit.key_file.write_text(first)
        with pytest.raises(KeyUnusable, match="master key 2 is needed"):
            await kit.get(stored, store=kit.open())

    run(scenario())


def test_one_tenants_keyring_opens_nothing_of_anothers(kit: StoreKit) -> None:
    async def scenario() -> None:
        await kit.put(CONTENT)
        theirs = await kit.put(CONTENT, tenant_id=OTHER)
        mine, other = (kit.directory / "store" / path_of(tenant) for tenant in (ACME, OTHER))
        other.chmod(0o600)
        other.write_bytes(mine.read_bytes())
        with pytest.raises(KeyUnusable):
            await kit.get(theirs, OTHER, store=kit.open())
        other.write_bytes(mine.read_bytes().replace(b'"acme"', b'"other"'))
        with pytest.raises(KeyUnusable):
            await kit.get(theirs, OTHER, store=kit.open())

    run(scenario())


@pytest.mark.parametrize("change", [lambda _: b"", lambda _: b"{}", lambda data: data[:-9], flip(-20), flip(12)])
def test_a_damaged_keyring_is_a_typed_error(kit: StoreKit, change: Callable[[bytes], bytes]) -> None:
    async def scenario() -> None:
        stored = await kit.put(CONTENT)
        ring = kit.directory / "store" / path_of(ACME)
        ring.chmod(0o600)
        ring.write_bytes(change(ring.read_bytes()))
        for call in (kit.get(stored, store=kit.open()), kit.open().put(ACME, [kit.source("memory", CONTENT)])):
            with pytest.raises(KeyUnusable):
                await call

    run(scenario())


def test_a_pack_that_names_a_key_nobody_has_is_corrupt(kit: StoreKit) -> None:
    async def scenario() -> None:
        stored = await kit.put(CONTENT)
        kit.damage(stored.address, flip(13))
        with pytest.raises(PartCorrupt):
            await kit.get(stored)

    run(scenario())

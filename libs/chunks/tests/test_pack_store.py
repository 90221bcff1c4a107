"""Packs in a directory: every byte counts, nothing leaks, and what is shared is found wherever it is."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chunk_stores import ACME, OTHER, PAGE, StoreKit, flip, noise, page_file
from torpor_chunks.port import (
    BASE_PIECE_BYTES,
    PartCorrupt,
    PartSource,
    Stored,
    WantedPart,
)
from torpor_chunks.sharing import PACKS_MAX
from torpor_chunks.store import PackStore

TEXT = b"the launch code is 0000; " * 4000


@pytest.fixture
def kit(tmp_path: Path) -> StoreKit:
    return StoreKit("directory", tmp_path)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def files_in(kit: StoreKit) -> list[Path]:
    return sorted(path for path in (kit.directory / "store").rglob("*") if path.is_file())


def packs_in(kit: StoreKit) -> list[Path]:
    return [path for path in files_in(kit) if path.name.startswith("pack-")]


def test_no_byte_of_a_pack_can_be_flipped_unnoticed(kit: StoreKit) -> None:
    """Header, frames, index, manifest, trailer: what is not needed to fetch is found by verifying."""

    async def scenario() -> None:
        content = noise(2) + bytes(PAGE) + b"tail"
        stored = await kit.put(content)
        (path,) = packs_in(kit)
        whole = path.read_bytes()
        path.chmod(0o600)
        size = len(whole)
        steps = [*range(48), *range(48, size - 400, 97), *range(size - 400, size)]
        for position in steps:
            path.write_bytes(flip(position)(whole))
            with pytest.raises(PartCorrupt):
                await kit.store.verify(ACME, stored.address)
            try:
                assert await kit.get(stored) == content, f"byte {position}"
            except PartCorrupt:
                continue
        path.write_bytes(whole)
        await kit.store.verify(ACME, stored.address)

    run(scenario())


def test_a_pack_under_another_ones_name_is_refused(kit: StoreKit) -> None:
    async def scenario() -> None:
        first, second = await kit.put(noise(3)), await kit.put(noise(3, seed=2))
        one, other = (kit.directory / "store" / PackStore.path_of(ACME, pack.address) for pack in (first, second))
        data = one.read_bytes()
        other.chmod(0o600)
        other.write_bytes(data)
        with pytest.raises(PartCorrupt):
            await kit.store.inspect(ACME, second.address)
        theirs = await kit.put(noise(3), tenant_id=OTHER)
        target = kit.directory / "store" / PackStore.path_of(OTHER, theirs.address)
        target.chmod(0o600)
        target.write_bytes(data)
        with pytest.raises(PartCorrupt):
            await kit.store.inspect(OTHER, theirs.address)

    run(scenario())


def test_what_is_at_rest_says_nothing(kit: StoreKit) -> None:
    async def scenario() -> None:
        await kit.put(TEXT)
        await kit.put(TEXT, tenant_id=OTHER)
        mine, theirs = packs_in(kit)
        for path in files_in(kit):
            assert b"launch code" not in path.read_bytes()
        pairs = zip(mine.read_bytes()[48:], theirs.read_bytes()[48:], strict=False)
        assert sum(one == other for one, other in pairs) < 60, "the same content of two tenants looks alike nowhere"
        assert mine.stat().st_size < len(TEXT) / 20, "and it is compressed"

    run(scenario())


def test_a_pack_cannot_be_written_to_by_accident(kit: StoreKit) -> None:
    run(_put_and_forget(kit))
    (pack,) = packs_in(kit)
    assert pack.stat().st_mode & 0o777 == 0o400


async def _put_and_forget(kit: StoreKit) -> None:
    await kit.put(TEXT)


def test_zeros_and_repetitions_cost_next_to_nothing(kit: StoreKit) -> None:
    async def scenario() -> None:
        page = noise(1)
        content = bytes(200 * PAGE) + page * 300 + bytes(PAGE)
        stored = await kit.put(content)
        assert stored.packs[0].size_bytes < PAGE + 1000
        assert await kit.get(stored) == content

    run(scenario())


def test_pages_are_found_again_wherever_the_table_before_them_ends(kit: StoreKit) -> None:
    async def scenario() -> None:
        pages = {number: noise(1, seed=number) for number in range(0, 400, 2)}
        content, head = page_file(pages)
        first = await kit.store.put(ACME, [kit.source("memory", content, head_bytes=head)])
        pages |= {1: noise(1, seed=1001), 300: noise(1, seed=1300)}
        content, head = page_file(pages)
        second = await kit.store.put(ACME, [kit.source("memory", content, head_bytes=head)], onto=first.address)
        assert second.packs[0].size_bytes < 2 * PAGE + 3000
        assert await kit.get(second) == content

    run(scenario())


def test_a_head_longer_than_its_file_is_a_head(kit: StoreKit) -> None:
    async def scenario() -> None:
        for content in (b"", b"abc", b"abcdefg"):
            stored = await kit.store.put(ACME, [kit.source("memory", content, head_bytes=1000)])
            assert await kit.get(stored) == content

    run(scenario())


def test_large_parts_are_sent_while_they_are_made(kit: StoreKit) -> None:
    async def scenario() -> None:
        content = noise(5000)
        stored = await kit.store.put(ACME, [kit.source("memory", content, piece_bytes=BASE_PIECE_BYTES)])
        assert stored.packs[0].size_bytes > len(content) > 16 << 20
        assert await kit.get(stored) == content
        again = await kit.store.put(
            ACME, [kit.source("memory", content, piece_bytes=BASE_PIECE_BYTES)], onto=stored.address
        )
        assert again.packs[0].size_bytes < 5000
        await kit.store.verify(ACME, again.address)

    run(scenario())


def test_the_hundredth_of_a_lineage_is_spread_over_no_more_packs_than_allowed(kit: StoreKit) -> None:
    """And little more is read for it than it has: sharing a page here and a page there is not worth it."""

    async def scenario() -> None:
        pages = {number: noise(1, seed=number) for number in range(300)}
        content, head = page_file(pages)
        stored = await kit.store.put(ACME, [kit.source("memory", content, head_bytes=head)])
        total_bytes, changed = stored.packs[0].size_bytes, 300
        for generation in range(99):
            fresh = {(generation * 7 + step * 13) % 300: noise(1, seed=1000 * generation + step) for step in range(12)}
            changed += len(fresh)
            pages |= fresh
            content, head = page_file(pages)
            source = kit.source("memory", content, head_bytes=head)
            stored = await kit.store.put(ACME, [source], onto=stored.address)
            total_bytes += stored.packs[0].size_bytes
            assert len(stored.packs) <= PACKS_MAX
        assert await kit.get(stored) == content
        store = kit.store
        assert isinstance(store, PackStore)
        opened = store._open(ACME, stored.address)
        assert sum(frame.pieces for frame in opened.frames) < 2 * len(pages)
        assert total_bytes < 3 * changed * PAGE

    run(scenario())


class Edits:
    """A file that is edited as guests edit memory and disks."""

    def __init__(self, pages: list[int]) -> None:
        self.pages = pages

    def content(self, tail: int) -> bytes:
        return b"".join(bytes(PAGE) if seed == 0 else noise(1, seed) for seed in self.pages) + b"t" * tail


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=0, max_size=90),
    st.lists(
        st.tuples(st.lists(st.tuples(st.integers(0, 89), st.integers(0, 30)), max_size=12), st.integers(0, PAGE)),
        min_size=1,
        max_size=5,
    ),
)
def test_whatever_is_edited_comes_back(
    tmp_path_factory: pytest.TempPathFactory, pages: list[int], generations: list[tuple[list[tuple[int, int]], int]]
) -> None:
    async def scenario() -> None:
        kit = StoreKit("directory", tmp_path_factory.mktemp("edits"))
        edits, onto = Edits(pages), None
        kept: list[tuple[Stored, bytes]] = []
        for changes, tail in generations:
            for at, seed in changes:
                if at < len(edits.pages):
                    edits.pages[at] = seed
                else:
                    edits.pages.append(seed)
            content = edits.content(tail)
            stored = await kit.put(content, onto=onto)
            onto = stored.address
            kept.append((stored, content))
        for stored, content in kept:
            assert await kit.get(stored) == content
            await kit.store.verify(ACME, stored.address)

    run(scenario())


def test_parts_of_one_pack_may_be_cut_differently(kit: StoreKit) -> None:
    async def scenario() -> None:
        content = noise(200)
        sources = [
            kit.source("fine", content),
            kit.source("coarse", content, piece_bytes=BASE_PIECE_BYTES),
            PartSource(name="again", path=kit.source("x", content).path),
        ]
        stored = await kit.store.put(ACME, sources)
        for part in stored.parts:
            into = kit.directory / part.name
            wanted = WantedPart(name=part.name, digest=part.digest, size_bytes=part.size_bytes, into=into)
            await kit.store.fetch(ACME, stored.address, [wanted])
            assert into.read_bytes() == content
        assert stored.parts[2].unique_bytes == 0
        await kit.store.verify(ACME, stored.address)

    run(scenario())

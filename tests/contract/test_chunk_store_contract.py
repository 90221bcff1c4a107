"""What every chunk store promises, shown for each of them."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from torpor_chunks.directory import DirectoryChunks
from torpor_chunks.memory import MemoryChunks
from torpor_chunks.port import ChunkStore, IllegalDigest, PartCorrupt, PartMissing, StoreUnavailable

CONTENT = bytes(range(256)) * 8192
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
ABSENT = "sha256:" + "0" * 64


class Kit:
    """A store of one kind, and how to damage what it holds."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.directory = directory
        self.source = directory / "source"
        self.source.write_bytes(CONTENT)
        self._memory = MemoryChunks() if kind == "memory" else None
        self.store: ChunkStore = self._memory or DirectoryChunks(directory / "store")

    def damage(self, change: Callable[[bytes], bytes]) -> None:
        if self._memory is not None:
            self._memory.parts[DIGEST] = change(self._memory.parts[DIGEST])
            return
        (path,) = (self.directory / "store").rglob(DIGEST.removeprefix("sha256:"))
        path.chmod(0o600)
        path.write_bytes(change(path.read_bytes()))


@pytest.fixture(params=["memory", "directory"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Kit:
    return Kit(request.param, tmp_path)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def flip(position: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


def test_what_was_put_is_fetched(kit: Kit) -> None:
    async def scenario() -> None:
        stored = await kit.store.put(kit.source)
        assert (stored.digest, stored.size_bytes, stored.unique_bytes) == (DIGEST, len(CONTENT), len(CONTENT))
        await kit.store.verify(DIGEST, len(CONTENT))
        assert await kit.store.size(DIGEST) == len(CONTENT)
        into = kit.directory / "into"
        await kit.store.fetch(DIGEST, len(CONTENT), into)
        assert into.read_bytes() == CONTENT

    run(scenario())


def test_an_empty_part_is_a_part(kit: Kit) -> None:
    async def scenario() -> None:
        kit.source.write_bytes(b"")
        stored = await kit.store.put(kit.source)
        assert stored.size_bytes == 0
        await kit.store.verify(stored.digest, 0)

    run(scenario())


def test_the_same_bytes_are_kept_once(kit: Kit) -> None:
    async def scenario() -> None:
        await kit.store.put(kit.source)
        again = await kit.store.put(kit.source)
        assert (again.digest, again.unique_bytes) == (DIGEST, 0)

    run(scenario())


def test_puts_of_the_same_bytes_at_once_leave_one_whole_part(kit: Kit) -> None:
    async def scenario() -> None:
        stored = await asyncio.gather(*(kit.store.put(kit.source) for _ in range(8)))
        assert {part.digest for part in stored} == {DIGEST}
        await kit.store.verify(DIGEST, len(CONTENT))

    run(scenario())


def test_a_missing_part_is_said_to_be_missing(kit: Kit) -> None:
    async def scenario() -> None:
        into = kit.directory / "into"
        assert await kit.store.size(ABSENT) is None
        with pytest.raises(PartMissing):
            await kit.store.verify(ABSENT, 1)
        with pytest.raises(PartMissing):
            await kit.store.fetch(ABSENT, 1, into)
        assert not into.exists()

    run(scenario())


@pytest.mark.parametrize(
    "change",
    [flip(0), flip(len(CONTENT) // 2), flip(len(CONTENT) - 1), lambda content: content[:-1], lambda _: b""],
    ids=["first byte", "middle byte", "last byte", "cut", "emptied"],
)
def test_a_damaged_part_is_never_handed_out(kit: Kit, change: Callable[[bytes], bytes]) -> None:
    async def scenario() -> None:
        await kit.store.put(kit.source)
        kit.damage(change)
        into = kit.directory / "into"
        with pytest.raises(PartCorrupt):
            await kit.store.verify(DIGEST, len(CONTENT))
        with pytest.raises(PartCorrupt):
            await kit.store.fetch(DIGEST, len(CONTENT), into)
        assert not into.exists()

    run(scenario())


def test_the_wrong_size_is_refused_though_the_digest_is_right(kit: Kit) -> None:
    async def scenario() -> None:
        await kit.store.put(kit.source)
        with pytest.raises(PartCorrupt):
            await kit.store.verify(DIGEST, len(CONTENT) + 1)

    run(scenario())


def test_putting_a_damaged_part_again_heals_it(kit: Kit) -> None:
    async def scenario() -> None:
        await kit.store.put(kit.source)
        kit.damage(flip(5))
        assert (await kit.store.put(kit.source)).unique_bytes == len(CONTENT)
        await kit.store.verify(DIGEST, len(CONTENT))

    run(scenario())


def test_a_file_in_the_way_is_not_overwritten(kit: Kit) -> None:
    async def scenario() -> None:
        await kit.store.put(kit.source)
        into = kit.directory / "into"
        into.write_bytes(b"mine")
        with pytest.raises(StoreUnavailable, match="exists"):
            await kit.store.fetch(DIGEST, len(CONTENT), into)
        assert into.read_bytes() == b"mine"

    run(scenario())


def test_a_source_that_is_not_there_is_a_typed_error(kit: Kit) -> None:
    async def scenario() -> None:
        with pytest.raises(StoreUnavailable):
            await kit.store.put(kit.directory / "nothing")

    run(scenario())


def test_delete_removes_and_says_whether_there_was_anything(kit: Kit) -> None:
    async def scenario() -> None:
        await kit.store.put(kit.source)
        async with kit.store.exclusive():
            assert await kit.store.delete(DIGEST)
            assert not await kit.store.delete(DIGEST)
        assert await kit.store.size(DIGEST) is None

    run(scenario())


@pytest.mark.parametrize(
    "digest", ["", "sha256:../../etc/passwd", "md5:" + "0" * 64, "sha256:" + "A" * 64, DIGEST[:-1]]
)
def test_an_illegal_digest_reaches_no_file(kit: Kit, digest: str) -> None:
    async def scenario() -> None:
        for call in (kit.store.size(digest), kit.store.delete(digest), kit.store.verify(digest, 1)):
            with pytest.raises(IllegalDigest):
                await call

    run(scenario())


def test_one_at_a_time_is_exclusive(kit: Kit) -> None:
    async def scenario() -> None:
        inside = 0

        async def enter() -> None:
            nonlocal inside
            async with kit.store.exclusive():
                inside += 1
                assert inside == 1
                await asyncio.sleep(0)
                assert inside == 1
                inside -= 1

        await asyncio.gather(*(enter() for _ in range(5)))

    run(scenario())

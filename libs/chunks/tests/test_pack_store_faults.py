"""Packs in a directory that is full or damaged, by writers that fail or are killed: no trace, nothing else hurt."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chunk_stores import ACME, PAGE, StoreKit, flip, noise
from torpor_chunks.opening import open_store
from torpor_chunks.port import NoSpace, PartCorrupt, PartMissing, StoreUnavailable, WantedPart
from torpor_chunks.store import PackStore

WRITER = """
import asyncio, sys
from pathlib import Path
from torpor_chunks import object_storage, packing
from torpor_chunks.opening import open_store
from torpor_chunks.port import PartSource

def stop(*_):
    print("stopped", flush=True)
    sys.stdin.read()

if sys.argv[4] == "while sending":
    made = packing.Packing._manifest
    packing.Packing._manifest = lambda *given: (stop(), made(*given))[1]
else:
    object_storage.StoredObjects._settle = stop
source = PartSource(name="memory", path=Path(sys.argv[3]))
asyncio.run(open_store(sys.argv[1], Path(sys.argv[2])).put("acme", [source]))
"""


@pytest.fixture
def kit(tmp_path: Path) -> StoreKit:
    return StoreKit("directory", tmp_path)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def files_in(kit: StoreKit) -> list[Path]:
    return sorted(path for path in (kit.directory / "store").rglob("*") if path.is_file())


def packs_in(kit: StoreKit) -> list[Path]:
    return [path for path in files_in(kit) if path.name.startswith("pack-")]


@pytest.mark.parametrize("pages", [100, 5000], ids=["whole", "sent"])
def test_nothing_half_written_is_visible_when_there_is_no_room(kit: StoreKit, pages: int) -> None:
    asyncio.run(kit.put(noise(1)))
    before = files_in(kit)
    source = kit.source("memory", noise(pages))
    with _files_no_larger_than(300_000), pytest.raises(NoSpace, match="free space"):
        asyncio.run(kit.store.put(ACME, [source]))
    assert files_in(kit) == before
    stored = asyncio.run(kit.put(noise(pages)))
    with _files_no_larger_than(300_000), pytest.raises(NoSpace):
        asyncio.run(kit.get(stored))
    assert asyncio.run(kit.get(stored)) == noise(pages)


class _files_no_larger_than:  # noqa: N801  (reads as what it does)
    """In this process, a file that grows beyond so many bytes fails as on a full disk."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._bytes_max, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)
        signal.signal(signal.SIGXFSZ, self._ignored)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True, check=False, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield small
    subprocess.run(["umount", str(small)], check=True)


def test_a_really_full_file_system_is_a_typed_error(small_disk: Path, kit: StoreKit) -> None:
    async def scenario() -> None:
        store = open_store((small_disk / "store").as_uri(), kit.key_file)
        for pages in (400, 3000):
            with pytest.raises(NoSpace):
                await store.put(ACME, [kit.source("memory", noise(pages))])
            assert _left_in(small_disk) == ["keyring"]
        stored = await store.put(ACME, [kit.source("memory", b"small enough")])
        await store.verify(ACME, stored.address)
        large = await kit.put(noise(400))
        (part,) = large.parts
        into = small_disk / "into"
        wanted = WantedPart(name=part.name, digest=part.digest, size_bytes=part.size_bytes, into=into)
        with pytest.raises(NoSpace):
            await kit.store.fetch(ACME, large.address, [wanted])
        assert not into.exists()

    run(scenario())


def _left_in(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.is_file()]


@pytest.mark.parametrize("when", ["while sending", "before it is durable"])
def test_a_writer_that_is_killed_leaves_what_it_was_onto_intact(kit: StoreKit, when: str) -> None:
    first = asyncio.run(kit.put(noise(20)))
    source = kit.source("memory", noise(3000, seed=5))
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, kit.url, str(kit.key_file), str(source.path), when],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"stopped\n"
        writer.kill()
    left = [path for path in files_in(kit) if "#" in path.name]
    assert len(left) == (when == "while sending")
    store = kit.open()
    assert asyncio.run(kit.get(first, store=store)) == noise(20)
    assert asyncio.run(store.remove_abandoned(3600.0)) == 0, "another writer may be at work"
    for path in left:
        os.utime(path, (1.0, 1.0))
    freed_bytes = asyncio.run(store.remove_abandoned(3600.0))
    assert (freed_bytes > 0) == (when == "while sending")
    assert [path for path in files_in(kit) if "#" in path.name] == []
    whole = [path for path in packs_in(kit) if path.name != first.address]
    assert len(whole) == (when == "before it is durable"), "a pack that is visible is whole, if nobody's"
    for path in whole:
        asyncio.run(store.verify(ACME, path.name))


def test_a_directory_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable):
        open_store((tmp_path / "file" / "store").as_uri(), tmp_path / "key")


@pytest.mark.parametrize("url", ["", "/plain/path", "file://host/path", "ftp://x/y", "s3:///prefix"])
def test_an_unknown_url_is_refused_with_what_to_write(tmp_path: Path, url: str) -> None:
    with pytest.raises(StoreUnavailable, match="write file:///directory or s3://bucket/prefix"):
        open_store(url, tmp_path / "key")


def test_a_file_that_is_cut_while_it_is_put_is_a_typed_error(kit: StoreKit, monkeypatch: pytest.MonkeyPatch) -> None:
    source = kit.source("memory", noise(9))
    pieces = PackStore._shared

    def cut_then_share(*given: Any, **more: Any) -> Any:
        os.truncate(source.path, PAGE)
        return pieces(*given, **more)

    async def scenario() -> None:
        first = await kit.put(b"x")
        monkeypatch.setattr(PackStore, "_shared", cut_then_share)
        with pytest.raises(StoreUnavailable, match="cut short"):
            await kit.store.put(ACME, [source], onto=first.address)
        assert len(packs_in(kit)) == 1

    run(scenario())


Damage = Callable[[Path], None]


def _remove(path: Path) -> None:
    path.unlink()


def _flip(path: Path) -> None:
    data = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(flip(len(data) // 2)(data))


def _empty(path: Path) -> None:
    path.chmod(0o600)
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [_remove, _flip, _empty])
@pytest.mark.parametrize("which", ["own", "shared"])
def test_a_damaged_or_missing_artefact_leaves_the_parent_and_every_other_intact(
    kit: StoreKit, damage: Damage, which: str
) -> None:
    async def scenario() -> None:
        parent = await kit.put(noise(30))
        child = await kit.put(noise(30) + noise(3, seed=2), onto=parent.address)
        aside = await kit.put(noise(30, seed=3))
        hurt = child if which == "own" else parent
        damage(kit.directory / "store" / PackStore.path_of(ACME, hurt.address))
        with pytest.raises(PartMissing if damage is _remove else PartCorrupt):
            await kit.get(child)
        assert await kit.get(aside) == noise(30, seed=3)
        if which == "own":
            assert await kit.get(parent) == noise(30)
            again = await kit.put(noise(30) + noise(3, seed=2), onto=parent.address)
            assert await kit.get(again) == noise(30) + noise(3, seed=2)

    run(scenario())

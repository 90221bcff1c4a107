"""Parts in a local directory, `sha256/<aa>/<hex>`: written aside, synced, renamed; several processes may share it."""

import asyncio
import fcntl
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from torpor_chunks.offload import Offload, in_thread
from torpor_chunks.os_errors import typed
from torpor_chunks.port import Digest, PartCorrupt, PartMissing, StoredPart, StoreUnavailable, hex_of

_BLOCK_BYTES: Final = 1 << 20
_LOCK_POLL_S: Final = 0.02


class DirectoryChunks:
    """A `ChunkStore` under `root`, which is made when it is not there.

    `exclusive_wait_s`: how long `exclusive` waits for another process before it gives up.
    """

    def __init__(self, root: Path, *, offload: Offload = in_thread, exclusive_wait_s: float = 30.0) -> None:
        self._root = root
        self._parts = root / "sha256"
        self._aside = root / "aside"
        self._offload = offload
        self._exclusive_wait_s = exclusive_wait_s
        self._held_here = asyncio.Lock()

    async def put(self, file: Path) -> StoredPart:
        """See `ChunkStore.put`. A damaged part of the same content is replaced by this whole one."""
        return await self._offload(lambda: self._put(file))

    async def fetch(self, digest: str, size_bytes: int, into: Path) -> None:
        """See `ChunkStore.fetch`."""
        await self._offload(lambda: self._fetch(digest, size_bytes, into))

    async def size(self, digest: str) -> int | None:
        """See `ChunkStore.size`."""
        return await self._offload(lambda: self._size(digest))

    async def verify(self, digest: str, size_bytes: int) -> None:
        """See `ChunkStore.verify`."""
        await self._offload(lambda: self._verify(digest, size_bytes))

    async def delete(self, digest: str) -> bool:
        """See `ChunkStore.delete`."""
        return await self._offload(lambda: self._delete(digest))

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """See `ChunkStore.exclusive`: a file lock, which the system takes back from a process that dies."""
        async with self._held_here:
            lock = await self._offload(lambda: self._open_lock("exclusive.lock"))
            try:
                await self._acquire(lock)
                yield
            finally:
                os.close(lock)

    async def remove_abandoned(self) -> int:
        """Remove what dead writers left half-written; the bytes freed: 0 while any writer is at work."""
        return await self._offload(self._remove_abandoned)

    async def _acquire(self, lock: int) -> None:
        for _ in range(max(1, round(self._exclusive_wait_s / _LOCK_POLL_S))):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(_LOCK_POLL_S)
            else:
                return
        raise StoreUnavailable(f"{self._root} has been locked by another process for {self._exclusive_wait_s} s")

    def _open_lock(self, name: str) -> int:
        with typed(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            return os.open(self._root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _path(self, digest: str) -> Path:
        name = hex_of(digest)
        return self._parts / name[:2] / name

    def _put(self, file: Path) -> StoredPart:
        with typed(file), file.open("rb") as source, self._new_aside() as (aside, target):
            digest, size_bytes = _copied(source, target)
            path = self._path(digest)
            if self._is_whole(path, digest, size_bytes):
                return StoredPart(digest=digest, size_bytes=size_bytes, unique_bytes=0)
            target.flush()
            os.fchmod(target.fileno(), 0o400)
            os.fsync(target.fileno())
            self._publish(aside, path)
        return StoredPart(digest=digest, size_bytes=size_bytes, unique_bytes=size_bytes)

    @contextmanager
    def _new_aside(self) -> Iterator[tuple[Path, BinaryIO]]:
        """A new file nobody sees; unless it is renamed it is gone afterwards, or removed once its writer has died."""
        writers = self._open_lock("writers.lock")
        try:
            fcntl.flock(writers, fcntl.LOCK_SH)
            self._aside.mkdir(exist_ok=True)
            self._parts.mkdir(exist_ok=True)
            number, name = tempfile.mkstemp(dir=self._aside)
            try:
                # Closing flushes what a full disk refused, so it may raise the same error once more.
                with os.fdopen(number, "wb") as target:
                    yield Path(name), target
            finally:
                Path(name).unlink(missing_ok=True)
        finally:
            os.close(writers)

    def _publish(self, aside: Path, path: Path) -> None:
        if not path.parent.exists():
            path.parent.mkdir(exist_ok=True)
            _sync_directory(self._parts)
        aside.rename(path)
        _sync_directory(path.parent)

    def _fetch(self, digest: str, size_bytes: int, into: Path) -> None:
        with _part(self._path(digest), digest) as source, typed(into):
            target = into.open("xb")
            try:
                with target:
                    found = _copied(source, target)
                _check((Digest(digest), size_bytes), found)
            except BaseException:
                into.unlink(missing_ok=True)
                raise

    def _size(self, digest: str) -> int | None:
        path = self._path(digest)
        with typed(path):
            try:
                return path.stat().st_size
            except FileNotFoundError:
                return None

    def _verify(self, digest: str, size_bytes: int) -> None:
        with _part(self._path(digest), digest) as source:
            _check((Digest(digest), size_bytes), _copied(source, None))

    def _is_whole(self, path: Path, digest: Digest, size_bytes: int) -> bool:
        try:
            self._verify(digest, size_bytes)
        except (PartMissing, PartCorrupt):
            return False
        # A process that died may have renamed it without syncing the directory.
        _sync_directory(path.parent)
        return True

    def _delete(self, digest: str) -> bool:
        path = self._path(digest)
        with typed(path):
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            _sync_directory(path.parent)
        return True

    def _remove_abandoned(self) -> int:
        writers = self._open_lock("writers.lock")
        try:
            fcntl.flock(writers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(writers)
            return 0
        freed_bytes = 0
        try:
            with typed(self._aside):
                for left in self._aside.iterdir() if self._aside.exists() else ():
                    freed_bytes += left.stat().st_size
                    left.unlink()
        finally:
            os.close(writers)
        return freed_bytes


@contextmanager
def _part(path: Path, digest: str) -> Iterator[BinaryIO]:
    with typed(path):
        try:
            source = path.open("rb")
        except FileNotFoundError:
            raise PartMissing(f"{digest} is not in the store") from None
        with source:
            yield source


def _copied(source: BinaryIO, target: BinaryIO | None) -> tuple[Digest, int]:
    """Read `source` to its end, into `target` if there is one; what was read."""
    content = hashlib.sha256()
    size_bytes = 0
    while block := source.read(_BLOCK_BYTES):
        content.update(block)
        size_bytes += len(block)
        if target is not None:
            target.write(block)
    return Digest(f"sha256:{content.hexdigest()}"), size_bytes


def _check(wanted: tuple[Digest, int], found: tuple[Digest, int]) -> None:
    if wanted != found:
        raise PartCorrupt(
            f"{wanted[0]} should be {wanted[1]} bytes; the store holds {found[1]} bytes with the digest {found[0]}"
        )


def _sync_directory(path: Path) -> None:
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)

"""Parts in memory, for simulations and specifications: the same promises, without a disk to keep them."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from torpor_chunks.os_errors import typed
from torpor_chunks.port import Digest, PartCorrupt, PartMissing, StoredPart, hex_of


class MemoryChunks:
    """A `ChunkStore` whose `parts` a test may damage; files are read and written at once, in no thread."""

    def __init__(self) -> None:
        self.parts: dict[str, bytes] = {}
        self._exclusive = asyncio.Lock()

    async def put(self, file: Path) -> StoredPart:
        """See `ChunkStore.put`."""
        with typed(file):
            content = file.read_bytes()  # noqa: ASYNC240  (a world without threads has only this way)
        digest = _digest_of(content)
        unique_bytes = 0 if self.parts.get(digest) == content else len(content)
        self.parts[digest] = content
        return StoredPart(digest=digest, size_bytes=len(content), unique_bytes=unique_bytes)

    async def fetch(self, digest: str, size_bytes: int, into: Path) -> None:
        """See `ChunkStore.fetch`."""
        content = self._checked(digest, size_bytes)
        with typed(into), into.open("xb") as target:
            target.write(content)

    async def size(self, digest: str) -> int | None:
        """See `ChunkStore.size`."""
        hex_of(digest)
        content = self.parts.get(digest)
        return None if content is None else len(content)

    async def verify(self, digest: str, size_bytes: int) -> None:
        """See `ChunkStore.verify`."""
        self._checked(digest, size_bytes)

    async def delete(self, digest: str) -> bool:
        """See `ChunkStore.delete`."""
        hex_of(digest)
        return self.parts.pop(digest, None) is not None

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """See `ChunkStore.exclusive`."""
        async with self._exclusive:
            yield

    def _checked(self, digest: str, size_bytes: int) -> bytes:
        hex_of(digest)
        content = self.parts.get(digest)
        if content is None:
            raise PartMissing(f"{digest} is not in the store")
        if len(content) != size_bytes or _digest_of(content) != digest:
            raise PartCorrupt(f"{digest} should be {size_bytes} bytes; the store holds something else")
        return content


def _digest_of(content: bytes) -> Digest:
    return Digest(f"sha256:{hashlib.sha256(content).hexdigest()}")

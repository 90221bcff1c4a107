"""Chunk stores for tests: how each kind is opened, how its packs are damaged, and content to put into them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.support.s3 import S3Server
from torpor_chunks.master_keys import make_master_keys
from torpor_chunks.memory import MemoryChunks
from torpor_chunks.object_storage import StoredObjects, open_objects
from torpor_chunks.opening import open_store
from torpor_chunks.port import ChunkStore, PackAddress, PartSource, Stored, WantedPart
from torpor_chunks.store import PackStore
from torpor_contracts.ids import TenantId

ACME: Final = TenantId("acme")
OTHER: Final = TenantId("other")
PAGE: Final = 4096

Change = Callable[[bytes], bytes]


class StoreKit:
    """A store of one kind below a directory of the test's own."""

    def __init__(self, kind: str, directory: Path, server: S3Server | None = None) -> None:
        self.kind = kind
        self.directory = directory
        self.key_file = directory / "keys" / "chunks.key"
        make_master_keys(self.key_file)
        self.options: dict[str, Any] = {} if server is None else server.options()
        self.url = (directory / "store").as_uri() if server is None else f"s3://{server.bucket()}/some/prefix"
        self._memory = MemoryChunks()
        self.store: ChunkStore = self._memory if kind == "memory" else self.open()
        self._files = 0

    def open(self, **options: Any) -> PackStore:
        """The store, opened once more, as another process would."""
        return open_store(self.url, self.key_file, **self.options, **options)

    def objects(self) -> StoredObjects:
        """What is below the store."""
        return open_objects(self.url, **self.options)

    def source(self, name: str, content: bytes, **cut: Any) -> PartSource:
        """A file with this content."""
        self._files += 1
        path = self.directory / f"source-{self._files}"
        path.write_bytes(content)
        return PartSource(name=name, path=path, **cut)

    async def put(self, content: bytes, onto: PackAddress | None = None, tenant_id: TenantId = ACME) -> Stored:
        """Put one part, called `memory`."""
        return await self.store.put(tenant_id, [self.source("memory", content)], onto=onto)

    async def get(self, stored: Stored, tenant_id: TenantId = ACME, store: ChunkStore | None = None) -> bytes:
        """Fetch the only part."""
        (part,) = stored.parts
        self._files += 1
        into = self.directory / f"into-{self._files}"
        wanted = WantedPart(name=part.name, digest=part.digest, size_bytes=part.size_bytes, into=into)
        try:
            await (store or self.store).fetch(tenant_id, stored.address, [wanted])
        except BaseException:
            assert not into.exists(), "nothing unverified is left"
            raise
        return into.read_bytes()

    def damage(self, address: PackAddress, change: Change | None) -> None:
        """Change the bytes of a pack behind the store's back; None removes it."""
        if self.kind == "memory":
            contents = self._memory.contents[ACME, address]
            if change is None:
                del self._memory.packs[ACME, address]
            for digest in list(contents):
                contents[digest] = b"" if change is None else change(contents[digest])
            return
        objects, path = self.objects(), PackStore.path_of(ACME, address)
        data, _ = objects.tail(path, 1 << 30)
        objects.delete(path)
        if change is not None:
            objects.put(path, change(data))


def flip(position: int) -> Change:
    """Flip one bit of a byte."""

    def change(content: bytes) -> bytes:
        at = position % len(content)
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    return change


def noise(pages: int, seed: int = 1) -> bytes:
    """Pages that neither compress nor repeat."""
    return random.Random(seed).randbytes(pages * PAGE)


def page_file(pages: dict[int, bytes]) -> tuple[bytes, int]:
    """A file like a checkpoint's memory: page numbers, then pages; and how long its head is."""
    head = b"".join(number.to_bytes(4, "little") for number in sorted(pages))
    return head + b"".join(pages[number] for number in sorted(pages)), len(head)

"""Packs in memory, for simulations and specifications: the same promises, without a disk or keys to keep them."""

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence

from torpor_chunks.os_errors import typed
from torpor_chunks.port import (
    Inspected,
    PackAddress,
    PackSize,
    PartCorrupt,
    PartMissing,
    PartSource,
    PresentPack,
    Stored,
    StoredPart,
    WantedPart,
    legal_address,
    legal_label,
    named,
)
from torpor_contracts.ids import TenantId

Key = tuple[TenantId, PackAddress]


class MemoryChunks:
    """A `ChunkStore` whose packs a test may damage; files are read and written at once, in no thread.

    A part that the pack before has too is shared as a whole: it stays in that pack alone, as a chunk would.
    """

    def __init__(self, now_s: Callable[[], float] = lambda: 0.0) -> None:
        self.packs: dict[Key, Stored] = {}
        self.contents: dict[Key, dict[str, bytes]] = {}
        """The bytes that a pack itself holds, by their digest."""
        self._numbers = itertools.count(1)
        self._now_s = now_s
        self.labels: dict[tuple[TenantId, str], PackAddress] = {}
        self._put_s: dict[Key, float] = {}

    async def put(self, tenant_id: TenantId, parts: Sequence[PartSource], *, onto: PackAddress | None = None) -> Stored:
        """See `ChunkStore.put`."""
        address = PackAddress(f"pack-{next(self._numbers):032x}")
        before = self._before(tenant_id, onto)
        new: dict[str, bytes] = {}
        used: set[PackAddress] = set()
        kept: list[StoredPart] = []
        for part in parts:
            with typed(part.path):
                content = part.path.read_bytes()
            digest = _digest_of(content)
            unique_bytes = 0
            if digest in before:
                used.add(before[digest])
            elif digest not in new:
                new[digest], unique_bytes = content, len(content)
            kept.append(StoredPart(name=part.name, digest=digest, size_bytes=len(content), unique_bytes=unique_bytes))
        own = PackSize(address=address, size_bytes=sum(map(len, new.values())))
        others = [self.packs[tenant_id, other].packs[0] for other in sorted(used)]
        self.contents[tenant_id, address] = new
        self._put_s[tenant_id, address] = self._now_s()
        self.packs[tenant_id, address] = stored = Stored(parts=kept, packs=[own, *others])
        return stored

    async def fetch(self, tenant_id: TenantId, address: str, wanted: Sequence[WantedPart]) -> None:
        """See `ChunkStore.fetch`."""
        stored = self._stored(tenant_id, address)
        contents = []
        for one in wanted:
            part = named(stored.parts).get(one.name)
            if part is None:
                raise PartMissing(f"{address} has no part {one.name!r}")
            if (part.digest, part.size_bytes) != (one.digest, one.size_bytes):
                raise PartCorrupt(f"{one.name} of {address} is not {one.digest} of {one.size_bytes} bytes")
            contents.append(self._checked(tenant_id, stored, part))
        made = []
        try:
            for one, content in zip(wanted, contents, strict=True):
                with typed(one.into), one.into.open("xb") as target:
                    made.append(one.into)
                    target.write(content)
        except BaseException:
            for path in made:
                path.unlink(missing_ok=True)
            raise

    async def inspect(self, tenant_id: TenantId, address: str) -> Inspected:
        """See `ChunkStore.inspect`."""
        stored = self._stored(tenant_id, address)
        for pack in stored.packs:
            if (tenant_id, pack.address) not in self.packs:
                raise PartMissing(f"{pack.address}, which {address} shares chunks with, is not in the store")
            if sum(map(len, self.contents[tenant_id, pack.address].values())) != pack.size_bytes:
                raise PartCorrupt(f"{pack.address} has another size than {pack.size_bytes} bytes")
        return Inspected(stored=stored, age_s=self._age_s(tenant_id, stored.address))

    async def verify(self, tenant_id: TenantId, address: str) -> Stored:
        """See `ChunkStore.verify`."""
        stored = (await self.inspect(tenant_id, address)).stored
        for part in stored.parts:
            self._checked(tenant_id, stored, part)
        return stored

    async def delete(self, tenant_id: TenantId, address: str) -> bool:
        """See `ChunkStore.delete`."""
        key = (tenant_id, legal_address(address))
        self.contents.pop(key, None)
        return self.packs.pop(key, None) is not None

    async def present(self, tenant_id: TenantId, shard: int) -> list[PresentPack]:
        """See `ChunkStore.present`: all are in the first shard."""
        return [
            PresentPack(address=address, size_bytes=stored.packs[0].size_bytes, age_s=self._age_s(tenant_id, address))
            for (owner, address), stored in self.packs.items()
            if owner == tenant_id and shard == 0
        ]

    async def label(self, tenant_id: TenantId, name: str) -> PackAddress | None:
        """See `ChunkStore.label`."""
        return self.labels.get((tenant_id, legal_label(name)))

    async def set_label(self, tenant_id: TenantId, name: str, address: PackAddress) -> PackAddress:
        """See `ChunkStore.set_label`."""
        return self.labels.setdefault((tenant_id, legal_label(name)), legal_address(address))

    async def labelled(self, tenant_id: TenantId) -> set[PackAddress]:
        """See `ChunkStore.labelled`."""
        return {address for (owner, _), address in self.labels.items() if owner == tenant_id}

    async def tenants(self) -> list[TenantId]:
        """See `ChunkStore.tenants`."""
        return sorted({tenant_id for tenant_id, _ in self.packs})

    def content(self, tenant_id: TenantId, address: str, name: str) -> bytes | None:
        """The bytes of a part, unless they, or any pack the part's pack needs, are gone."""
        stored = self.packs.get((tenant_id, PackAddress(address)))
        if stored is None or any((tenant_id, pack.address) not in self.packs for pack in stored.packs):
            return None
        part = named(stored.parts).get(name)
        return None if part is None else self._found(tenant_id, stored, part.digest)

    def change(self, tenant_id: TenantId, address: str, name: str, content: bytes) -> None:
        """Put other bytes where those of a part are; nothing else changes."""
        stored = self._stored(tenant_id, address)
        digest = named(stored.parts)[name].digest
        for pack in stored.packs:
            held = self.contents[tenant_id, pack.address]
            if digest in held:
                held[digest] = content

    def _age_s(self, tenant_id: TenantId, address: PackAddress) -> float:
        return self._now_s() - self._put_s[tenant_id, address]

    def _before(self, tenant_id: TenantId, onto: PackAddress | None) -> Mapping[str, PackAddress]:
        """Which pack holds what, of those that a pack needs."""
        stored = None if onto is None else self.packs.get((tenant_id, onto))
        packs = [] if stored is None else [pack.address for pack in stored.packs]
        return {
            digest: address
            for address in packs
            for digest, content in self.contents.get((tenant_id, address), {}).items()
            if _digest_of(content) == digest
        }

    def _stored(self, tenant_id: TenantId, address: str) -> Stored:
        try:
            return self.packs[tenant_id, legal_address(address)]
        except KeyError:
            raise PartMissing(f"{address} is not in the store") from None

    def _found(self, tenant_id: TenantId, stored: Stored, digest: str) -> bytes | None:
        for pack in stored.packs:
            content = self.contents.get((tenant_id, pack.address), {}).get(digest)
            if content is not None:
                return content
        return None

    def _checked(self, tenant_id: TenantId, stored: Stored, part: StoredPart) -> bytes:
        content = self._found(tenant_id, stored, part.digest)
        if content is None:
            raise PartMissing(f"{part.name} of {stored.address} is not in the store")
        if len(content) != part.size_bytes or _digest_of(content) != part.digest:
            raise PartCorrupt(f"{part.name} of {stored.address} is not what its digest says")
        return content


def _digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"

"""The chunk store over object storage: packs of each tenant below `tenants/<tenant>/packs`, its keyring beside them."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final, TypeVar

from torpor_chunks.cutting import Naming, PieceId
from torpor_chunks.keyring import Keyrings
from torpor_chunks.master_keys import MasterKeys
from torpor_chunks.objects import Entry, ObjectExists, ObjectMissing, Objects
from torpor_chunks.offload import Offload, in_thread
from torpor_chunks.os_errors import typed
from torpor_chunks.pack_format import Index, PackEntry
from torpor_chunks.packing import Packing
from torpor_chunks.port import (
    ChunkError,
    IllegalAddress,
    Inspected,
    PackAddress,
    PartCorrupt,
    PartMissing,
    PartSource,
    PresentPack,
    Stored,
    StoredPart,
    WantedPart,
    legal_address,
    legal_label,
)
from torpor_chunks.restoring import READS_AHEAD, Reading, new_file
from torpor_chunks.sealing import Header, Seal, new_header
from torpor_chunks.sharing import NOTHING, SharedFrame, Sharing, share
from torpor_chunks.unpacking import (
    OpenedPack,
    described,
    frame_ids,
    needed_pieces,
    open_pack,
    read_index,
    stored_part,
)
from torpor_contracts.ids import TenantId, is_token

TENANTS: Final = "tenants"
WHOLE_BYTES_MAX: Final = 8 << 20
"""A pack up to so large is made in memory and put at once; a larger one is sent while it is made."""

LABEL_BYTES_MAX: Final = 256

T = TypeVar("T")


class PackStore:
    """A `ChunkStore`. `offload` is where its blocking work runs."""

    def __init__(self, objects: Objects, masters: MasterKeys, offload: Offload = in_thread) -> None:
        self._objects = objects
        self._offload = offload
        self.keyrings = Keyrings(objects, masters)

    async def put(self, tenant_id: TenantId, parts: Sequence[PartSource], *, onto: PackAddress | None = None) -> Stored:
        """See `ChunkStore.put`."""
        assert parts, "a pack has a part at least"
        assert len({part.name for part in parts}) == len(parts), "the names of parts are unique in their pack"
        return await self._offload(lambda: self._put(tenant_id, parts, onto))

    async def fetch(self, tenant_id: TenantId, address: str, wanted: Sequence[WantedPart]) -> None:
        """See `ChunkStore.fetch`."""
        await self._offload(lambda: self._again(tenant_id, address, lambda: self._fetch(tenant_id, address, wanted)))

    async def inspect(self, tenant_id: TenantId, address: str) -> Inspected:
        """See `ChunkStore.inspect`."""
        return await self._offload(lambda: self._inspect(tenant_id, address))

    async def verify(self, tenant_id: TenantId, address: str) -> Stored:
        """See `ChunkStore.verify`."""
        return await self._offload(lambda: self._verify(tenant_id, address))

    async def delete(self, tenant_id: TenantId, address: str) -> bool:
        """See `ChunkStore.delete`."""
        path = self.path_of(tenant_id, legal_address(address))
        return await self._offload(lambda: self._objects.delete(path))

    async def present(self, tenant_id: TenantId, shard: int) -> list[PresentPack]:
        """See `ChunkStore.present`."""
        return await self._offload(lambda: list(self._present(tenant_id, shard)))

    async def label(self, tenant_id: TenantId, name: str) -> PackAddress | None:
        """See `ChunkStore.label`."""
        path = self._label_path(tenant_id, name)
        return await self._offload(lambda: self._read_label(path))

    async def set_label(self, tenant_id: TenantId, name: str, address: PackAddress) -> PackAddress:
        """See `ChunkStore.set_label`."""
        path = self._label_path(tenant_id, name)
        return await self._offload(lambda: self._set_label(path, legal_address(address)))

    async def labelled(self, tenant_id: TenantId) -> set[PackAddress]:
        """See `ChunkStore.labelled`."""
        return await self._offload(lambda: self._labelled(f"{TENANTS}/{tenant_id}/labels"))

    async def tenants(self) -> list[TenantId]:
        """See `ChunkStore.tenants`."""
        return [TenantId(name) for name in await self._offload(lambda: self._objects.folders(TENANTS))]

    async def remove_abandoned(self, older_s: float) -> int:
        """Remove what dead writers left half-written so long ago; the bytes freed. Of S3, its own rules take care."""
        return await self._offload(lambda: self._objects.remove_abandoned(older_s))

    @staticmethod
    def path_of(tenant_id: TenantId, address: PackAddress) -> str:
        """Where a pack is."""
        if not is_token(tenant_id):
            raise PartMissing(f"{tenant_id!r} is no tenant")
        return f"{TENANTS}/{tenant_id}/packs/{address[5:7]}/{address}"

    @staticmethod
    def _label_path(tenant_id: TenantId, name: str) -> str:
        if not is_token(tenant_id):
            raise PartMissing(f"{tenant_id!r} is no tenant")
        return f"{TENANTS}/{tenant_id}/labels/{legal_label(name)}"

    def _read_label(self, path: str) -> PackAddress | None:
        try:
            data, _ = self._objects.tail(path, LABEL_BYTES_MAX)
        except ObjectMissing:
            return None
        try:
            return legal_address(data.decode("ascii"))
        except (UnicodeDecodeError, IllegalAddress) as error:
            raise PartCorrupt(f"{path} names no pack; remove it: it is made anew") from error

    def _set_label(self, path: str, address: PackAddress) -> PackAddress:
        try:
            self._objects.put(path, address.encode("ascii"), create=True)
        except ObjectExists:
            return self._read_label(path) or address
        return address

    def _labelled(self, prefix: str) -> set[PackAddress]:
        found = (self._read_label(entry.path) for entry in self._objects.entries(prefix))
        return {address for address in found if address is not None}

    # --- putting ---

    def _put(self, tenant_id: TenantId, parts: Sequence[PartSource], onto: PackAddress | None) -> Stored:
        keys = self.keyrings.of(tenant_id)
        header = new_header(keys.newest)
        naming = Naming(keys.naming(keys.newest))
        cuts = [naming.cut(part) for part in parts]
        ids = (piece_id for cut in cuts for piece_id in cut.ids)
        sharing = NOTHING if onto is None else self._shared(tenant_id, onto, ids, header.key_version)
        address = PackAddress(f"pack-{os.urandom(16).hex()}")
        packing = Packing(address, header, self._unseal(tenant_id)(address, header), cuts, sharing)
        pieces = packing.pieces()
        path = self.path_of(tenant_id, address)
        small = packing.estimated_bytes() <= WHOLE_BYTES_MAX
        self._objects.put(path, b"".join(pieces) if small else pieces)
        assert packing.manifest is not None, "the pack was sent to its end"
        return described(packing.manifest, packing.size_bytes)

    def _shared(self, tenant_id: TenantId, onto: PackAddress, wanted: Iterator[bytes], key_version: int) -> Sharing:
        """What an earlier pack can give. Sharing saves space: if it cannot be had, everything is stored."""
        try:
            return share(wanted, list(self._offered(tenant_id, onto, key_version)))
        except (PartMissing, PartCorrupt):
            return NOTHING

    def _offered(self, tenant_id: TenantId, onto: PackAddress, key_version: int) -> Iterator[SharedFrame]:
        before = self._open(tenant_id, onto)
        ids: dict[int, dict[int, list[PieceId]]] = {}
        entries: list[PackEntry] = []
        addresses = [PackAddress(entry.address) for entry in before.manifest.packs[1:]]
        for number, (pack, index) in enumerate(
            [self._indexed(before), *self._each(addresses, lambda one: self._indexed(self._open(tenant_id, one)))]
        ):
            entries.append(PackEntry(pack.address, pack.trailer.size_bytes))
            # Under another key, the same piece has another id: nothing is shared with packs from before a rotation.
            if pack.header.key_version == key_version:
                ids[number] = frame_ids(index)
        needed = needed_pieces(before.manifest)
        for place, frame in enumerate(before.frames):
            if frame.pack in ids and place in needed:
                yield SharedFrame(entries[frame.pack], frame, ids[frame.pack][frame.number], needed[place])

    def _indexed(self, pack: OpenedPack) -> tuple[OpenedPack, Index]:
        return pack, read_index(self._objects, pack)

    # --- reading ---

    def _fetch(self, tenant_id: TenantId, address: str, wanted: Sequence[WantedPart]) -> None:
        reading = self._reading(tenant_id, self._open(tenant_id, legal_address(address)))
        parts = [reading.part(one.name) for one in wanted]
        for one, part in zip(wanted, parts, strict=True):
            _check_wanted(one, stored_part(part), address)
        made: list[WantedPart] = []
        try:
            with ExitStack() as opened:
                files = []
                for one in wanted:
                    files.append(opened.enter_context(new_file(one.into)))
                    made.append(one)
                with typed(wanted[0].into):
                    reading.write(parts, files)
        except BaseException:
            for one in made:
                one.into.unlink(missing_ok=True)
            raise

    def _inspect(self, tenant_id: TenantId, address: str) -> Inspected:
        stored = self._open(tenant_id, legal_address(address)).stored()
        ages_s = self._each([pack.address for pack in stored.packs], lambda one: self._look(tenant_id, one))
        for pack, found in zip(stored.packs, ages_s, strict=True):
            if found is None:
                raise PartMissing(f"{pack.address}, which {address} shares chunks with, is not in the store")
            if found.size_bytes != pack.size_bytes:
                raise PartCorrupt(f"{pack.address} has {found.size_bytes} bytes, not {pack.size_bytes}")
        first = ages_s[0]
        assert first is not None, "it was looked at just now"
        return Inspected(stored=stored, age_s=first.age_s)

    def _look(self, tenant_id: TenantId, address: PackAddress) -> Entry | None:
        return self._objects.look(self.path_of(tenant_id, address))

    def _each(self, addresses: Sequence[PackAddress], work: Callable[[PackAddress], T]) -> list[T]:
        """Do something for each address; at once, where each takes a journey over the network."""
        if self._objects.near or len(addresses) == 1:
            return [work(address) for address in addresses]
        with ThreadPoolExecutor(READS_AHEAD, "torpor-chunks") as workers:
            return list(workers.map(work, addresses))

    def _verify(self, tenant_id: TenantId, address: str) -> Stored:
        found = self._inspect(tenant_id, address).stored
        pack = self._open(tenant_id, legal_address(address))
        reading = self._reading(tenant_id, pack)
        reading.check_ids(read_index(self._objects, pack), self._naming(tenant_id, pack.header))
        reading.check()
        return found

    def _again(self, tenant_id: TenantId, address: str, work: Callable[[], T]) -> T:
        """Do it once more without a nearer copy of a pack that was found damaged or cut."""
        try:
            return work()
        except (PartCorrupt, PartMissing):
            if not self._distrust(tenant_id, address):
                raise
        return work()

    def _distrust(self, tenant_id: TenantId, address: str) -> bool:
        own = self._objects.distrust(self.path_of(tenant_id, legal_address(address)))
        try:
            entries = self._open(tenant_id, legal_address(address)).manifest.packs[1:]
        except ChunkError:
            return own
        paths = [self.path_of(tenant_id, PackAddress(entry.address)) for entry in entries]
        return any([own, *map(self._objects.distrust, paths)])

    def _present(self, tenant_id: TenantId, shard: int) -> Iterator[PresentPack]:
        for entry in self._objects.entries(f"{TENANTS}/{tenant_id}/packs/{shard:02x}"):
            name = entry.path.rpartition("/")[2]
            yield PresentPack(address=legal_address(name), size_bytes=entry.size_bytes, age_s=entry.age_s)

    def _open(self, tenant_id: TenantId, address: PackAddress) -> OpenedPack:
        return open_pack(self._objects, self.path_of(tenant_id, address), address, self._unseal(tenant_id))

    def _reading(self, tenant_id: TenantId, pack: OpenedPack) -> Reading:
        return Reading(self._objects, pack, lambda other: self.path_of(tenant_id, other), self._unseal(tenant_id))

    def _naming(self, tenant_id: TenantId, header: Header) -> Naming:
        return Naming(self.keyrings.of(tenant_id, header.key_version).naming(header.key_version))

    def _unseal(self, tenant_id: TenantId) -> Callable[[PackAddress, Header], Seal]:
        def unseal(address: PackAddress, header: Header) -> Seal:
            secret = self.keyrings.of(tenant_id, header.key_version).secret(header.key_version)
            if secret is None:
                raise PartCorrupt(f"{address} names key {header.key_version}, which is not on its tenant's keyring")
            return Seal(secret, tenant_id, address, header)

        return unseal


def _check_wanted(wanted: WantedPart, found: StoredPart, address: str) -> None:
    if (found.digest, found.size_bytes) != (wanted.digest, wanted.size_bytes):
        raise PartCorrupt(
            f"{wanted.name} should be {wanted.size_bytes} bytes with the digest {wanted.digest}; {address} holds "
            f"{found.size_bytes} bytes with the digest {found.digest}"
        )

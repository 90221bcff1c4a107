"""The chunk store's port: the parts of checkpoints in sealed, immutable packs; a pack that is visible is whole.

A pack holds what one put added: chunks that no earlier pack of the same lineage holds, and the list of all chunks its
parts consist of. Nothing leaves the store that was not authenticated and compared with its digest.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, NewType, Protocol

import msgspec

from torpor_contracts.errors import TorporError
from torpor_contracts.ids import TenantId

PackAddress = NewType("PackAddress", str)
"""`pack-<32 hex digits>`: the random name a pack gets when it is put; never used twice."""

PIECE_BYTES: Final = 4096
"""A page, and the unit in which file systems write: what changes between two checkpoints is counted in these."""

BASE_PIECE_BYTES: Final = 256 * 1024
"""For what is put once and read whole, such as the memory of a template."""

SHARDS: Final = 256
"""Into so many shards a tenant's packs fall, evenly."""

_ADDRESS: Final = re.compile(r"pack-[0-9a-f]{32}")
_LABEL: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,119}")


class ChunkError(TorporError):
    """A part could not be kept or had; `code` is stable and for programs."""

    code: ClassVar[str]


class PartMissing(ChunkError):  # noqa: N818  (each says what is so, as the errors of the contracts do)
    """The store has no such pack, or the pack no such part."""

    code = "checkpoint-part-missing"


class PartCorrupt(ChunkError):  # noqa: N818
    """What the store holds is not what was put: it does not authenticate, or has another digest."""

    code = "checkpoint-part-corrupt"


class NoSpace(ChunkError):  # noqa: N818
    """The disk or quota is full; nothing half-written stays visible."""

    code = "no-space"


class StoreUnavailable(ChunkError):  # noqa: N818
    """The store cannot be read or written: permissions, a failing disk or a failing network."""

    code = "chunk-store-unavailable"


class KeyUnusable(ChunkError):  # noqa: N818
    """The tenant's keys cannot be unwrapped here: another master key was used, or the key file cannot be read."""

    code = "chunk-key-unusable"


class IllegalAddress(ChunkError):  # noqa: N818
    """The text is no address or label, so no pack can have it."""

    code = "illegal-address"


class PartSource(msgspec.Struct, frozen=True, kw_only=True):
    """A file to keep, under a name that is unique in its pack.

    The file is cut into `head_bytes`, which are expected to change each time, and then into pieces of `piece_bytes`;
    pieces that an earlier pack holds are not stored again.
    """

    name: str
    path: Path
    head_bytes: int = 0
    piece_bytes: int = PIECE_BYTES


class StoredPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a pack. `digest` is `sha256:<hex>` of its bytes, `unique_bytes` what keeping it added on disk."""

    name: str
    digest: str
    size_bytes: int
    unique_bytes: int


class PackSize(msgspec.Struct, frozen=True, kw_only=True):
    """A pack and how long it is, which is also what it costs."""

    address: PackAddress
    size_bytes: int


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """What a pack is: its parts, and every pack their chunks are in, its own first."""

    parts: list[StoredPart]
    packs: list[PackSize]

    @property
    def address(self) -> PackAddress:
        """The pack's own address."""
        return self.packs[0].address


class Inspected(msgspec.Struct, frozen=True, kw_only=True):
    """A pack as it is in the store, and how long ago it was put, seconds."""

    stored: Stored
    age_s: float


class WantedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part to fetch, what it must be, and the new file it shall be written to."""

    name: str
    digest: str
    size_bytes: int
    into: Path


class PresentPack(msgspec.Struct, frozen=True, kw_only=True):
    """A pack that is in the store, and how long ago it was put, seconds."""

    address: PackAddress
    size_bytes: int
    age_s: float


class ChunkStore(Protocol):
    """Keeps parts, each tenant's apart. Every method raises a `ChunkError` for what goes wrong, and changes nothing."""

    async def put(self, tenant_id: TenantId, parts: Sequence[PartSource], *, onto: PackAddress | None = None) -> Stored:
        """Keep files, which nobody may write meanwhile, as one new pack; durable when this returns.

        `onto` is a pack of the same tenant whose chunks may be shared: the parent's. One that is not there any more,
        or cannot be read, is not used. Whoever refers to the new pack must make sure that all `packs` stay.
        """
        ...

    async def fetch(self, tenant_id: TenantId, address: str, wanted: Sequence[WantedPart]) -> None:
        """Write parts to new files, each verified; on an error there is no such file."""
        ...

    async def inspect(self, tenant_id: TenantId, address: str) -> Inspected:
        """What the pack says it is, authenticated; each of its packs is there, in its length. Reads no chunk."""
        ...

    async def verify(self, tenant_id: TenantId, address: str) -> Stored:
        """Read every part whole; raises `PartMissing` or `PartCorrupt` unless all are what their digests say."""
        ...

    async def delete(self, tenant_id: TenantId, address: str) -> bool:
        """Remove one pack for good; whether it was there. Only for who knows from the log that nothing refers to it."""
        ...

    async def present(self, tenant_id: TenantId, shard: int) -> list[PresentPack]:
        """The packs of a tenant, referred to or not, whose addresses fall into one of `SHARDS`, counted from 0."""
        ...

    async def label(self, tenant_id: TenantId, name: str) -> PackAddress | None:
        """The pack that has this label, or None. Labels are for packs that no checkpoint refers to, and never move."""
        ...

    async def set_label(self, tenant_id: TenantId, name: str, address: PackAddress) -> PackAddress:
        """Label a pack, unless the label is taken; the pack that has it."""
        ...

    async def labelled(self, tenant_id: TenantId) -> set[PackAddress]:
        """The packs that have labels."""
        ...

    async def tenants(self) -> list[TenantId]:
        """Who has anything in the store."""
        ...


def legal_address(text: str) -> PackAddress:
    """The text as an address; raises `IllegalAddress`."""
    if _ADDRESS.fullmatch(text) is None:
        raise IllegalAddress(f"{text!r} is no address of a pack; it must read pack-<32 hex digits>")
    return PackAddress(text)


def legal_label(text: str) -> str:
    """The text as a label; raises `IllegalAddress`."""
    if _LABEL.fullmatch(text) is None:
        raise IllegalAddress(f"{text!r} is no label; it must be made of a-z, 0-9 and -, 120 characters at most")
    return text


def named(parts: Sequence[StoredPart]) -> Mapping[str, StoredPart]:
    """Parts by their names."""
    return {part.name: part for part in parts}

"""Reads packs: the manifest first, then the frames a part needs; each is authenticated before it is expanded."""

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from torpor_chunks.cutting import PieceId
from torpor_chunks.objects import Objects
from torpor_chunks.pack_format import (
    ID_BYTES,
    TRAILER_BYTES,
    ZEROS,
    Frame,
    Index,
    Manifest,
    PartEntry,
    Trailer,
    decode_index,
    decode_manifest,
    decode_trailer,
    from_frames,
)
from torpor_chunks.port import PackAddress, PackSize, PartCorrupt, Stored, StoredPart
from torpor_chunks.sealing import HEADER_BYTES, INDEX, MANIFEST, Header, Seal, decode_header

TAIL_BYTES: Final = 64 * 1024
"""What is read of a pack's end at first: for most, all but the frames."""

BATCH_BYTES: Final = 8 << 20
"""How much of a pack is held in memory at once while its frames are opened."""

_HASHED_BYTES: Final = 1 << 20

Unseal = Callable[[PackAddress, Header], Seal]
"""The seal of a pack whose header says so."""


class OpenedPack(NamedTuple):
    """A pack whose manifest was authenticated."""

    path: str
    address: PackAddress
    header: Header
    seal: Seal
    trailer: Trailer
    tail: bytes
    manifest: Manifest
    frames: list[Frame]

    def stored(self) -> Stored:
        """What the pack says it is."""
        return described(self.manifest, self.trailer.size_bytes)


def stored_part(entry: PartEntry) -> StoredPart:
    """A part in the port's words."""
    return StoredPart(
        name=entry.name,
        digest=f"sha256:{entry.digest.hex()}",
        size_bytes=entry.size_bytes,
        unique_bytes=entry.unique_bytes,
    )


def described(manifest: Manifest, size_bytes: int) -> Stored:
    """A pack in the port's words. What belongs to no part (the tables) is charged to the first."""
    first, *others = map(stored_part, manifest.parts)
    rest = size_bytes - first.unique_bytes - sum(part.unique_bytes for part in others)
    first = msgspec.structs.replace(first, unique_bytes=first.unique_bytes + rest)
    sizes = [size_bytes, *(pack.size_bytes for pack in manifest.packs[1:])]
    packs = [
        PackSize(address=PackAddress(pack.address), size_bytes=size)
        for pack, size in zip(manifest.packs, sizes, strict=True)
    ]
    return Stored(parts=[first, *others], packs=packs)


def open_pack(objects: Objects, path: str, address: PackAddress, unseal: Unseal) -> OpenedPack:
    """Read and authenticate a pack's manifest; raises `PartMissing` or `PartCorrupt`."""
    tail, size_bytes = objects.tail(path, TAIL_BYTES)
    trailer = decode_trailer(tail, size_bytes, address)
    needed = size_bytes - trailer.manifest_at
    if needed > len(tail):
        tail, _ = objects.tail(path, needed)
    first = tail if size_bytes == len(tail) else objects.read(path, [(0, HEADER_BYTES)])[0]
    header = decode_header(first, address)
    seal = unseal(address, header)
    sealed = tail[len(tail) - needed : len(tail) - TRAILER_BYTES]
    manifest = decode_manifest(seal.open(MANIFEST, 0, sealed), trailer.manifest_plain_bytes, address)
    frames = _checked_frames(manifest, trailer, address)
    return OpenedPack(path, address, header, seal, trailer, tail, manifest, frames)


def _checked_frames(manifest: Manifest, trailer: Trailer, address: PackAddress) -> list[Frame]:
    """Authenticated, so these can be wrong only if this program is: then nothing is handed out either."""
    try:
        frames = from_frames(manifest.frames)
    except ValueError as error:
        raise PartCorrupt(f"{address} has a table of frames that is none") from error
    own = [frame for frame in frames if frame.pack == 0]
    whole = HEADER_BYTES + sum(frame.length for frame in own)
    if not manifest.parts or manifest.packs[0].address != address or whole != trailer.index_at:
        raise PartCorrupt(f"{address} has a manifest that is not its own")
    if any(not 0 <= frame.pack < len(manifest.packs) for frame in frames):
        raise PartCorrupt(f"{address} has a frame in no pack")
    return frames


def read_index(objects: Objects, pack: OpenedPack) -> Index:
    """Read and authenticate a pack's index."""
    size, at = pack.trailer.index_bytes, pack.trailer.index_at
    begins = pack.trailer.size_bytes - len(pack.tail)
    if at >= begins:
        sealed = pack.tail[at - begins : at - begins + size]
    else:
        (sealed,) = objects.read(pack.path, [(at, size)])
    return decode_index(pack.seal.open(INDEX, 0, sealed), pack.trailer.index_plain_bytes, pack.address)


def frame_ids(index: Index) -> dict[int, list[PieceId]]:
    """The ids of the pieces in each of a pack's own frames, by the frame's number."""
    found, at = {}, 0
    for frame in from_frames(index.frames):
        end = at + frame.pieces * ID_BYTES
        found[frame.number] = [index.ids[place : place + ID_BYTES] for place in range(at, end, ID_BYTES)]
        at = end
    return found


def needed_pieces(manifest: Manifest) -> dict[int, set[int]]:
    """Which pieces the parts of a pack consist of, by the frame's place in the manifest."""
    needed: dict[int, set[int]] = {}
    for part in manifest.parts:
        for frame, first, count in zip(part.frames, part.firsts, part.counts, strict=True):
            if frame != ZEROS:
                needed.setdefault(frame, set()).update(range(first, first + count))
    return needed

"""What a pack is made of, byte for byte: header, sealed frames, sealed index, sealed manifest, trailer.

`libs/chunks/docs/format.md` says why. Numbers that tend to grow are written as differences, so that they compress.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, TypeVar

import msgspec

from torpor_chunks.compression import compressed, expanded
from torpor_chunks.port import PartCorrupt
from torpor_chunks.sealing import HEADER_BYTES

ID_BYTES: Final = 16
"""A piece's id: the first half of HMAC-SHA256, under the tenant's key, of its bytes."""

FRAME_BYTES: Final = 256 * 1024
"""How much is compressed and sealed together: large enough to compress well, small enough to be read for a part."""

ZEROS: Final = -1
"""In place of a frame's number: pieces that are all zeros, which nothing is stored for."""

SECTION_BYTES_MAX: Final = 1 << 30
_TRAILER: Final = struct.Struct("<QQIIII8s")
TRAILER_BYTES: Final = _TRAILER.size
_END: Final = b"KPROPROT"


class Trailer(NamedTuple):
    """What a pack ends with, in the clear: where its sections are, and how long they are when opened."""

    size_bytes: int
    index_at: int
    index_bytes: int
    index_plain_bytes: int
    manifest_bytes: int
    manifest_plain_bytes: int

    @property
    def manifest_at(self) -> int:
        """Where the manifest begins."""
        return self.index_at + self.index_bytes

    def encoded(self) -> bytes:
        """The trailer's bytes."""
        return _TRAILER.pack(*self, _END)


def decode_trailer(data: bytes, size_bytes: int, what: str) -> Trailer:
    """The trailer at the end of a pack of this size; raises `PartCorrupt` unless all its sections have room in it."""
    if len(data) < TRAILER_BYTES:
        raise PartCorrupt(f"{what} is too short to be a pack")
    *numbers, end = _TRAILER.unpack(data[-TRAILER_BYTES:])
    trailer = Trailer(*numbers)
    whole = trailer.manifest_at + trailer.manifest_bytes + TRAILER_BYTES
    if end != _END or trailer.size_bytes != size_bytes or whole != size_bytes or trailer.index_at < HEADER_BYTES:
        raise PartCorrupt(f"{what} does not end as a pack does: it was cut, or added to")
    if max(trailer.index_plain_bytes, trailer.manifest_plain_bytes) > SECTION_BYTES_MAX:
        raise PartCorrupt(f"{what} has an impossible section")
    return trailer


class Frames(msgspec.Struct, array_like=True, frozen=True):
    """Frames as columns: which pack (by its place in the manifest's list), where, how long, and of what pieces."""

    packs: list[int]
    starts: list[int]
    lengths: list[int]
    numbers: list[int]
    piece_bytes: list[int]
    pieces: list[int]


class Frame(NamedTuple):
    """One frame: `number` is its place in its own pack, `length` what it takes there, sealed."""

    pack: int
    start: int
    length: int
    number: int
    piece_bytes: int
    pieces: int


class PartEntry(msgspec.Struct, array_like=True, frozen=True):
    """A part: its head, then its pieces as runs of neighbours in one frame (columns: frame, first piece, count)."""

    name: str
    size_bytes: int
    digest: bytes
    unique_bytes: int
    head: bytes
    piece_bytes: int
    frames: list[int]
    firsts: list[int]
    counts: list[int]


class PackEntry(msgspec.Struct, array_like=True, frozen=True):
    """A pack that chunks are in, and its size."""

    address: str
    size_bytes: int


class Manifest(msgspec.Struct, array_like=True, frozen=True):
    """The sealed table of contents of a pack. `packs[0]` is the pack itself, whose size is in the trailer: 0 here."""

    packs: list[PackEntry]
    frames: Frames
    parts: list[PartEntry]


class Index(msgspec.Struct, array_like=True, frozen=True):
    """What pieces a pack's own frames hold: for packs that come after it and share them."""

    frames: Frames
    ids: bytes


Section = TypeVar("Section", Manifest, Index)


def to_frames(frames: Iterable[Frame]) -> Frames:
    """Rows to columns."""
    rows = list(frames)
    packs, starts, lengths, numbers, piece_bytes, pieces = ([row[place] for row in rows] for place in range(6))
    return Frames(_steps(packs), _steps(starts), lengths, _steps(numbers), _steps(piece_bytes), pieces)


def from_frames(frames: Frames) -> list[Frame]:
    """Columns to rows; raises `ValueError` when they are not of one length."""
    columns = (
        accumulate(frames.packs),
        accumulate(frames.starts),
        frames.lengths,
        accumulate(frames.numbers),
        accumulate(frames.piece_bytes),
        frames.pieces,
    )
    return [Frame(*row) for row in zip(*columns, strict=True)]


def encode_section(section: Manifest | Index) -> tuple[bytes, int]:
    """A section's bytes, compressed, and how long they were before."""
    plain = msgspec.msgpack.encode(section)
    return compressed(plain), len(plain)


def decode_manifest(data: bytes, plain_bytes: int, what: str) -> Manifest:
    """The manifest in an opened section."""
    return _decoded(data, plain_bytes, what, Manifest)


def decode_index(data: bytes, plain_bytes: int, what: str) -> Index:
    """The index in an opened section."""
    return _decoded(data, plain_bytes, what, Index)


def _decoded(data: bytes, plain_bytes: int, what: str, kind: type[Section]) -> Section:
    try:
        return msgspec.msgpack.decode(expanded(data, plain_bytes, what), type=kind)
    except msgspec.DecodeError as error:
        raise PartCorrupt(f"{what} has a section that is none: {error}") from error


def encode_head(head: bytes) -> bytes:
    """A part's head as 32-bit numbers, each less the one before it: a table of page numbers becomes small."""
    whole = len(head) // 4 * 4
    words = _words(head[:whole])
    steps = array("I", ((now - before) & 0xFFFFFFFF for before, now in pairwise((0, *words))))
    return _little(steps) + head[whole:]


def decode_head(head: bytes) -> bytes:
    """The head that `encode_head` was given."""
    whole = len(head) // 4 * 4
    words = array("I", accumulate(_words(head[:whole]), lambda before, step: (before + step) & 0xFFFFFFFF))
    return _little(words) + head[whole:]


def _words(data: bytes) -> "array[int]":
    words = array("I")
    words.frombytes(data)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _little(words: "array[int]") -> bytes:
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _steps(numbers: Sequence[int]) -> list[int]:
    return [now - before for before, now in pairwise((0, *numbers))]

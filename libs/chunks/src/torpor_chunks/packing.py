"""Writes packs: what is not shared is read again from its file, put together into frames, compressed, sealed, sent."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from torpor_chunks.compression import compressed
from torpor_chunks.cutting import NO_ID, Cut, PieceId
from torpor_chunks.os_errors import typed
from torpor_chunks.pack_format import (
    FRAME_BYTES,
    TRAILER_BYTES,
    ZEROS,
    Frame,
    Index,
    Manifest,
    PackEntry,
    PartEntry,
    Trailer,
    encode_head,
    encode_section,
    to_frames,
)
from torpor_chunks.port import PackAddress, StoreUnavailable
from torpor_chunks.sealing import FRAME, HEADER_BYTES, INDEX, MANIFEST, SEAL_BYTES, Header, Seal
from torpor_chunks.sharing import Place, Sharing

PIECES_MAX: Final = 1 << 26
"""256 GiB of pages; more would not fit the format's sections."""


class _NewPiece(NamedTuple):
    """A piece to store: the cut it is from, and where in that file."""

    piece_id: PieceId
    part: int
    at: int


class _Plan(NamedTuple):
    """The pieces of the frames to be written, by frame, and where each piece is, shared or new."""

    frames: list[list[_NewPiece]]
    places: dict[PieceId, Place]


class Packing:
    """One pack in the making. Iterate over `pieces()` once; then `manifest` and `size_bytes` are known."""

    def __init__(self, address: PackAddress, header: Header, seal: Seal, cuts: Sequence[Cut], sharing: Sharing) -> None:
        self._address = address
        self._header = header
        self._seal = seal
        self._cuts = cuts
        self._sharing = sharing
        self._plan = _planned(cuts, sharing)
        self._unique = [0] * len(cuts)
        self.manifest: Manifest | None = None
        self.size_bytes = 0

    def pieces(self) -> Iterator[bytes]:
        """The pack's bytes, in order."""
        yield self._header.encoded()
        at = HEADER_BYTES
        frames: list[Frame] = []
        with ExitStack() as opened:
            files = [opened.enter_context(_opened(cut.source.path)) for cut in self._cuts]
            for number, pieces in enumerate(self._plan.frames):
                sealed = self._seal.seal(FRAME, number, compressed(self._content(pieces, files)))
                size = self._cuts[pieces[0].part].source.piece_bytes
                frames.append(Frame(0, at, len(sealed), number, size, len(pieces)))
                self._charge(pieces, len(sealed))
                at += len(sealed)
                yield sealed
        self.manifest = self._manifest(frames)
        index = Index(to_frames(frames), b"".join(piece.piece_id for one in self._plan.frames for piece in one))
        index_plain, index_plain_bytes = encode_section(index)
        manifest_plain, manifest_plain_bytes = encode_section(self.manifest)
        sections = [self._seal.seal(INDEX, 0, index_plain), self._seal.seal(MANIFEST, 0, manifest_plain)]
        self.size_bytes = at + sum(map(len, sections)) + TRAILER_BYTES
        trailer = Trailer(
            size_bytes=self.size_bytes,
            index_at=at,
            index_bytes=len(sections[0]),
            index_plain_bytes=index_plain_bytes,
            manifest_bytes=len(sections[1]),
            manifest_plain_bytes=manifest_plain_bytes,
        )
        yield from sections
        yield trailer.encoded()

    def estimated_bytes(self) -> int:
        """About as many bytes as the pack will have at most."""
        return sum(FRAME_BYTES + SEAL_BYTES for _ in self._plan.frames)

    def _content(self, pieces: Sequence[_NewPiece], files: Sequence[FileIO]) -> bytes:
        parts: list[bytes] = []
        for part, start, length in _runs(pieces, self._cuts):
            path = self._cuts[part].source.path
            with typed(path):
                data = os.pread(files[part].fileno(), length, start)
            if len(data) < length:
                if start + len(data) != self._cuts[part].size_bytes:
                    raise StoreUnavailable(f"{path} was cut short while it was read")
                data = data.ljust(length, b"\0")
            parts.append(data)
        return b"".join(parts)

    def _charge(self, pieces: Sequence[_NewPiece], length: int) -> None:
        """Share out what a frame takes among the parts its pieces are from."""
        parts = [piece.part for piece in pieces]
        for part in sorted(set(parts)):
            self._unique[part] += length * parts.count(part) // len(parts)

    def _manifest(self, own: list[Frame]) -> Manifest:
        packs = [PackEntry(self._address, 0)]
        numbers = {self._address: 0}
        frames = []
        for shared in self._sharing.frames:
            if shared.pack.address not in numbers:
                numbers[PackAddress(shared.pack.address)] = len(packs)
                packs.append(shared.pack)
            frames.append(shared.frame._replace(pack=numbers[PackAddress(shared.pack.address)]))
        parts = [self._entry(cut, unique) for cut, unique in zip(self._cuts, self._unique, strict=True)]
        return Manifest(packs, to_frames([*frames, *own]), parts)

    def _entry(self, cut: Cut, unique_bytes: int) -> PartEntry:
        frames: list[int] = []
        firsts: list[int] = []
        counts: list[int] = []
        for piece_id in cut.ids:
            frame, piece = (ZEROS, 0) if piece_id == NO_ID else self._plan.places[piece_id]
            if frames and frames[-1] == frame and (frame == ZEROS or firsts[-1] + counts[-1] == piece):
                counts[-1] += 1
                continue
            frames.append(frame)
            firsts.append(piece)
            counts.append(1)
        return PartEntry(
            name=cut.source.name,
            size_bytes=cut.size_bytes,
            digest=cut.digest,
            unique_bytes=unique_bytes,
            head=encode_head(cut.head),
            piece_bytes=cut.source.piece_bytes,
            frames=frames,
            firsts=firsts,
            counts=counts,
        )


def _opened(path: Path) -> FileIO:
    with typed(path):
        return path.open("rb", buffering=0)


def _planned(cuts: Sequence[Cut], sharing: Sharing) -> _Plan:
    """Frames of what is new, then frames of what earlier packs have but not cheaply: each kind lives as long."""
    places = dict(sharing.places)
    frames: list[list[_NewPiece]] = []
    new: dict[int, list[_NewPiece]] = {}
    seen = set(places)
    for part, cut in enumerate(cuts):
        size = cut.source.piece_bytes
        for number, piece_id in enumerate(cut.ids):
            if piece_id not in seen and piece_id != NO_ID:
                seen.add(piece_id)
                new.setdefault(size, []).append(_NewPiece(piece_id, part, len(cut.head) + number * size))
    if len(seen) > PIECES_MAX:
        raise StoreUnavailable(f"{len(seen)} pieces are more than one pack can hold; cut them larger")
    for size, pieces in new.items():
        again = [piece for piece in pieces if piece.piece_id in sharing.known]
        fresh = [piece for piece in pieces if piece.piece_id not in sharing.known]
        for group in (fresh, again):
            rest = iter(group)
            while frame := list(islice(rest, max(1, FRAME_BYTES // size))):
                for place, piece in enumerate(frame):
                    places[piece.piece_id] = Place(len(sharing.frames) + len(frames), place)
                frames.append(frame)
    return _Plan(frames, places)


def _runs(pieces: Sequence[_NewPiece], cuts: Sequence[Cut]) -> Iterator[tuple[int, int, int]]:
    """Pieces that are neighbours in one file, as (part, start, length)."""
    at = 0
    while at < len(pieces):
        first, size = pieces[at], cuts[pieces[at].part].source.piece_bytes
        count = 1
        while at + count < len(pieces) and pieces[at + count][1:] == (first.part, first.at + count * size):
            count += 1
        yield first.part, first.at, count * size
        at += count

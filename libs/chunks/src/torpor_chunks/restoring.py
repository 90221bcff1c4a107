"""Puts parts together again: reads the frames they need, each once, authenticates them, and checks whole digests."""

import hashlib
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

from torpor_chunks.compression import expanded
from torpor_chunks.cutting import Naming, PieceId, pieces_of
from torpor_chunks.objects import Objects
from torpor_chunks.os_errors import typed
from torpor_chunks.pack_format import FRAME_BYTES, ZEROS, Frame, Index, PartEntry, decode_head, from_frames
from torpor_chunks.port import PackAddress, PartCorrupt, PartMissing
from torpor_chunks.sealing import FRAME, HEADER_BYTES, Seal, decode_header
from torpor_chunks.unpacking import OpenedPack, Unseal

BATCH_BYTES: Final = 4 << 20
"""How much of a pack is read at once."""

READS_AHEAD: Final = 6
"""How many reads of a distant store are under way at once."""

_HASHED_BYTES: Final = 1 << 20


class _Target(NamedTuple):
    """Where pieces of a frame belong: the first of them, how many, and where in which part's file."""

    first: int
    pieces: int
    part: int
    at: int


class _Batch(NamedTuple):
    """Frames of one pack that are read at once."""

    address: PackAddress
    numbers: list[int]


class Reading:
    """Reads the parts of one pack, wherever their chunks are."""

    def __init__(
        self, objects: Objects, pack: OpenedPack, path_of: Callable[[PackAddress], str], unseal: Unseal
    ) -> None:
        self._objects = objects
        self._pack = pack
        self._path_of = path_of
        self._unseal = unseal

    def part(self, name: str) -> PartEntry:
        """A part by its name; raises `PartMissing`."""
        for part in self._pack.manifest.parts:
            if part.name == name:
                return part
        raise PartMissing(f"{self._pack.address} has no part {name!r}")

    def write(self, parts: Sequence[PartEntry], files: Sequence[FileIO]) -> None:
        """Write parts into new files, and check their digests there; raises `PartCorrupt` or `PartMissing`."""
        targets: dict[int, list[_Target]] = {}
        for number, (part, file) in enumerate(zip(parts, files, strict=True)):
            head = decode_head(part.head)
            os.ftruncate(file.fileno(), part.size_bytes)
            _write(file.fileno(), memoryview(head), 0)
            self._aim(part, number, len(head), targets)
        for frame, data in self.frames(sorted(targets)):
            view = memoryview(data)
            for target in targets[frame]:
                self._place(view, target, parts[target.part], files[target.part].fileno())
        for part, file in zip(parts, files, strict=True):
            _check_digest(file, part, self._pack.address)

    def check(self) -> None:
        """Read every part whole, for nobody; raises `PartCorrupt` or `PartMissing`."""
        parts = self._pack.manifest.parts
        with typed(Path(tempfile.gettempdir())), ExitStack() as opened:
            self.write(parts, [opened.enter_context(tempfile.TemporaryFile(buffering=0)) for _ in parts])

    def check_ids(self, index: Index, naming: Naming) -> None:
        """Compare the pieces of the pack's own frames with the ids that later packs find them by."""
        own = [number for number, frame in enumerate(self._pack.frames) if frame.pack == 0]
        frames = from_frames(index.frames)
        if [self._pack.frames[number] for number in own] != frames:
            raise PartCorrupt(f"{self._pack.address} has an index of other frames than it holds")
        ids = b"".join(
            b"".join(_ids(content, frame.piece_bytes, naming))
            for (_, content), frame in zip(self.frames(own), frames, strict=True)
        )
        if ids != index.ids:
            raise PartCorrupt(f"{self._pack.address} has an index that names other pieces than it holds")

    def frames(self, numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """The content of frames, authenticated, pack by pack; a bounded amount of it is in memory at a time."""
        for batch, seal, sealed in self._read(self._batches(numbers)):
            for number, data in zip(batch.numbers, sealed, strict=True):
                yield number, _opened(self._pack.frames[number], seal, data, batch.address)

    def _aim(self, part: PartEntry, number: int, at: int, targets: dict[int, list[_Target]]) -> None:
        for frame, first, count in zip(part.frames, part.firsts, part.counts, strict=True):
            if frame != ZEROS:
                targets.setdefault(frame, []).append(_Target(first, count, number, at))
            at += count * part.piece_bytes
        if not 0 <= at - part.size_bytes < part.piece_bytes:
            raise PartCorrupt(f"{self._pack.address}: the pieces of {part.name} do not make up its size")

    def _place(self, data: memoryview, target: _Target, part: PartEntry, descriptor: int) -> None:
        size = part.piece_bytes
        length = min(target.pieces * size, part.size_bytes - target.at)
        pieces = data[target.first * size : target.first * size + length]
        if len(pieces) != length:
            raise PartCorrupt(f"{self._pack.address}: a piece of {part.name} lies outside of its frame")
        _write(descriptor, pieces, target.at)

    def _batches(self, numbers: Sequence[int]) -> Iterator[_Batch]:
        by_pack: dict[int, list[int]] = {}
        for number in numbers:
            if not 0 <= number < len(self._pack.frames):
                raise PartCorrupt(f"{self._pack.address} has no frame {number}")
            by_pack.setdefault(self._pack.frames[number].pack, []).append(number)
        for pack, wanted in by_pack.items():
            address = PackAddress(self._pack.manifest.packs[pack].address)
            batch: list[int] = []
            held = 0
            for number in wanted:
                if batch and held + self._pack.frames[number].length > BATCH_BYTES:
                    yield _Batch(address, batch)
                    batch, held = [], 0
                batch.append(number)
                held += self._pack.frames[number].length
            yield _Batch(address, batch)

    def _read(self, batches: Iterator[_Batch]) -> Iterator[tuple[_Batch, Seal, list[bytes]]]:
        """Read batches in their order; of a distant store, some ahead."""
        if self._objects.near:
            for batch in batches:
                yield batch, *self._read_one(batch)
            return
        with ThreadPoolExecutor(READS_AHEAD, "torpor-chunks") as readers:
            under_way: deque[tuple[_Batch, Future[tuple[Seal, list[bytes]]]]] = deque()
            try:
                for batch in batches:
                    under_way.append((batch, readers.submit(self._read_one, batch)))
                    if len(under_way) == READS_AHEAD:
                        first, reading = under_way.popleft()
                        yield first, *reading.result()
                for first, reading in under_way:
                    yield first, *reading.result()
            finally:
                readers.shutdown(cancel_futures=True)

    def _read_one(self, batch: _Batch) -> tuple[Seal, list[bytes]]:
        frames = [self._pack.frames[number] for number in batch.numbers]
        ranges = [(frame.start, frame.length) for frame in frames]
        path = self._path_of(batch.address)
        if batch.address == self._pack.address:
            return self._pack.seal, self._objects.read(path, ranges)
        header, *sealed = self._objects.read(path, [(0, HEADER_BYTES), *ranges])
        return self._unseal(batch.address, decode_header(header, batch.address)), sealed


def new_file(path: Path) -> FileIO:
    """A new file to write a part to."""
    with typed(path):
        return path.open("x+b", buffering=0)


def _opened(frame: Frame, seal: Seal, data: bytes, address: PackAddress) -> bytes:
    size_bytes = frame.piece_bytes * frame.pieces
    if size_bytes > max(FRAME_BYTES, frame.piece_bytes):
        raise PartCorrupt(f"{address}: frame {frame.number} is larger than any")
    return expanded(seal.open(FRAME, frame.number, data), size_bytes, address)


def _ids(content: bytes, piece_bytes: int, naming: Naming) -> Iterator[PieceId]:
    return map(naming.id_of, pieces_of(content, piece_bytes))


def _write(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


def _check_digest(file: FileIO, part: PartEntry, address: PackAddress) -> None:
    whole, at = hashlib.sha256(), 0
    while data := os.pread(file.fileno(), _HASHED_BYTES, at):
        whole.update(data)
        at += len(data)
    if whole.digest() != part.digest or at != part.size_bytes:
        raise PartCorrupt(f"{part.name} of {address} has the digest {whole.hexdigest()}, not {part.digest.hex()}")

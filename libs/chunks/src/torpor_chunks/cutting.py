"""Cuts the files of a put into pieces and names each by its content, under the tenant's key."""

import hashlib
import hmac
import os
from collections.abc import Iterator
from typing import Final

import msgspec

from torpor_chunks.os_errors import typed
from torpor_chunks.pack_format import ID_BYTES
from torpor_chunks.port import PartSource

_BLOCK_BYTES: Final = 1 << 20

PieceId = bytes
NO_ID: Final = b""
"""The id of a piece that is all zeros."""


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A file as it was cut: `ids` are those of its pieces in order; the last piece is filled up with zeros."""

    source: PartSource
    size_bytes: int
    digest: bytes
    head: bytes
    ids: list[PieceId]


class Naming:
    """Names pieces by their content."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def id_of(self, piece: bytes) -> PieceId:
        """The id of a piece that is not all zeros."""
        return hmac.digest(self._key, piece, hashlib.sha256)[:ID_BYTES]

    def cut(self, source: PartSource) -> Cut:
        """Read a file once."""
        whole, head, ids = hashlib.sha256(), b"", list[PieceId]()
        size_bytes = 0
        zeros = bytes(source.piece_bytes)
        with typed(source.path), source.path.open("rb", buffering=0) as file:
            head = _read_full(file.fileno(), source.head_bytes)
            whole.update(head)
            size_bytes += len(head)
            step = max(1, _BLOCK_BYTES // source.piece_bytes) * source.piece_bytes
            while block := _read_full(file.fileno(), step):
                whole.update(block)
                size_bytes += len(block)
                pieces = pieces_of(block, source.piece_bytes)
                ids.extend(NO_ID if piece == zeros else self.id_of(piece) for piece in pieces)
        return Cut(source=source, size_bytes=size_bytes, digest=whole.digest(), head=head, ids=ids)


def pieces_of(block: bytes, piece_bytes: int) -> Iterator[bytes]:
    """The pieces of a block that begins with one; a short last one is filled up with zeros."""
    for at in range(0, len(block), piece_bytes):
        piece = block[at : at + piece_bytes]
        yield piece if len(piece) == piece_bytes else piece.ljust(piece_bytes, b"\0")


def _read_full(descriptor: int, length: int) -> bytes:
    """So many bytes, or what is left of the file."""
    parts = []
    while length > 0 and (part := os.read(descriptor, length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)

"""The one byte form of a log row, and its digest, which chains it to the row before and is its leaf in the Merkle tree.

A row's canonical bytes, integers big-endian, never change for a row once written:

| bytes | what |
| --- | --- |
| 32 | digest of the row before; zeros before the first |
| 1 | the format, 1 |
| 8, 8, 8 | position, version, occurred_at_us |
| 7 x 4 | byte lengths of the seven fields that follow |
| … | stream, tag, command_id, causation_id, correlation_id, tenant_id as UTF-8; data as it is |

The digest is the RFC 9162 leaf hash, `SHA-256(0x00 || canonical bytes)`.
"""

from hashlib import sha256
from struct import Struct
from typing import Final

from torpor_eventlog.port import Recorded

NO_DIGEST: Final = bytes(32)
"""What stands for the digest of the row before the first."""

_LEAF_AND_HEADER: Final = Struct(">B32sBQQq").pack
_HEADER: Final = Struct(">32sBQQq").pack
_LENGTHS: Final = Struct(">7I").pack
_FORMAT: Final = 1


def tail_bytes(texts: tuple[bytes, ...], data: bytes) -> bytes:
    """The part of the canonical bytes that is known before the row has a place: lengths, the six texts, the data."""
    return joined_tail_bytes(tuple(map(len, texts)), b"".join(texts), data)


def joined_tail_bytes(sizes: tuple[int, ...], joined: bytes, data: bytes) -> bytes:
    """`tail_bytes` for texts that are joined already."""
    return _LENGTHS(*sizes, len(data)) + joined + data


def placed_digest(previous: bytes, position: int, version: int, occurred_at_us: int, tail: bytes) -> bytes:
    """The digest of a row that now has its place; `tail` is from `tail_bytes`."""
    return sha256(_LEAF_AND_HEADER(0, previous, _FORMAT, position, version, occurred_at_us) + tail).digest()


def canonical_bytes(previous: bytes, row: Recorded) -> bytes:
    """The row's canonical bytes after a row with digest `previous`."""
    return _HEADER(previous, _FORMAT, row.position, row.version, row.occurred_at_us) + _tail_of(row)


def row_digest(previous: bytes, row: Recorded) -> bytes:
    """What `row.digest` must be after a row with digest `previous`."""
    return placed_digest(previous, row.position, row.version, row.occurred_at_us, _tail_of(row))


def _tail_of(row: Recorded) -> bytes:
    texts = (row.stream, row.tag, row.command_id, row.causation_id, row.correlation_id, row.tenant_id)
    joined = "".join(texts)
    if joined.isascii():
        return joined_tail_bytes(tuple(map(len, texts)), joined.encode("ascii"), row.data)
    return tail_bytes(tuple(text.encode() for text in texts), row.data)

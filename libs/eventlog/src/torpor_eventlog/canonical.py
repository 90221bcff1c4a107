"""The one byte form of a log row, and its digest, which chains it to the row before and is its leaf in the Merkle tree.

A row's canonical bytes, integers big-endian, never change for a row once written:

| bytes | what |
| --- | --- |
| 32 | digest of the row before; zeros before the first |
| 1 | the format, 1 |
| 8, 8, 8 | position, version, occurred_at_us |
| 1 | 0x96: six texts follow |
| … | stream, tag, command_id, causation_id, correlation_id, tenant_id, each with its length before it |
| … | data, as it is, to the end |

A text is UTF-8 of 1 to 255 bytes. Its length is one byte, 0xa0 + length, below 32 bytes, else two, 0xd9 and the length:
the six texts are a MessagePack array. The digest is the RFC 9162 leaf hash, `SHA-256(0x00 || canonical bytes)`.
"""

from hashlib import sha256
from struct import Struct
from typing import Final

import msgspec

from torpor_eventlog.port import Recorded

NO_DIGEST: Final = bytes(32)
"""What stands for the digest of the row before the first."""

TEXT_BYTES_MAX: Final = 255

Texts = tuple[str, str, str, str, str, str]
"""stream, tag, command_id, causation_id, correlation_id, tenant_id"""

_LEAF_AND_HEADER: Final = Struct(">B32sBQQq").pack
_HEADER: Final = Struct(">32sBQQq").pack
_FORMAT: Final = 1
_packed: Final = msgspec.msgpack.Encoder().encode


def tail_bytes(texts: Texts, data: bytes) -> bytes:
    """The part of the canonical bytes that is known before the row has a place.

    Raises `ValueError` for a text that no row may have: empty, too long, with a NUL or half a surrogate pair.
    """
    packed = _packed(texts)
    if not all(texts) or b"\x00" in packed:
        raise ValueError("a text is empty or holds a NUL")
    if len(packed) > TEXT_BYTES_MAX and any(len(text.encode()) > TEXT_BYTES_MAX for text in texts):
        raise ValueError(f"a text is longer than {TEXT_BYTES_MAX} bytes")
    return packed + data


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
    return (
        _packed((row.stream, row.tag, row.command_id, row.causation_id, row.correlation_id, row.tenant_id)) + row.data
    )

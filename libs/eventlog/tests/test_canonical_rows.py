"""The canonical bytes of a row are written down here: they may never change."""

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

import msgspec
import pytest

from torpor_eventlog.canonical import NO_DIGEST, canonical_bytes, placed_digest, row_digest, tail_bytes
from torpor_eventlog.port import Recorded

ROW: Final = Recorded(
    position=258,
    stream="ses-1",
    version=3,
    tag="thing-happened.v1",
    data=b'{"a":1}',
    occurred_at_us=1_796_040_000_000_000,
    command_id="c" * 32,
    causation_id="é",
    correlation_id="goal-1",
    tenant_id="default",
    digest=bytes(32),
)
PREVIOUS: Final = bytes(range(32))

GOLDEN: Final = (
    bytes(range(32))
    + b"\x01"
    + b"\x00\x00\x00\x00\x00\x00\x01\x02"
    + b"\x00\x00\x00\x00\x00\x00\x00\x03"
    + b"\x00\x06\x61\x7d\x26\x33\xd0\x00"
    + b"\x96"
    + b"\xa5ses-1"
    + b"\xb1thing-happened.v1"
    + b"\xd9\x20"
    + b"c" * 32
    + b"\xa2\xc3\xa9"
    + b"\xa6goal-1"
    + b"\xa7default"
    + b'{"a":1}'
)


def test_the_canonical_bytes_are_as_documented() -> None:
    assert canonical_bytes(PREVIOUS, ROW) == GOLDEN


def test_the_digest_is_the_leaf_hash_of_the_canonical_bytes() -> None:
    assert row_digest(PREVIOUS, ROW) == sha256(b"\x00" + GOLDEN).digest()


def test_a_row_that_is_placed_later_gets_the_same_digest() -> None:
    texts = (ROW.stream, ROW.tag, ROW.command_id, ROW.causation_id, ROW.correlation_id, ROW.tenant_id)
    tail = tail_bytes(texts, ROW.data)
    assert placed_digest(PREVIOUS, 258, 3, ROW.occurred_at_us, tail) == row_digest(PREVIOUS, ROW)


@dataclass
class Changed:
    field_name: str
    value: Any = field(repr=False)


@pytest.mark.parametrize(
    "changed",
    [
        Changed("position", 259),
        Changed("version", 4),
        Changed("occurred_at_us", 1_796_040_000_000_001),
        Changed("stream", "ses-2"),
        Changed("tag", "thing-happened.v2"),
        Changed("data", b'{"a":2}'),
        Changed("command_id", "d" * 32),
        Changed("causation_id", "e"),
        Changed("correlation_id", "goal-2"),
        Changed("tenant_id", "other"),
    ],
    ids=lambda changed: changed.field_name,
)
def test_no_field_can_change_unnoticed(changed: Changed) -> None:
    other = msgspec.structs.replace(ROW, **{changed.field_name: changed.value})
    assert row_digest(PREVIOUS, other) != row_digest(PREVIOUS, ROW)


def test_the_row_before_cannot_change_unnoticed() -> None:
    assert row_digest(NO_DIGEST, ROW) != row_digest(PREVIOUS, ROW)


def test_no_character_can_move_to_the_next_field() -> None:
    moved = msgspec.structs.replace(ROW, correlation_id="goal-", tenant_id="1default")
    assert row_digest(PREVIOUS, moved) != row_digest(PREVIOUS, ROW)
    into_data = msgspec.structs.replace(ROW, tenant_id="defaul", data=b't{"a":1}')
    assert row_digest(PREVIOUS, into_data) != row_digest(PREVIOUS, ROW)

"""Every release reads what every release has written: golden histories, folded through all aggregates and views."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from tests.support import golden
from torpor_contracts.registry import EVENTS
from torpor_eventlog.codec import decode_event

NAMES = golden.names()


def builtins_of(value: Any) -> Any:
    """As it would be read from a file."""
    return json.loads(json.dumps(value))


def as_far_as(read: Any, written: Any) -> Any:
    """What was read, without the fields that nobody had when it was written."""
    if isinstance(read, dict) and isinstance(written, dict):
        return {field: as_far_as(value, written[field]) for field, value in read.items() if field in written}
    if isinstance(read, list) and isinstance(written, list) and len(read) == len(written):
        return [as_far_as(*pair) for pair in zip(read, written, strict=True)]
    return read


def test_there_are_histories_and_each_says_what_is_expected() -> None:
    assert len(NAMES) >= 6
    assert {path.name.removesuffix(".expected.json") for path in golden.ROOM.glob("*.expected.json")} == set(NAMES)


def test_every_published_event_occurs_in_a_history() -> None:
    tags = {row.tag for name in NAMES for row in golden.read(name)}
    assert set(EVENTS) <= tags


@pytest.mark.parametrize("name", NAMES)
def test_a_history_is_whole(name: str) -> None:
    """Its rows are chained: a changed letter, or a change of the canonical bytes, shows here."""
    assert golden.broken_at(golden.read(name)) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_history_is_read_as_it_was_written(name: str) -> None:
    lines = (golden.ROOM / f"{name}.jsonl").read_text().splitlines()
    assert [golden.line_of(row) for row in golden.read(name)] == lines


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_history_is_lost_in_decoding(name: str) -> None:
    """Every field that was written is a field today, or goes through an upcast: none is silently passed over."""
    for row in golden.read(name):
        if row.tag in EVENTS:
            written = msgspec.json.decode(row.data)
            read = msgspec.to_builtins(decode_event(row))
            assert written == as_far_as(read, written), f"{name}, position {row.position}"


@pytest.mark.parametrize("name", NAMES)
def test_a_history_ends_where_it_ended(name: str) -> None:
    found = builtins_of(asyncio.run(golden.folded(golden.read(name))))
    wanted = golden.expected(name)
    assert found["head"] == wanted["head"]
    assert found["streams"] == wanted["streams"]
    assert found["views"] == wanted["views"]


def test_no_history_is_edited_or_removed() -> None:
    """A digest in `FROZEN` is never changed: what was written once must be read for ever."""
    assert golden.frozen() == {name: golden.digest_of(name) for name in NAMES}


def test_a_changed_letter_is_found() -> None:
    rows = golden.read(NAMES[0])
    third = msgspec.structs.replace(rows[2], data=rows[2].data[:-1] + b" }")
    assert golden.broken_at([*rows[:2], third, *rows[3:]]) == 3
    assert golden.broken_at([*rows[:2], *rows[3:]]) == 3
    assert golden.broken_at([*rows[:2], msgspec.structs.replace(rows[2], tag="x"), *rows[3:]]) == 3

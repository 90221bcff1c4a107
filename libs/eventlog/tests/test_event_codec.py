"""Decoding by tag: today's tags, old ones, later ones, and what is none."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import pytest

from torpor_contracts.errors import InvariantViolation, Poison
from torpor_contracts.registry import EVENTS
from torpor_eventlog.codec import PUBLISHED, EventCodec, Undecodable, UnknownTag, Upcast, decode_event, encode_event
from torpor_eventlog.port import Recorded


class LampLit(msgspec.Struct, frozen=True, kw_only=True, tag="lamp-lit.v3"):
    """An example event that has been published in three forms."""

    brightness_percent: int
    room: str = "hall"


def lift_v1(old: Mapping[str, Any]) -> dict[str, Any]:
    """v1 only knew whether the lamp was bright."""
    return {"brightness": 1.0 if old["bright"] else 0.5}


def lift_v2(old: Mapping[str, Any]) -> dict[str, Any]:
    """v2 kept the brightness as a fraction."""
    return {"brightness_percent": round(old["brightness"] * 100), "room": old.get("room", "hall")}


UPCASTS: Final = (
    Upcast(old_tag="lamp-lit.v1", new_tag="lamp-lit.v2", lift=lift_v1),
    Upcast(old_tag="lamp-lit.v2", new_tag="lamp-lit.v3", lift=lift_v2),
)


@pytest.fixture
def codec() -> EventCodec:
    return EventCodec({"lamp-lit.v3": LampLit}, UPCASTS)


def row(tag: str, data: bytes) -> Recorded:
    return Recorded(
        position=7,
        stream="lamp-1",
        version=1,
        tag=tag,
        data=data,
        occurred_at_us=0,
        command_id="cmd-1",
        causation_id="cmd-1",
        correlation_id="goal-1",
        tenant_id="default",
        digest=bytes(32),
    )


def test_todays_tag_decodes_to_its_type(codec: EventCodec) -> None:
    event = LampLit(brightness_percent=40, room="attic")
    made = codec.encode("lamp-1", event)
    assert (made.stream, made.tag) == ("lamp-1", "lamp-lit.v3")
    assert codec.decode(row(made.tag, made.data)) == event


@pytest.mark.parametrize(
    ("tag", "data", "event"),
    [
        ("lamp-lit.v1", b'{"type":"lamp-lit.v1","bright":false}', LampLit(brightness_percent=50)),
        ("lamp-lit.v2", b'{"type":"lamp-lit.v2","brightness":0.4}', LampLit(brightness_percent=40)),
        ("lamp-lit.v2", b'{"brightness":0.4,"room":"attic"}', LampLit(brightness_percent=40, room="attic")),
    ],
)
def test_old_tags_are_lifted_step_by_step(codec: EventCodec, tag: str, data: bytes, event: LampLit) -> None:
    assert codec.knows(tag)
    assert codec.decode(row(tag, data)) == event


def test_fields_of_a_later_release_are_ignored(codec: EventCodec) -> None:
    data = b'{"type":"lamp-lit.v3","brightness_percent":40,"colour":"red"}'
    assert codec.decode(row("lamp-lit.v3", data)) == LampLit(brightness_percent=40)


def test_an_unknown_tag_is_poison_and_says_where_it_stands(codec: EventCodec) -> None:
    with pytest.raises(UnknownTag) as unknown:
        codec.decode(row("lamp-lit.v4", b"{}"))
    assert (unknown.value.tag, unknown.value.position) == ("lamp-lit.v4", 7)
    assert isinstance(unknown.value, Poison)
    assert not codec.knows("lamp-lit.v4")


@pytest.mark.parametrize(
    ("tag", "data"),
    [
        ("lamp-lit.v3", b"no JSON"),
        ("lamp-lit.v3", b'{"type":"lamp-lit.v3"}'),
        ("lamp-lit.v3", b'{"type":"lamp-lit.v2","brightness_percent":1}'),
        ("lamp-lit.v3", b'{"type":"lamp-lit.v3","brightness_percent":"much"}'),
        ("lamp-lit.v3", b'{"type":"lamp-lit.v3","brightness_percent":1,"room":"\xff"}'),
        ("lamp-lit.v2", b"[]"),
        ("lamp-lit.v2", b'{"brightness":"much"}'),
        ("lamp-lit.v1", b"{}"),
    ],
)
def test_data_that_is_not_what_its_tag_says_is_poison(codec: EventCodec, tag: str, data: bytes) -> None:
    with pytest.raises(Undecodable) as undecodable:
        codec.decode(row(tag, data))
    assert (undecodable.value.tag, undecodable.value.position) == (tag, 7)


def test_only_published_events_are_encoded(codec: EventCodec) -> None:
    class LampBroken(msgspec.Struct, frozen=True, tag="lamp-broken.v1"):
        pass

    with pytest.raises(InvariantViolation, match="no published event"):
        codec.encode("lamp-1", LampBroken())


@pytest.mark.parametrize(
    "upcasts",
    [
        (Upcast(old_tag="lamp-lit.v3", new_tag="lamp-lit.v2", lift=lift_v1),),
        (UPCASTS[1], UPCASTS[1]),
        (UPCASTS[0],),
        (UPCASTS[0], Upcast(old_tag="lamp-lit.v2", new_tag="lamp-lit.v1", lift=lift_v1)),
    ],
    ids=["of today's tag", "twice", "to nowhere", "in a circle"],
)
def test_upcasts_that_lead_nowhere_are_refused_at_once(upcasts: tuple[Upcast, ...]) -> None:
    with pytest.raises(InvariantViolation):
        EventCodec({"lamp-lit.v3": LampLit}, upcasts)


def test_every_published_event_can_be_decoded() -> None:
    assert EVENTS
    assert all(PUBLISHED.knows(tag) for tag in EVENTS)
    assert decode_event.__self__ is PUBLISHED  # type: ignore[attr-defined]
    assert encode_event.__self__ is PUBLISHED  # type: ignore[attr-defined]

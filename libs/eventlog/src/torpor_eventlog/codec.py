"""Turns events into log rows and back: by tag, with old tags lifted to today's by pure functions; it never guesses."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from torpor_contracts.errors import InvariantViolation, Poison
from torpor_contracts.registry import EVENTS
from torpor_eventlog.port import NewEvent, Recorded


class UnknownTag(Poison):
    """No type of this release stands for the row's tag; a newer release wrote it, or nobody did."""

    def __init__(self, tag: str, position: int) -> None:
        super().__init__(
            f"position {position}: no event type is known for tag {tag!r}; run the release that wrote it, or newer"
        )
        self.tag = tag
        self.position = position


class Undecodable(Poison):
    """The row's data is not what its tag promises."""

    def __init__(self, tag: str, position: int, cause: str) -> None:
        super().__init__(f"position {position}: the data is no {tag!r}: {cause}")
        self.tag = tag
        self.position = position


class Upcast(msgspec.Struct, frozen=True, kw_only=True):
    """How the data of `old_tag` becomes data of `new_tag`: `lift` is pure and returns a new JSON object."""

    old_tag: str
    new_tag: str
    lift: Callable[[Mapping[str, Any]], dict[str, Any]]


class EventCodec:
    """Decodes rows to the types of `events`; rows with an old tag go through `upcasts`, one or several in a chain.

    Fields that a type does not know are ignored, and missing ones take their default, so that an older release reads
    what a newer one added.
    """

    def __init__(self, events: Mapping[str, type[msgspec.Struct]], upcasts: Iterable[Upcast] = ()) -> None:
        self._types = dict(events)
        self._decoders = {tag: msgspec.json.Decoder(kind, strict=False).decode for tag, kind in events.items()}
        self._upcasts: dict[str, Upcast] = {}
        for upcast in upcasts:
            if upcast.old_tag in self._types or upcast.old_tag in self._upcasts:
                raise InvariantViolation(f"tag {upcast.old_tag!r} would have two meanings")
            self._upcasts[upcast.old_tag] = upcast
        for tag in self._upcasts:
            self._check_chain(tag)

    def knows(self, tag: str) -> bool:
        """Whether rows with this tag can be decoded."""
        return tag in self._decoders or tag in self._upcasts

    def decode(self, recorded: Recorded) -> Any:
        """The row's event. Raises `UnknownTag` or `Undecodable`, which both are `Poison`."""
        decoder = self._decoders.get(recorded.tag)
        try:
            if decoder is not None:
                return decoder(recorded.data)
            if recorded.tag in self._upcasts:
                return self._lifted(recorded)
        except msgspec.MsgspecError as error:
            raise Undecodable(recorded.tag, recorded.position, str(error)) from error
        raise UnknownTag(recorded.tag, recorded.position)

    def encode(self, stream: str, event: msgspec.Struct) -> NewEvent:
        """The event as a row to append; only today's tags are written."""
        tag = event.__struct_config__.tag
        if self._types.get(str(tag)) is not type(event):
            raise InvariantViolation(f"{type(event).__name__} is no published event; add it to the registry")
        return NewEvent(stream=stream, tag=str(tag), data=msgspec.json.encode(event))

    def _lifted(self, recorded: Recorded) -> Any:
        tag, data = recorded.tag, msgspec.json.decode(recorded.data, type=dict[str, Any])
        try:
            while (upcast := self._upcasts.get(tag)) is not None:
                tag, data = upcast.new_tag, upcast.lift(data)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise Undecodable(recorded.tag, recorded.position, f"{tag!r} could not be lifted: {error!r}") from error
        data["type"] = tag
        return msgspec.convert(data, self._types[tag], strict=False)

    def _check_chain(self, tag: str) -> None:
        """Every chain must end at a type within as many steps as there are upcasts: no circle, no dead end."""
        end = tag
        for _ in self._upcasts:
            if end not in self._upcasts:
                break
            end = self._upcasts[end].new_tag
        if end not in self._types:
            raise InvariantViolation(f"the upcast of {tag!r} ends at {end!r}, which no event type stands for")


PUBLISHED: Final = EventCodec(EVENTS)
"""The codec of everything in `torpor_contracts.registry.EVENTS`."""

decode_event: Final = PUBLISHED.decode
encode_event: Final = PUBLISHED.encode

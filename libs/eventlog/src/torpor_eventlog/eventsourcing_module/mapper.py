"""Turns log rows into domain events: Torpor's own tags into their published types, all others as the library does."""

from functools import lru_cache
from typing import Any, Final, cast

import msgspec
from eventsourcing.domain import DomainEventProtocol, TAggregateID
from eventsourcing.persistence import Mapper, MapperDeserialisationError, StoredEvent

from torpor_contracts.errors import Poison
from torpor_eventlog.codec import PUBLISHED
from torpor_eventlog.port import Recorded

ORIGINATOR: Final = ("originator_id", "originator_version")


class EventMapper(Mapper[TAggregateID]):
    """A published event comes as an instance of its type in `torpor_contracts`, which also says whose it is.

    It has `originator_id` (the stream) and `originator_version` besides its own fields, so that a projection can
    be registered for the type and still knows the stream. Old tags are lifted to today's.
    """

    def to_domain_event(self, stored_event: StoredEvent) -> DomainEventProtocol[TAggregateID]:
        """The domain event; raises `MapperDeserialisationError` for data that is not what its tag promises."""
        if not PUBLISHED.knows(stored_event.topic):
            return super().to_domain_event(stored_event)
        try:
            event = PUBLISHED.decode(_as_row(stored_event))
        except Poison as error:
            raise MapperDeserialisationError(str(error)) from error
        fields = {field: getattr(event, field) for field in event.__struct_fields__}
        kind = _with_originator(cast("type[msgspec.Struct]", type(event)))
        named = kind(
            **fields, originator_id=stored_event.originator_id, originator_version=stored_event.originator_version
        )
        return cast("DomainEventProtocol[TAggregateID]", named)

    def to_stored_event(self, domain_event: DomainEventProtocol[TAggregateID]) -> StoredEvent:
        """The stored event; a published one gets its tag, and its data as every service writes it."""
        if not isinstance(domain_event, msgspec.Struct):
            return super().to_stored_event(domain_event)
        data = {"type": domain_event.__struct_config__.tag, **msgspec.to_builtins(domain_event)}
        for field in ORIGINATOR:
            data.pop(field)
        return StoredEvent(
            originator_id=domain_event.originator_id,
            originator_version=domain_event.originator_version,
            topic=str(data["type"]),
            state=msgspec.json.encode(data),
        )


@lru_cache(maxsize=512)
def _with_originator(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The published type with its originator; `kind` again for tags, so that `type` stays the same in the data."""
    return msgspec.defstruct(
        kind.__name__,
        [("originator_id", Any), ("originator_version", int)],
        bases=(kind,),
        frozen=True,
        kw_only=True,
        tag=kind.__struct_config__.tag,
        module=kind.__module__,
    )


def _as_row(stored: StoredEvent) -> Recorded:
    return Recorded(
        position=getattr(stored, "id", 0),
        stream=str(stored.originator_id),
        version=stored.originator_version,
        tag=stored.topic,
        data=stored.state,
        occurred_at_us=0,
        command_id="",
        causation_id="",
        correlation_id="",
        tenant_id="",
        digest=b"",
    )

"""Events as the SDK hands them out."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Final

import msgspec

from torpor.client.connection import Connection
from torpor.client.models import Event
from torpor.client.stored import read_stream
from torpor_contracts.registry import EVENTS as KNOWN
from torpor_eventlog.instants import from_us
from torpor_messaging.envelope import decode_event_message, id_as_sent

STREAM: Final = "EVENTS"


def session_subject(tenant: str, session_id: str) -> str:
    """The filter for every event of one session."""
    return f"evt.{tenant}.*.{session_id}"


def to_event(headers: Mapping[str, str], data: bytes) -> Event:
    """A message of `EVENTS` as an event; `Poison` when it is none."""
    recorded = decode_event_message(headers, data)
    kind = KNOWN.get(recorded.tag)
    body: msgspec.Struct | None = None
    if kind is not None:
        try:
            body = msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError:
            body = None  # of a later version than this client: its data is still there to read
    return Event(
        position=recorded.position,
        stream=recorded.stream,
        version=recorded.version,
        type=recorded.tag,
        occurred_at=from_us(recorded.occurred_at_us),
        tenant_id=recorded.tenant_id,
        command_id=id_as_sent(recorded.tenant_id, recorded.command_id),
        causation_id=recorded.causation_id,
        correlation_id=recorded.correlation_id,
        digest=recorded.digest.hex(),
        data=json.loads(data),
        body=body,
    )


async def read_events(
    connection: Connection, subject: str, from_position: int = 1, *, follow: bool = False
) -> AsyncGenerator[Event, None]:
    """Events on `subject` from a position on; ends with the last one now, or never when `follow`."""
    stored = read_stream(connection, STREAM, subject, from_position, follow=follow)
    async with aclosing(stored) as messages:
        async for message in messages:
            yield to_event(message.headers, message.data)

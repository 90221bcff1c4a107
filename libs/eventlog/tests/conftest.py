"""Controls of the event log's specs: what a log is filled with, and how asynchronous tests run."""

from collections.abc import Awaitable, Callable
from hashlib import sha256
from itertools import count

import msgspec
import pytest

from torpor_contracts.ids import CommandId, TenantId
from torpor_eventlog.codec import encode_event
from torpor_eventlog.port import Commit, EventLog, NewEvent

Grow = Callable[..., Awaitable[None]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def grow() -> Grow:
    """Append events, one command each: `grow(log, "host-a", event, event, …)`; an event may also be a raw row."""
    numbers = count(1)

    async def append(log: EventLog, stream: str, *events: msgspec.Struct) -> None:
        for event in events:
            number = next(numbers)
            await log.append(
                Commit(
                    command_id=CommandId(f"command-{number}"),
                    tenant_id=TenantId("default"),
                    causation_id=f"command-{number}",
                    correlation_id="goal-1",
                    request_digest=sha256(str(number).encode()).digest(),
                    occurred_at_us=1_700_000_000_000_000 + number,
                    expected={stream: len(await log.load(stream))},
                    events=[event if isinstance(event, NewEvent) else encode_event(stream, event)],
                )
            )

    return append

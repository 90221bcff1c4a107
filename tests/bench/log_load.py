"""What the log's benchmarks append: sessions of twenty events, by many writers at once, made before the clock runs."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from itertools import count
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from torpor_contracts.ids import CommandId, ExecId, HostId, SessionId, TenantId, VmId
from torpor_contracts.session import ExecStarted, MachineSpec, RetryRule, SessionRequested, SessionStarted
from torpor_eventlog.codec import encode_event
from torpor_eventlog.port import Commit, NewEvent

Item = TypeVar("Item")

WRITERS: Final = 256
EVENTS_OF_A_SESSION: Final = 20

BareRow = tuple[str, int, str, bytes, int, str, str, str, str, bytes, bytes]
"""The bytes that the log keeps of an event: stream, version, tag, data, time, four ids, and two digests' worth."""

_NOW: Final = datetime(2026, 11, 30, 12, 0, 0, 123_456, tzinfo=UTC)
_NUMBERS: Final = count()


class Driven(NamedTuple):
    """How fast a load went: events a second, and each append's latency in milliseconds."""

    rate: float
    latencies_ms: list[float]


def commits(per_writer: int) -> list[list[Commit]]:
    """`per_writer` commits of one event for each writer; every stream is written by one writer, from its beginning.

    They are made in the order they will be appended, for identifiers made later sort later.
    """
    writers = [_sessions_of_a_writer(per_writer) for _ in range(WRITERS)]
    rounds = [[next(writer) for writer in writers] for _ in range(per_writer)]
    return [list(of_one_writer) for of_one_writer in zip(*rounds, strict=True)]


def bare_rows(load: Sequence[Sequence[Commit]]) -> list[list[BareRow]]:
    """The same load for a table that only stores it; what stands for the row's own digest is never computed."""
    return [
        [
            (
                event.stream,
                commit.expected[event.stream] + 1,
                event.tag,
                event.data,
                commit.occurred_at_us,
                commit.command_id,
                commit.causation_id,
                commit.correlation_id,
                commit.tenant_id,
                commit.request_digest,
                commit.request_digest,
            )
            for commit in writer
            for event in commit.events
        ]
        for writer in load
    ]


async def drive(append: Callable[[Item], Awaitable[Any]], load: Sequence[Sequence[Item]]) -> Driven:
    """Append every writer's items one after the other, all writers at once."""
    latencies_ms: list[float] = []

    async def write(items: Sequence[Item]) -> None:
        for item in items:
            began_s = time.perf_counter()
            await append(item)
            latencies_ms.append((time.perf_counter() - began_s) * 1000)

    gc.collect()
    gc.freeze()  # the load itself is not what is measured
    began_s = time.perf_counter()
    await asyncio.gather(*(write(items) for items in load))
    took_s = time.perf_counter() - began_s
    gc.unfreeze()
    return Driven(len(latencies_ms) / took_s, latencies_ms)


def _sessions_of_a_writer(events: int) -> Iterator[Commit]:
    session = SessionId("")
    for at in range(events):
        version = at % EVENTS_OF_A_SESSION
        if version == 0:
            session = SessionId(_identifier("ses"))
        command = _identifier("cmd")
        yield Commit(
            command_id=CommandId(command),
            tenant_id=TenantId("default"),
            causation_id=command,
            correlation_id=_identifier("goal"),
            request_digest=sha256(command.encode()).digest(),
            occurred_at_us=1_700_000_000_000_000 + at,
            expected={session: version},
            events=[_event(session, version)],
        )


def _event(session: SessionId, version: int) -> NewEvent:
    event: msgspec.Struct
    if version == 0:
        event = SessionRequested(
            session_id=session,
            tenant_id=TenantId("default"),
            machine=MachineSpec(),
            idle_after_s=300.0,
            start_retry=RetryRule(),
            metadata={"purpose": "benchmark"},
            requested_at=_NOW,
        )
    elif version == 1:
        event = SessionStarted(vm_id=VmId(_identifier("vm")), host_id=HostId("host-1"), incarnation=1, observed_at=_NOW)
    else:
        event = ExecStarted(exec_id=ExecId(_identifier("exec")), incarnation=1, observed_at=_NOW)
    return encode_event(session, event)


def _identifier(prefix: str) -> str:
    """As long as a UUIDv7 behind a prefix, and like it in that later ones sort later."""
    number = next(_NUMBERS)
    scrambled = number * 0x9E3779B97F4A7C15 & 0xFFFF_FFFF_FFFF_FFFF
    return f"{prefix}-0193{number // 64:08x}7{scrambled:019x}"

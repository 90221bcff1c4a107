"""What a service is made of, without a word about how messages reach it: the edge and the simulation both run this."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from torpor_contracts.ids import CommandId, TenantId
from torpor_contracts.replies import Receipt
from torpor_eventlog.port import Recorded
from torpor_eventlog.views_port import Projection


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded command with its envelope; `target` is the rest of its subject.

    `command_id` is the sender's, made unique among tenants: `<tenant>/<id as sent>`. `request_digest` is the SHA-256 of
    subject, type and payload.
    """

    tenant_id: TenantId
    service: str
    target: str
    command: Any
    command_id: CommandId
    causation_id: str
    correlation_id: str
    request_digest: bytes
    attempt: int


@dataclass(frozen=True)
class CommandRoute:
    """Commands of `service` whose target matches `target_filter` (`*`, or `<host id>.*`), handled in order per target.

    `ack_wait_s`: silence after which a command is delivered again; a handler that works longer is kept alive.
    """

    service: str
    durable: str
    handle: Callable[[Incoming], Awaitable[Receipt | None]]
    target_filter: str = "*"
    ack_wait_s: float = 5.0
    deliveries_max: int = 20
    parallel_max: int = 256


@dataclass(frozen=True)
class TimerRoute:
    """Timers of `service` that are due: (tenant, kind, target, data)."""

    service: str
    durable: str
    handle: Callable[[TenantId, str, str, bytes], Awaitable[None]]


@dataclass(frozen=True)
class ObservationRoute:
    """Messages on a core subject that nobody stores, such as heartbeats."""

    subject: str
    handle: Callable[[str, bytes], Awaitable[None]]


@dataclass(frozen=True)
class QueryRoute:
    """Reads: (tenant, target, parameters) -> a Struct to answer with; raises `Rejected` to refuse."""

    service: str
    type: str
    handle: Callable[[TenantId, str, Mapping[str, Any]], Awaitable[msgspec.Struct]]


@dataclass(frozen=True)
class GuestRoute:
    """What is asked of the machines of one host: (tenant, type, session, message) -> the answer's message.

    See `torpor_contracts.guest`; raises `Rejected` or `Transient` to refuse.
    """

    host_id: str
    handle: Callable[[TenantId, str, str, bytes], Awaitable[bytes]]


@dataclass(frozen=True)
class ReactorRoute:
    """Reacts to events of these types, in order per stream, at least once; its commands carry deterministic ids."""

    name: str
    reacts_to: tuple[type[msgspec.Struct], ...]
    react: Callable[[Any, Recorded], Awaitable[None]]


@dataclass(frozen=True)
class BackgroundRoute:
    """A loop of the service's own, such as a sweeper or a heartbeat: every `every_s`, first after `first_s`.

    While it fails the pauses grow up to `pause_s_max`.
    """

    name: str
    every_s: float
    run: Callable[[], Awaitable[None]]
    first_s: float = 0.0
    pause_s_max: float = 30.0


@dataclass(frozen=True)
class Service:
    """A whole service, ready to be run by an edge. `start` runs before any route, `stop` after the last."""

    name: str
    commands: Sequence[CommandRoute] = ()
    timers: Sequence[TimerRoute] = ()
    observations: Sequence[ObservationRoute] = ()
    queries: Sequence[QueryRoute] = ()
    guests: Sequence[GuestRoute] = ()
    projections: Sequence[Projection] = ()
    reactors: Sequence[ReactorRoute] = ()
    background: Sequence[BackgroundRoute] = ()
    start: Callable[[], Awaitable[None]] | None = None
    stop: Callable[[], Awaitable[None]] | None = None

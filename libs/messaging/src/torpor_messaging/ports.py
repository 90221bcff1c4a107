"""What messaging needs from a bus; real NATS and the simulation's bus both satisfy it."""

from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

import msgspec

from torpor_contracts.ids import CommandId, TenantId


class Clock(Protocol):
    """Time, as a port: the simulation's is virtual."""

    def now(self) -> datetime:
        """The present moment, UTC, with a time zone."""
        ...

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start that never run backwards."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class Ids(Protocol):
    """Identifiers and randomness, as a port: the simulation's are seeded."""

    def new(self, prefix: str) -> str:
        """`<prefix>-<UUIDv7 as 32 hex digits>`."""
        ...

    def random(self) -> float:
        """A number in [0, 1), for jitter."""
        ...


class OutgoingCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command to publish. `target` is the rest of the subject: one token, or `<host id>.<vm id>` for the vm-host."""

    tenant_id: TenantId
    service: str
    target: str
    command: msgspec.Struct
    command_id: CommandId
    causation_id: str = ""
    correlation_id: str = ""


class Delivery(Protocol):
    """One message as the bus handed it over; exactly one of ack, ack_confirmed, nak and term ends it."""

    subject: str
    headers: Mapping[str, str]
    data: bytes
    sequence: int
    """Sequence in its stream."""
    attempt: int
    """1 for the first delivery."""

    async def ack(self) -> None:
        """Handled: do not deliver again."""
        ...

    async def ack_confirmed(self) -> None:
        """Handled, and the server knows: it is never delivered again. `Transient` when the server does not say so."""
        ...

    async def nak(self, delay_s: float) -> None:
        """Not handled: deliver again after `delay_s`."""
        ...

    async def term(self, reason: str) -> None:
        """Never deliver again."""
        ...

    async def in_progress(self) -> None:
        """Still being handled: start the acknowledgement wait afresh."""
        ...


class Bus(Protocol):
    """Sends messages."""

    async def send(self, command: OutgoingCommand) -> None:
        """Publish a command durably to `COMMANDS`; raises `Transient` when that cannot be done now."""
        ...

    async def call(self, command: OutgoingCommand, timeout_s: float) -> bytes:
        """Publish a command and wait for its `Reply` (`torpor_contracts.replies`) as JSON; `Transient` on time-out."""
        ...

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Publish on a subject that no stream of ours needs to have stored (replies, observations, hints)."""
        ...

    async def publish_stored(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Publish on a stream's subject (`out.`, `dead.`, `timer.`) and wait until it is stored."""
        ...

    async def query(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """Ask on a `qry.` subject and wait for the answer; `Transient` on time-out or when nobody answers."""
        ...


class Timers(Protocol):
    """Durable timers; derived from events, so losing all of them loses nothing (the sweeper fires what is overdue)."""

    async def set(  # noqa: PLR0917  (the parts of the timer's subject in their order, then what it carries)
        self, tenant_id: TenantId, service: str, kind: str, target: str, due_at: datetime, data: bytes
    ) -> None:
        """Deliver `data` to `service` at `due_at`, never earlier; replaces the timer of the same kind and target."""
        ...

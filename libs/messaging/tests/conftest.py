"""Controls of messaging's specs: a delivery that remembers its end, a bus that remembers what was published."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import pytest

from torpor_contracts.errors import Transient
from torpor_contracts.replies import Reply
from torpor_messaging.envelope import encode_command
from torpor_messaging.ports import OutgoingCommand
from torpor_messaging.system import SystemClock

SUBJECT = "cmd.default.scheduler.suspend-session.ses-1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(eq=False)
class HeldDelivery:
    """A delivery whose end can be looked at. `away` makes the server unreachable for its end."""

    subject: str = SUBJECT
    headers: Mapping[str, str] = field(default_factory=dict)
    data: bytes = b""
    sequence: int = 7
    attempt: int = 1
    away: bool = False
    ends: list[tuple[str, object]] = field(default_factory=list)
    kept_alive: int = 0

    async def ack(self) -> None:
        self._end("ack", None)

    async def ack_confirmed(self) -> None:
        self._end("ack-confirmed", None)

    async def nak(self, delay_s: float) -> None:
        self._end("nak", delay_s)

    async def term(self, reason: str) -> None:
        self._end("term", reason)

    async def in_progress(self) -> None:
        self.kept_alive += 1

    @property
    def end(self) -> str | None:
        assert len(self.ends) <= 1, f"ended more than once: {self.ends}"
        return self.ends[0][0] if self.ends else None

    def _end(self, how: str, what: object) -> None:
        if self.away:
            raise Transient("the server is away")
        self.ends.append((how, what))


@dataclass
class RememberingBus:
    """A bus that stores nothing anywhere else. `full` makes stored publications impossible, `mute` all others."""

    published: list[tuple[str, bytes]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    stored: list[tuple[str, bytes, Mapping[str, str]]] = field(default_factory=list)
    full: bool = False
    mute: bool = False

    async def send(self, command: OutgoingCommand) -> None:
        message = encode_command(command, "test", SystemClock().now())
        await self.publish_stored(message.subject, message.data, message.headers)

    async def call(self, command: OutgoingCommand, timeout_s: float) -> bytes:
        await self.send(command)
        raise Transient(f"nobody answered within {timeout_s} s")

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        if self.mute:
            raise Transient("the server is away")
        self.published.append((subject, data))
        self.headers.append(headers or {})

    async def publish_stored(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        if self.full:
            raise Transient("the stream is full")
        self.stored.append((subject, data, headers or {}))

    async def query(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        self.asked.append((subject, data))
        raise Transient(f"nobody answered {subject} within {timeout_s} s")

    def reply(self, subject: str) -> Reply:
        [data] = [data for to, data in self.published if to == subject]
        return msgspec.json.decode(data, type=Reply)


@pytest.fixture
def delivered() -> Callable[..., HeldDelivery]:
    """Make a delivery: `delivered(data=…, headers=…, attempt=…)`."""
    return HeldDelivery


@pytest.fixture
def bus() -> RememberingBus:
    return RememberingBus()

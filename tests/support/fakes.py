"""Hand-written stand-ins for the outside of a service: a clock that only moves when told, a bus that remembers."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from tests.support.histories import NOON
from torpor_contracts.errors import Transient
from torpor_contracts.ids import TenantId
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.views_memory import MemoryViewStore
from torpor_messaging.ports import OutgoingCommand
from torpor_messaging.service_ports import ServicePorts


class SettableClock:
    """Time as a test sets it; a sleep returns at once and lets the time pass."""

    def __init__(self, start: datetime = NOON) -> None:
        self._start = start
        self.time = start

    def now(self) -> datetime:
        return self.time

    def monotonic_s(self) -> float:
        return (self.time - self._start).total_seconds()

    def pass_by(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.time += timedelta(seconds=seconds)

    async def sleep(self, seconds: float) -> None:
        self.pass_by(seconds)


class CountingIds:
    """Identifiers in order: `<prefix>-1`, `<prefix>-2`."""

    def __init__(self) -> None:
        self._made = 0

    def new(self, prefix: str) -> str:
        self._made += 1
        return f"{prefix}-{self._made}"

    def random(self) -> float:
        return 0.5


class Published(NamedTuple):
    """A message as it left the service."""

    subject: str
    data: bytes
    headers: dict[str, str]


class RememberingBus:
    """Keeps what was sent; while `away`, it sends nothing."""

    def __init__(self) -> None:
        self.sent: list[OutgoingCommand] = []
        self.published: list[Published] = []
        self.asked: list[Published] = []
        self.away = False

    async def send(self, command: OutgoingCommand) -> None:
        self._check()
        self.sent.append(command)

    async def call(self, command: OutgoingCommand, timeout_s: float) -> bytes:
        await self.send(command)
        raise Transient(f"nobody answered within {timeout_s} s")

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._check()
        self.published.append(Published(subject, data, dict(headers or {})))

    async def publish_stored(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        await self.publish(subject, data, headers)

    async def query(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        self.asked.append(Published(subject, data, {}))
        raise Transient(f"nobody answered {subject} within {timeout_s} s")

    def _check(self) -> None:
        if self.away:
            raise Transient("the bus is away")


class RememberingTimers:
    """Keeps the timers that were set."""

    def __init__(self) -> None:
        self.due: dict[tuple[str, str, str, str], tuple[datetime, bytes]] = {}

    async def set(  # noqa: PLR0917  (the port's signature)
        self, tenant_id: TenantId, service: str, kind: str, target: str, due_at: datetime, data: bytes
    ) -> None:
        self.due[tenant_id, service, kind, target] = due_at, data


class Outside:
    """Everything a service is built on, in memory."""

    def __init__(self, log: MemoryLog | None = None) -> None:
        self.log = log or MemoryLog()
        self.views = MemoryViewStore()
        self.bus = RememberingBus()
        self.timers = RememberingTimers()
        self.clock = SettableClock()
        self.ids = CountingIds()

    def ports(self) -> ServicePorts:
        """The bundle that `build` takes."""
        return ServicePorts(
            log=self.log, views=self.views, bus=self.bus, timers=self.timers, clock=self.clock, ids=self.ids
        )

"""Durable timers on JetStream message schedules, and the sweeper that fires what they missed.

Timers are derived from events: each handler knows by a generation whether a timer is stale, so a timer is never
cancelled, may fire twice, and may be lost without harm. It never fires early.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from torpor_contracts.errors import Transient
from torpor_contracts.ids import TenantId
from torpor_messaging import subjects
from torpor_messaging.ports import Bus, Clock
from torpor_messaging.service import BackgroundRoute

SCHEDULE: Final = "Nats-Schedule"
SCHEDULE_TARGET: Final = "Nats-Schedule-Target"

_log: Final = logging.getLogger(__name__)


class NatsTimers:
    """`torpor_messaging.ports.Timers`: a scheduled message per tenant, service, kind and target."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def set(  # noqa: PLR0917  (see the port)
        self, tenant_id: TenantId, service: str, kind: str, target: str, due_at: datetime, data: bytes
    ) -> None:
        """See `Timers.set`."""
        await self._bus.publish_stored(
            subjects.timer_set(tenant_id, service, kind, target),
            data,
            {
                SCHEDULE: f"@at {due_at.astimezone(UTC).isoformat(timespec='microseconds').replace('+00:00', 'Z')}",
                SCHEDULE_TARGET: subjects.timer_due(tenant_id, service, kind, target),
            },
        )


class Overdue(NamedTuple):
    """A timer that a view says is due."""

    tenant_id: TenantId
    kind: str
    target: str
    data: bytes


def sweeper(
    name: str,
    overdue: Callable[[datetime], Awaitable[Sequence[Overdue]]],
    fire: Callable[[TenantId, str, str, bytes], Awaitable[None]],
    clock: Clock,
    *,
    every_s: float = 5.0,
) -> BackgroundRoute:
    """The backstop of a service's timers: reads from its view what is overdue now, and fires that with `fire`.

    `fire` is the handler of the service's `TimerRoute`. `overdue` bounds how many it returns; the rest comes next time.
    """

    async def sweep() -> None:
        for timer in await overdue(clock.now()):
            try:
                await fire(timer.tenant_id, timer.kind, timer.target, timer.data)
            except Transient as error:
                _log.warning("%s: timer %s of %s is not fired yet: %s", name, timer.kind, timer.target, error)

    return BackgroundRoute(name=name, every_s=every_s, run=sweep)

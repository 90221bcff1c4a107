from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from torpor_contracts.errors import Poison, Transient
from torpor_contracts.ids import TenantId
from torpor_messaging.system import SystemClock
from torpor_messaging.timers import NatsTimers, Overdue, sweeper

pytestmark = pytest.mark.anyio
TENANT = TenantId("default")


async def test_a_timer_is_a_scheduled_message(bus: Any) -> None:
    due_at = datetime(2026, 1, 1, 13, 0, 0, 123456, tzinfo=timezone(timedelta(hours=1)))
    await NatsTimers(bus).set(TENANT, "scheduler", "idle", "ses-1", due_at, b"7")
    [(subject, data, headers)] = bus.stored
    assert (subject, data) == ("timer.set.default.scheduler.idle.ses-1", b"7")
    assert headers == {
        "Nats-Schedule": "@at 2026-01-01T12:00:00.123456Z",
        "Nats-Schedule-Target": "timer.due.default.scheduler.idle.ses-1",
    }


async def test_what_cannot_be_set_now_is_transient(bus: Any) -> None:
    bus.full = True
    with pytest.raises(Transient):
        await NatsTimers(bus).set(TENANT, "scheduler", "idle", "ses-1", datetime.now(UTC), b"")


async def test_the_sweeper_fires_what_is_overdue_and_puts_off_what_fails() -> None:
    fired: list[str] = []
    asked: list[datetime] = []

    async def overdue(now: datetime) -> list[Overdue]:
        asked.append(now)
        return [Overdue(TENANT, "idle", f"ses-{number}", b"") for number in range(3)]

    async def fire(tenant_id: TenantId, kind: str, target: str, data: bytes) -> None:
        if target == "ses-1":
            raise Transient("away")
        fired.append(f"{tenant_id} {kind} {target} {data!r}")

    route = sweeper("sweep", overdue, fire, SystemClock(), every_s=3.0)
    assert (route.name, route.every_s) == ("sweep", 3.0)
    await route.run()
    assert fired == ["default idle ses-0 b''", "default idle ses-2 b''"]
    assert abs(asked[0] - datetime.now(UTC)) < timedelta(minutes=1)


async def test_a_sweep_says_what_it_can_never_fire() -> None:
    async def overdue(_: datetime) -> list[Overdue]:
        return [Overdue(TENANT, "no-such-kind", "ses-1", b"")]

    async def fire(*_: Any) -> None:
        raise Poison("no such kind")

    with pytest.raises(Poison):
        await sweeper("sweep", overdue, fire, SystemClock()).run()

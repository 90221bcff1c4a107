"""The usage query: given these events, asked by this tenant, then this answer."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from decimal import Decimal

import msgspec
import pytest

from tests.support.fakes import Outside
from tests.support.histories import (
    Machine,
    append,
    at,
    checkpoint_freed,
    checkpoint_recorded,
    fold_into,
    session_over,
    stream_of,
    written,
)
from torpor_billing.assembly import build
from torpor_billing.domain.rates import LIST_PRICES
from torpor_billing.settings import BillingSettings
from torpor_contracts.errors import Rejected
from torpor_contracts.ids import SYSTEM_TENANT, SessionId, TenantId, VmId
from torpor_contracts.usage import UsageAnswer

FIRST = Machine()
ACME = TenantId("acme")

Ask = Callable[..., Awaitable[UsageAnswer]]
Given = msgspec.Struct | tuple[str, msgspec.Struct]


def asked(
    check: Callable[[Ask], Awaitable[None]], *events: Given, now: float = 100, settings: BillingSettings | None = None
) -> None:
    async def main() -> None:
        outside = Outside(await written(*events))
        outside.clock.time = at(now)
        service = build(settings or BillingSettings(rate_cards=None), outside.ports())
        for projection in service.projections:
            await fold_into(outside.views, projection, outside.log)
        (route,) = service.queries

        async def ask(target: str = "-", tenant: TenantId = ACME, **parameters: object) -> UsageAnswer:
            answer = await route.handle(tenant, target, parameters)
            assert isinstance(answer, UsageAnswer)
            return answer

        await check(ask)

    asyncio.run(main())


def test_a_line_cites_the_positions_it_can_be_recomputed_from() -> None:
    async def check(ask: Ask) -> None:
        answer = await ask("s-1")
        (line,) = answer.lines
        assert (line.opened_position, line.closed_position, line.closed_cause) == (2, 3, "vm-suspended")
        assert (line.charged_from, line.charged_until) == (at(2), at(62))
        assert (line.seconds, line.vcpu_seconds, line.gib_seconds) == (Decimal(60), Decimal(60), Decimal(15))
        by_hand = 60 * LIST_PRICES.vcpu_second + 15 * LIST_PRICES.gib_second
        assert line.amount == answer.totals.amount == by_hand == Decimal("0.0009075")
        assert (answer.position, answer.as_of, answer.currency, answer.next) == (3, at(100), "USD", None)

    asked(check, FIRST.claimed(0), FIRST.started(2), FIRST.suspended(62))


def test_the_total_is_the_sum_of_the_lines() -> None:
    async def check(ask: Ask) -> None:
        answer = await ask()
        assert [line.kind for line in answer.lines] == ["running", "stored", "running"]
        assert answer.totals.amount == sum(line.amount for line in answer.lines)
        assert answer.totals.running_seconds == 10 + 40
        assert answer.totals.gib_months == answer.lines[1].gib_months > 0

    second = replace(FIRST, vm_id=VmId("vm-0"), incarnation=2)
    asked(check, FIRST.started(0), checkpoint_recorded(9, 2**40), FIRST.suspended(10), second.started(60))


def test_a_sleeping_session_costs_storage_alone() -> None:
    async def check(ask: Ask) -> None:
        stored, running = sorted((await ask("s-1")).lines, key=lambda line: line.kind, reverse=True)
        assert (stored.kind, stored.seconds, stored.closed_at) == ("stored", Decimal(1000), None)
        assert (running.seconds, running.charged_until) == (Decimal(10), at(10))

    asked(check, FIRST.started(0), checkpoint_recorded(10, 2**30), FIRST.suspended(10), now=1010)


def test_freed_storage_costs_no_more() -> None:
    async def check(ask: Ask) -> None:
        (line,) = (await ask()).lines
        assert (line.seconds, line.closed_cause) == (Decimal(50), "freed")

    asked(check, checkpoint_recorded(0, 1), checkpoint_freed(50), now=9000)


def test_a_tenant_sees_its_own_usage_alone() -> None:
    async def check(ask: Ask) -> None:
        assert (await ask("s-1", TenantId("other"))).lines == []
        assert (await ask("-", TenantId("other"))).lines == []
        assert (await ask("-", SYSTEM_TENANT)).lines == []
        assert len((await ask("s-1")).lines) == 1

    asked(check, FIRST.started(0))


def test_a_session_nobody_knows_has_used_nothing() -> None:
    async def check(ask: Ask) -> None:
        answer = await ask("s-unknown")
        assert answer.lines == []
        assert answer.totals.amount == 0
        assert answer.session_id == "s-unknown"

    asked(check, FIRST.started(0))


def test_pages_hold_every_meter_once() -> None:
    many = [replace(FIRST, vm_id=VmId(f"vm-{n}"), session_id=SessionId(f"s-{n}")) for n in range(25)]

    async def check(ask: Ask) -> None:
        seen: list[str] = []
        after: str | None = None
        for _ in range(4):
            answer = await ask(limit=10, after=after)
            seen += [line.meter_id for line in answer.lines]
            after = answer.next
            if after is None:
                break
        assert sorted(seen) == sorted(machine.vm_id for machine in many)
        assert after is None

    asked(check, *(machine.started(0) for machine in many))


@pytest.mark.parametrize("parameters", [{"limit": 0}, {"limit": 501}, {"limit": "x"}, {"since": 1}, {"after": 5}])
def test_parameters_it_cannot_take_are_refused(parameters: dict[str, object]) -> None:
    async def check(ask: Ask) -> None:
        with pytest.raises(Rejected) as refused:
            await ask(**parameters)
        assert refused.value.code == "illegal-query"
        assert refused.value.advice

    asked(check, FIRST.started(0))


def test_an_open_meter_without_a_session_is_an_alarm() -> None:
    async def check(ask: Ask) -> None:
        answer = await ask("s-1")
        (alarm,) = answer.alarms
        assert (alarm.meter_id, alarm.cause, alarm.since) == ("vm-1", "session-terminated", at(30))
        assert (alarm.opened_position, alarm.evidence_position, alarm.host_id) == (2, 3, "host-a")
        assert alarm.advice
        assert answer.lines[0].charged_until == at(30)
        assert (await ask("-", SYSTEM_TENANT)).alarms == [alarm]
        assert (await ask("-", TenantId("other"))).alarms == []

    asked(check, ("s-1", FIRST.asked_for(0)), FIRST.started(1), ("s-1", session_over(30)), now=5000)


def test_an_answer_follows_the_log() -> None:
    async def main() -> None:
        outside = Outside(await written(FIRST.started(0)))
        outside.clock.time = at(50)
        service = build(BillingSettings(rate_cards=None), outside.ports())
        (projection,), (route,) = service.projections, service.queries
        await fold_into(outside.views, projection, outside.log)
        event = FIRST.stopped(20)
        await append(outside.log, event, stream_of(event))
        before = await route.handle(ACME, "-", {})
        await fold_into(outside.views, projection, outside.log)
        after = await route.handle(ACME, "-", {})
        assert isinstance(before, UsageAnswer)
        assert isinstance(after, UsageAnswer)
        assert [(answer.position, answer.lines[0].seconds) for answer in (before, after)] == [
            (1, Decimal(50)),
            (2, Decimal(20)),
        ]

    asyncio.run(main())

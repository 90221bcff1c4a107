"""Prices: given a meter and rate cards, then these charges, to the last place."""

from decimal import Decimal
from random import Random

import msgspec
import pytest

from tests.support.histories import at
from torpor_billing.domain.meters import Meter
from torpor_billing.domain.rates import LIST_PRICES, US_PER_S, RateCard, charges, checked
from torpor_billing.settings import BillingSettings
from torpor_contracts.ids import HostId, SessionId, TenantId, VmId
from torpor_eventlog.instants import to_us

MONTH_S = 730 * 3600
GIB = 2**30
FROM = to_us(at(0))


def running(seconds: float, vcpus: int = 1, memory_mib: int = 1024) -> Meter:
    return Meter(
        meter_id="vm-1",
        kind="running",
        tenant_id=TenantId("acme"),
        session_id=SessionId("s-1"),
        incarnation=1,
        vm_id=VmId("vm-1"),
        host_id=HostId("host-a"),
        vcpus=vcpus,
        memory_mib=memory_mib,
        stored_bytes=0,
        opened_us=FROM,
        opened_position=1,
        closed_us=FROM + round(seconds * US_PER_S),
        closed_position=2,
        closed_cause="vm-stopped",
    )


def stored(seconds: float, stored_bytes: int) -> Meter:
    meter = running(seconds, vcpus=0, memory_mib=0)
    return msgspec.structs.replace(meter, kind="stored", vm_id=None, host_id=None, stored_bytes=stored_bytes)


def dearer(since: float) -> RateCard:
    return RateCard(
        version="list-2",
        valid_from_us=to_us(at(since)),
        vcpu_second=LIST_PRICES.vcpu_second * 2,
        gib_second=LIST_PRICES.gib_second * 2,
        stored_gib_month=LIST_PRICES.stored_gib_month * 2,
    )


def amounts(meter: Meter, *cards: RateCard, now: float = 10**9) -> list[tuple[str, Decimal]]:
    return [(charge.rate_card, charge.amount) for charge in charges(meter, cards or (LIST_PRICES,), to_us(at(now)))]


def test_a_second_of_one_vcpu_and_one_gib_costs_the_two_list_prices() -> None:
    assert amounts(running(1)) == [("list-1", Decimal("0.0000185"))]


def test_an_hour_of_two_vcpus_and_512_mib() -> None:
    (charge,) = charges(running(3600, vcpus=2, memory_mib=512), (LIST_PRICES,), to_us(at(10**6)))
    assert (charge.seconds, charge.vcpu_seconds, charge.gib_seconds) == (Decimal(3600), Decimal(7200), Decimal(1800))
    assert charge.amount == Decimal("0.1089")


def test_a_gib_stored_for_a_month_costs_the_monthly_price() -> None:
    (charge,) = charges(stored(MONTH_S, GIB), (LIST_PRICES,), to_us(at(10**9)))
    assert (charge.gib_months, charge.amount) == (Decimal(1), Decimal("0.08"))
    assert charge.vcpu_seconds == charge.gib_seconds == 0


def test_half_of_the_last_place_is_rounded_to_even() -> None:
    card = RateCard(
        version="x", vcpu_second=Decimal("0.0000000005"), gib_second=Decimal(0), stored_gib_month=Decimal(0)
    )
    assert amounts(running(1), card)[0][1] == 0
    assert amounts(running(3), card)[0][1] == Decimal("0.000000002")


def test_rounding_happens_once_for_a_charge_and_never_for_a_sum() -> None:
    card = RateCard(
        version="x",
        vcpu_second=Decimal("0.0000000004"),
        gib_second=Decimal("0.0000000004"),
        stored_gib_month=Decimal(0),
    )
    assert amounts(running(1), card)[0][1] == Decimal("0.000000001")


def test_nothing_used_costs_nothing() -> None:
    (charge,) = charges(running(0), (LIST_PRICES,), to_us(at(5)))
    assert (str(charge.seconds), str(charge.amount)) == ("0", "0")


def test_an_open_meter_is_priced_up_to_now() -> None:
    meter = msgspec.structs.replace(running(0), closed_us=None, closed_position=None, closed_cause=None)
    assert amounts(meter, now=100) == [("list-1", Decimal("0.00185"))]


def test_an_interval_is_cut_where_the_rate_card_changes() -> None:
    cards = checked([dearer(60), LIST_PRICES])
    assert amounts(running(100), *cards) == [("list-1", Decimal("0.00111")), ("list-2", Decimal("0.00148"))]
    assert amounts(running(60), *cards) == [("list-1", Decimal("0.00111"))]


def test_an_interval_after_the_change_has_the_new_price_alone() -> None:
    assert amounts(running(1), *checked([LIST_PRICES, dearer(-1)])) == [("list-2", Decimal("0.000037"))]


def test_an_empty_interval_names_the_card_that_was_valid_then() -> None:
    assert amounts(running(0), *checked([LIST_PRICES, dearer(-1)])) == [("list-2", Decimal(0))]


def test_cutting_an_interval_changes_no_amount_by_more_than_its_rounding() -> None:
    chance = Random(7)
    same = msgspec.structs.replace(LIST_PRICES, version="again")
    for _ in range(200):
        meter = running(chance.random() * 10**6, vcpus=chance.randint(1, 64), memory_mib=chance.randint(1, 10**6))
        cut = msgspec.structs.replace(same, valid_from_us=FROM + chance.randint(1, 10**12))
        whole = sum((amount for _, amount in amounts(meter)), Decimal(0))
        pieces = sum((amount for _, amount in amounts(meter, LIST_PRICES, cut)), Decimal(0))
        assert abs(whole - pieces) <= Decimal("0.000000001")


@pytest.mark.parametrize(
    ("cards", "complaint"),
    [
        ([], "no rate card"),
        ([dearer(5)], "from the beginning"),
        ([LIST_PRICES, msgspec.structs.replace(dearer(5), version="list-1")], "same version"),
        ([LIST_PRICES, msgspec.structs.replace(LIST_PRICES, version="b")], "same moment"),
        ([LIST_PRICES, msgspec.structs.replace(dearer(5), currency="EUR")], "currencies"),
        ([msgspec.structs.replace(LIST_PRICES, gib_second=Decimal(-1))], "negative"),
        ([msgspec.structs.replace(LIST_PRICES, gib_second=Decimal("NaN"))], "no number"),
    ],
)
def test_rate_cards_that_do_not_fit_are_refused(cards: list[RateCard], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        checked(cards)


def test_the_list_prices_hold_when_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORPOR_BILLING_RATE_CARDS", raising=False)
    assert BillingSettings().cards() == (LIST_PRICES,)


def test_rate_cards_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "TORPOR_BILLING_RATE_CARDS",
        '[{"version": "b", "valid_from": "2026-03-01T12:01:00", "vcpu_second": "2", "gib_second": "0",'
        ' "stored_gib_month": "0"},'
        ' {"version": "a", "vcpu_second": "0.1", "gib_second": "0", "stored_gib_month": "0"}]',
    )
    cards = BillingSettings().cards()
    assert [(card.version, card.vcpu_second) for card in cards] == [("a", Decimal("0.1")), ("b", Decimal(2))]
    assert cards[1].valid_from_us == to_us(at(60))


@pytest.mark.parametrize(
    "value",
    [
        "not json",
        "[]",
        '[{"version": "a"}]',
        '[{"version": "a", "vcpu_second": "x", "gib_second": "0", "stored_gib_month": "0"}]',
        '[{"version": "a", "vcpu_second": "1", "gib_second": "0", "stored_gib_month": "0", "discount": "1"}]',
    ],
)
def test_bad_rate_cards_stop_the_service_before_it_starts(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TORPOR_BILLING_RATE_CARDS", value)
    with pytest.raises(ValueError, match=r"rate_cards"):
        BillingSettings()

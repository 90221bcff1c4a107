"""Rate cards and the price of an interval, in exact decimals.

The rounding rule: the amount of one charge (an interval under one rate card) is computed exactly from whole
microseconds, MiB and bytes, and rounded once, to `AMOUNT_PLACES` places, half to even. A sum is a sum of rounded
charges and is never rounded again, so that anybody with the log gets the same figure.

A suspended machine has no running interval: suspended compute costs nothing, its checkpoint is charged as stored bytes.
"""

from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal
from typing import Final

import msgspec

from torpor_billing.domain.meters import Meter

AMOUNT_PLACES: Final = 9
MIB_PER_GIB: Final = 1024
BYTES_PER_GIB: Final = 2**30
US_PER_S: Final = 1_000_000
SECONDS_PER_MONTH: Final = 730 * 3600
"""A month of storage: 8760 hours of a year, divided by twelve."""

_EXACT: Final = Context(prec=60, rounding=ROUND_HALF_EVEN)
"""Wide enough that only the final rounding loses anything: sizes, microseconds and rates need fewer than 50 digits."""
_QUANTUM: Final = Decimal(1).scaleb(-AMOUNT_PLACES)


class RateCard(msgspec.Struct, frozen=True, kw_only=True):
    """Prices from `valid_from_us` on, in `currency` per vCPU-second, GiB-second of memory, GiB-month of storage."""

    version: str
    valid_from_us: int = 0
    currency: str = "USD"
    vcpu_second: Decimal
    gib_second: Decimal
    stored_gib_month: Decimal


LIST_PRICES: Final = RateCard(
    version="list-1",
    vcpu_second=Decimal("0.000014"),
    gib_second=Decimal("0.0000045"),
    stored_gib_month=Decimal("0.08"),
)
"""The card a new installation starts with: what the market charges for compute and snapshots."""


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """What one meter used under one rate card; quantities are rounded for show, `amount` comes from whole numbers."""

    rate_card: str
    from_us: int
    until_us: int
    seconds: Decimal
    vcpu_seconds: Decimal
    gib_seconds: Decimal
    gib_months: Decimal
    amount: Decimal


def checked(cards: Iterable[RateCard]) -> tuple[RateCard, ...]:
    """The cards in order of time, the first valid from the beginning; `ValueError` says what is wrong with them."""
    ordered = tuple(sorted(cards, key=lambda card: card.valid_from_us))
    if not ordered:
        raise ValueError("there is no rate card; leave the setting out for the list prices")
    if ordered[0].valid_from_us > 0:
        raise ValueError(f"the earliest rate card, {ordered[0].version!r}, must be valid from the beginning (0)")
    if len({card.version for card in ordered}) < len(ordered):
        raise ValueError("two rate cards have the same version; give each its own")
    if len({card.valid_from_us for card in ordered}) < len(ordered):
        raise ValueError("two rate cards are valid from the same moment; a moment has one price")
    if len({card.currency for card in ordered}) > 1:
        raise ValueError("rate cards of different currencies cannot be added up; keep one currency")
    for card in ordered:
        if any(not rate.is_finite() or rate < 0 for rate in (card.vcpu_second, card.gib_second, card.stored_gib_month)):
            raise ValueError(f"rate card {card.version!r} has a price that is negative or no number")
    return ordered


def charges(meter: Meter, cards: Sequence[RateCard], now_us: int) -> list[Charge]:
    """What the meter costs as of `now_us`, cut where the rate card changes; one charge at least.

    `cards` are as `checked` gives them. An open meter is charged up to `now_us`.
    """
    start_us, end_us = meter.opened_us, meter.charged_until_us(now_us)
    found: list[Charge] = []
    for index, card in enumerate(cards):
        last = index + 1 == len(cards)
        from_us = start_us if index == 0 else max(start_us, card.valid_from_us)
        until_us = end_us if last else min(end_us, cards[index + 1].valid_from_us)
        if from_us < until_us:
            found.append(_charge(meter, card, from_us, until_us))
    return found or [_charge(meter, _card_at(cards, start_us), start_us, start_us)]


def _card_at(cards: Sequence[RateCard], instant_us: int) -> RateCard:
    valid = [card for card in cards if card.valid_from_us <= instant_us]
    return valid[-1] if valid else cards[0]


def _charge(meter: Meter, card: RateCard, from_us: int, until_us: int) -> Charge:
    length = Decimal(until_us - from_us)
    seconds = _EXACT.divide(length, Decimal(US_PER_S))
    vcpu_seconds = _EXACT.multiply(seconds, Decimal(meter.vcpus))
    gib_seconds = _EXACT.divide(_EXACT.multiply(seconds, Decimal(meter.memory_mib)), Decimal(MIB_PER_GIB))
    byte_seconds = _EXACT.multiply(seconds, Decimal(meter.stored_bytes))
    gib_months = _EXACT.divide(byte_seconds, Decimal(BYTES_PER_GIB * SECONDS_PER_MONTH))
    compute = _EXACT.add(_EXACT.multiply(vcpu_seconds, card.vcpu_second), _EXACT.multiply(gib_seconds, card.gib_second))
    amount = _EXACT.add(compute, _EXACT.multiply(gib_months, card.stored_gib_month))
    return Charge(
        rate_card=card.version,
        from_us=from_us,
        until_us=until_us,
        seconds=_rounded(seconds),
        vcpu_seconds=_rounded(vcpu_seconds),
        gib_seconds=_rounded(gib_seconds),
        gib_months=_rounded(gib_months),
        amount=_rounded(amount),
    )


def _rounded(exact: Decimal) -> Decimal:
    return exact.quantize(_QUANTUM, context=_EXACT) if exact else Decimal(0)

"""Answers what was used and what it costs: `qry.<tenant>.billing.usage.<session id, or - for the whole tenant>`."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec

from torpor_billing.domain.meters import Meter
from torpor_billing.domain.rates import Charge, RateCard, charges
from torpor_billing.projections import METERS, MeterRow, Meters
from torpor_contracts.errors import Rejected
from torpor_contracts.ids import SYSTEM_TENANT, SessionId, TenantId
from torpor_contracts.usage import MeterAlarm, UsageAnswer, UsageLine, UsageQuery, UsageTotals
from torpor_eventlog.instants import from_us, to_us
from torpor_eventlog.views_port import Rows, ViewStore
from torpor_messaging.ports import Clock

PAGE_MAX: Final = 500
"""Meters in one answer: more would not fit a NATS message of 1 MiB."""
ALARMS_MAX: Final = 100
"""Alarms in one answer; who has more open alarms than this has one cause to mend, not a list to read."""

_ADVICE: Final = {
    "superseded": "a newer machine runs the session; the reaper freezes and reaps the old one, or stop its host",
    "start-given-up": "the machine came up after its session had given it up; the reaper freezes and reaps it",
    "session-lost": "the host has not said that the machine is gone; bring the host back, or take it out for good",
    "session-terminated": "the host has not said that the machine is gone; look at the host's log, then restart it",
    "session-failed": "the host has not said that the machine is gone; look at the host's log, then restart it",
    "vm-released": "the machine's process is gone, but its end is not on record; restart its host to record it",
}


class UsageQueries:
    """Reads the `meters` view and prices it."""

    def __init__(self, views: ViewStore, clock: Clock, cards: Sequence[RateCard]) -> None:
        self._views = views
        self._clock = clock
        self._cards = cards

    async def usage(self, tenant_id: TenantId, target: str, parameters: Mapping[str, Any]) -> UsageAnswer:
        """Usage of one session or of the tenant, up to now; `Rejected("illegal-query")` for bad parameters."""
        query = _query(parameters)
        now = self._clock.now()
        where: dict[str, str | int | None] = {"tenant_id": tenant_id}
        if target != "-":
            where["session_id"] = target
        position = await self._views.position(Meters.name)
        async with self._views.reading() as rows:
            page: Sequence[MeterRow] = await rows.find(METERS, where, after_key=query.after, limit=query.limit)
            alarms = await _alarms(rows, tenant_id, where)
        by_position = sorted((row.meter for row in page), key=lambda meter: meter.opened_position)
        lines = [_line(meter, charge) for meter in by_position for charge in charges(meter, self._cards, to_us(now))]
        return UsageAnswer(
            tenant_id=tenant_id,
            session_id=None if target == "-" else SessionId(target),
            as_of=now,
            position=position,
            currency=self._cards[-1].currency,
            lines=lines,
            totals=_totals(lines),
            alarms=alarms,
            next=page[-1].meter_id if len(page) == query.limit else None,
        )


def _query(parameters: Mapping[str, Any]) -> UsageQuery:
    try:
        query = msgspec.convert(dict(parameters), UsageQuery)
    except msgspec.ValidationError as error:
        raise Rejected("illegal-query", str(error), "see schemas/queries/billing/usage.parameters.json") from error
    if not 1 <= query.limit <= PAGE_MAX:
        raise Rejected("illegal-query", f"limit is {query.limit}", f"ask for 1 to {PAGE_MAX} meters at a time")
    return query


async def _alarms(rows: Rows, tenant_id: TenantId, where: Mapping[str, str | int | None]) -> list[MeterAlarm]:
    everybody = tenant_id == SYSTEM_TENANT
    scope = {field: value for field, value in where.items() if not (everybody and field == "tenant_id")}
    found: Sequence[MeterRow] = await rows.find(METERS, {**scope, "alarm": 1}, limit=ALARMS_MAX)
    return [alarm for row in found if (alarm := _alarm(row.meter)) is not None]


def _alarm(meter: Meter) -> MeterAlarm | None:
    if meter.given_up_us is None or meter.given_up_position is None or meter.given_up_cause is None:
        return None
    return MeterAlarm(
        meter_id=meter.meter_id,
        session_id=meter.session_id,
        host_id=meter.host_id,
        opened_position=meter.opened_position,
        since=from_us(meter.given_up_us),
        evidence_position=meter.given_up_position,
        cause=meter.given_up_cause,
        advice=_ADVICE[meter.given_up_cause],
    )


def _line(meter: Meter, charge: Charge) -> UsageLine:
    return UsageLine(
        kind=meter.kind,
        meter_id=meter.meter_id,
        session_id=meter.session_id,
        host_id=meter.host_id,
        incarnation=meter.incarnation,
        vcpus=meter.vcpus,
        memory_mib=meter.memory_mib,
        stored_bytes=meter.stored_bytes,
        opened_at=from_us(meter.opened_us),
        opened_position=meter.opened_position,
        closed_at=from_us(meter.closed_us) if meter.closed_us is not None else None,
        closed_position=meter.closed_position,
        closed_cause=meter.closed_cause,
        charged_from=from_us(charge.from_us),
        charged_until=from_us(charge.until_us),
        rate_card=charge.rate_card,
        seconds=charge.seconds,
        vcpu_seconds=charge.vcpu_seconds,
        gib_seconds=charge.gib_seconds,
        gib_months=charge.gib_months,
        amount=charge.amount,
    )


def _totals(lines: Sequence[UsageLine]) -> UsageTotals:
    running = [line for line in lines if line.kind == "running"]
    return UsageTotals(
        running_seconds=sum((line.seconds for line in running), Decimal(0)),
        vcpu_seconds=sum((line.vcpu_seconds for line in lines), Decimal(0)),
        gib_seconds=sum((line.gib_seconds for line in lines), Decimal(0)),
        gib_months=sum((line.gib_months for line in lines), Decimal(0)),
        amount=sum((line.amount for line in lines), Decimal(0)),
    )

"""What billing answers to queries: usage line by line, each naming the log positions it can be recomputed from."""

from datetime import datetime
from decimal import Decimal
from typing import Literal

import msgspec

from torpor_contracts.ids import HostId, SessionId, TenantId

MeterKind = Literal["running", "stored"]


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`usage` of the session that is the target (`-`: of the tenant). `after` is the `next` of the page before."""

    after: str | None = None
    limit: int = 200


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """One interval of a meter under one rate card: what was used from `charged_from` to `charged_until`, and its price.

    `opened_position` and `closed_position` are the events that opened and closed the meter (None: still open).
    Sizes: `memory_mib` in MiB, `stored_bytes` in bytes; GiB is 2^30 bytes, a month is 730 hours.
    """

    kind: MeterKind
    meter_id: str
    session_id: SessionId
    host_id: HostId | None
    incarnation: int
    vcpus: int
    memory_mib: int
    stored_bytes: int
    opened_at: datetime
    opened_position: int
    closed_at: datetime | None
    closed_position: int | None
    closed_cause: str | None
    charged_from: datetime
    charged_until: datetime
    rate_card: str
    seconds: Decimal
    vcpu_seconds: Decimal
    gib_seconds: Decimal
    gib_months: Decimal
    amount: Decimal


class UsageTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The sums over the lines of one answer; pages are added up by whoever asks for them."""

    running_seconds: Decimal
    vcpu_seconds: Decimal
    gib_seconds: Decimal
    gib_months: Decimal
    amount: Decimal


class MeterAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """A running meter that is open though its session has given the machine up; nothing is charged after `since`."""

    meter_id: str
    session_id: SessionId
    host_id: HostId | None
    opened_position: int
    since: datetime
    evidence_position: int
    cause: str
    advice: str


class UsageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Usage up to `as_of`, derived from the log up to `position`; `next` asks for the page after, None ends."""

    tenant_id: TenantId
    session_id: SessionId | None
    as_of: datetime
    position: int
    currency: str
    lines: list[UsageLine]
    totals: UsageTotals
    alarms: list[MeterAlarm]
    next: str | None

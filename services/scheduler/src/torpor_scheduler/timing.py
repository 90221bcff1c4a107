"""Fires the timers of sessions: those that the bus brings, and as a backstop those it never brought."""

from collections.abc import Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Final

import msgspec

from torpor_contracts.errors import Poison
from torpor_contracts.ids import TenantId
from torpor_contracts.session_reports import FireSessionTimer, TimerKind
from torpor_eventlog.views_port import ViewStore
from torpor_messaging.timers import Overdue
from torpor_scheduler.paging import pages
from torpor_scheduler.projections import TIMERS, TimerRow, microseconds
from torpor_scheduler.sending import Sender
from torpor_scheduler.spacing import Spacing

TIMER: Final = "session"
"""The kind under which timers are set: a session has one at most, so each replaces the one before."""

SWEEP_MAX: Final = 500
"""Timers that one sweep fires at most; the next goes on with the others."""


class TimerNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a timer carries. `position` is that of the event that set it; `sweep` counts the sweeps it was fired by."""

    kind: TimerKind
    incarnation: int
    generation: int
    position: int
    sweep: int = 0


class Timing:
    """Fires timers. `slack_s` is what the bus may be late before the sweeper steps in."""

    def __init__(self, views: ViewStore, sender: Sender, slack_s: float) -> None:
        self._views = views
        self._sender = sender
        self._slack_us = round(slack_s * 1_000_000)
        self._spacing = Spacing(slack_s)

    async def fire(self, tenant_id: TenantId, kind: str, target: str, data: bytes) -> None:
        """A timer is due: the session decides whether it still wants it."""
        if kind != TIMER:
            raise Poison(f"the scheduler sets no timers of kind {kind!r}")
        try:
            note = msgspec.json.decode(data, type=TimerNote)
        except msgspec.MsgspecError as error:
            raise Poison(f"the timer of {target} is not one of ours: {error}") from error
        command = FireSessionTimer(kind=note.kind, incarnation=note.incarnation, generation=note.generation)
        # A repeat needs an id of its own: the bus would take it for the one that had no effect.
        await self._sender.to_session(tenant_id, target, command, f"timer-{note.position}-{note.sweep}")

    async def overdue(self, now: datetime) -> Sequence[Overdue]:
        """The timers that a sweep has to fire; those that stay overdue come again at growing intervals."""
        now_us = microseconds(now)
        swept: list[Overdue] = []
        async with aclosing(pages(self._views, TIMERS, at_most=("due_us", now_us - self._slack_us))) as rows:
            async for row in rows:
                number = self._spacing.due(f"{row.session_id}/{row.position}", (now_us - row.due_us) / 1e6)
                if number is not None:
                    swept.append(_overdue(row, number + 1))
                if len(swept) == SWEEP_MAX:
                    break
        return swept


def _overdue(row: TimerRow, sweep: int) -> Overdue:
    note = TimerNote(
        kind=row.kind,
        incarnation=row.incarnation,
        generation=row.generation,
        position=row.position,
        sweep=sweep,
    )
    return Overdue(TenantId(row.tenant_id), TIMER, row.session_id, msgspec.json.encode(note))

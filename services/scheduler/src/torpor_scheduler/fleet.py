"""What hosts offer right now: the view of hosts, less the machines placed since the view was read.

Kept for a moment only. With several schedulers two may take the same room; the host then refuses one of them, and
the start is tried again within its rule.
"""

from collections import OrderedDict
from typing import Final

import msgspec
from msgspec.structs import replace

from torpor_contracts.ids import VmId
from torpor_contracts.session import VmStartRequested
from torpor_eventlog.views_port import ViewStore
from torpor_messaging.ports import Clock
from torpor_scheduler.domain.placement import HostOffer, taken
from torpor_scheduler.projections import HOSTS, Views, offer_of

REFRESH_S: Final = 0.1
HOSTS_MAX: Final = 10_000
PAGE: Final = 1_000
PLACED_MAX: Final = 10_000

PLACED_OFTEN: Final = 64
"""Placements after which the view is read again however fresh it is: each is looked at in every decision."""


class _Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that the view may not count yet; `position` None: its start is not in the log yet."""

    event: VmStartRequested
    position: int | None = None


class Fleet:
    """The offers of hosts, with a claim on them for each placement that the view does not show yet."""

    def __init__(self, views: ViewStore, clock: Clock) -> None:
        self._views = views
        self._clock = clock
        self._offers: dict[str, HostOffer] = {}
        self._position = 0
        self._read_at_s: float | None = None
        self._placed: OrderedDict[VmId, _Placed] = OrderedDict()

    async def refresh(self) -> None:
        """Read the view of hosts again, unless that was done a moment ago."""
        now_s = self._clock.monotonic_s()
        fresh = self._read_at_s is not None and now_s - self._read_at_s < REFRESH_S
        if fresh and len(self._placed) < PLACED_OFTEN:
            return
        # The position first: a machine that is in the rows already may then count twice for a moment, never not at all.
        position = await self._views.position(Views.name)
        offers: dict[str, HostOffer] = {}
        async with self._views.reading() as rows:
            after: str | None = None
            while len(offers) < HOSTS_MAX:
                page = await rows.find(HOSTS, after_key=after, limit=PAGE)
                offers.update((row.host_id, offer_of(row)) for row in page)
                if len(page) < PAGE:
                    break
                after = page[-1].host_id
        self._offers, self._position, self._read_at_s = offers, position, now_s
        for vm_id, placed in list(self._placed.items()):
            if placed.position is not None and placed.position <= position:
                del self._placed[vm_id]

    def forget(self) -> None:
        """Hosts have changed: read the view again at the next refresh."""
        self._read_at_s = None

    def offers(self) -> tuple[HostOffer, ...]:
        """What is left on each host."""
        left = dict(self._offers)
        for placed in self._placed.values():
            offer, spec = left.get(placed.event.host_id), placed.event.machine
            if offer is not None:
                left[offer.host_id] = taken(offer, spec)
        return tuple(left.values())

    def claim(self, event: VmStartRequested) -> None:
        """Count a machine that is about to be asked for."""
        self._placed[event.vm_id] = _Placed(event=event)
        if len(self._placed) > PLACED_MAX:
            self._placed.popitem(last=False)

    def settle(self, vm_id: VmId, position: int | None) -> None:
        """The request is in the log at `position` or before; None: it is not, and never will be."""
        placed = self._placed.get(vm_id)
        if placed is None:
            return
        if position is None:
            del self._placed[vm_id]
        else:
            self._placed[vm_id] = replace(placed, position=position)

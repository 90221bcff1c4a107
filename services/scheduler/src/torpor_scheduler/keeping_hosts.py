"""Keeps hosts: declares the silent lost, takes back those that are heard again, empties the lost and the draining."""

from contextlib import aclosing
from datetime import datetime
from typing import Final

import msgspec

from torpor_contracts.errors import Transient
from torpor_contracts.host import DeclareHostLost, HostHeartbeat, RegisterHost
from torpor_contracts.ids import SYSTEM_TENANT
from torpor_eventlog.views_port import ViewStore
from torpor_messaging import subjects
from torpor_messaging.service_ports import ServicePorts
from torpor_scheduler.domain.host import HostPhase
from torpor_scheduler.evacuation import Evacuation
from torpor_scheduler.paging import pages
from torpor_scheduler.projections import HOSTS, HostRow, microseconds
from torpor_scheduler.sending import SERVICE, Sender
from torpor_scheduler.spacing import Spacing
from torpor_scheduler.watch import HostWatch

PROBE: Final = "probe"
REPEAT_AFTER_S: Final = 5.0
"""How long the first telling of a host's end is given before the sessions still there are told again."""


class HostKeeper:
    """Looks at every host once in a beat. `lost_after_s` is the silence after which a host is declared lost."""

    def __init__(
        self, ports: ServicePorts, watch: HostWatch, sender: Sender, evacuation: Evacuation, lost_after_s: float
    ) -> None:
        self._views: ViewStore = ports.views
        self._bus = ports.bus
        self._clock = ports.clock
        self._watch = watch
        self._sender = sender
        self._evacuation = evacuation
        self._lost_after_s = lost_after_s
        self._spacing = Spacing(REPEAT_AFTER_S)
        self.probe_subject = subjects.observation(SYSTEM_TENANT, SERVICE, PROBE, ports.ids.new("scheduler"))

    async def hear_host(self, _: str, data: bytes) -> None:
        """A heartbeat; what is none is not ours to complain about, the host is silent then."""
        try:
            heartbeat = msgspec.json.decode(data, type=HostHeartbeat)
        except msgspec.MsgspecError:
            return
        self._watch.heard(heartbeat)

    async def hear_ourselves(self, _: str, __: bytes) -> None:
        """Our own probe came back: we can hear."""
        self._watch.heard_ourselves()

    async def look(self) -> None:
        """Send a probe, then look at every host; nothing can be said of them while the bus is away."""
        try:
            await self._bus.publish(self.probe_subject, b"")
        except Transient:
            return  # no failure of this loop's own, which would be run less often for it
        async with aclosing(pages(self._views, HOSTS)) as rows:
            async for row in rows:
                await self._look_at(row)

    async def _look_at(self, row: HostRow) -> None:
        host = row.folded
        seen_at = self._watch.seen_at(host.host_id, host.boot_id)
        if host.phase is HostPhase.UP:
            if self._watch.silent_s(host.host_id, host.boot_id) >= self._lost_after_s:
                await self._declare_lost(row)
            elif host.draining and row.vms:
                await self._empty(row, self._clock.now())
        elif seen_at is not None and microseconds(seen_at) > row.step_us:
            await self._take_back(row)
        elif row.vms:
            await self._empty(row, self._clock.now())

    async def _declare_lost(self, row: HostRow) -> None:
        host = row.folded
        last_seen_at = self._watch.waited_from(host.host_id, host.boot_id, host.registered_at)
        command = DeclareHostLost(boot_id=host.boot_id, last_seen_at=last_seen_at)
        # One registration can be lost once; the moment tells a try apart that a late heartbeat had made void.
        command_id = f"host-silent-{row.boot_position}-{microseconds(last_seen_at)}"
        await self._sender.to_host(host.host_id, command, command_id)

    async def _take_back(self, row: HostRow) -> None:
        host = row.folded
        command = RegisterHost(
            boot_id=host.boot_id, driver=host.driver, fingerprint=host.fingerprint, capacity=host.capacity
        )
        await self._sender.to_host(host.host_id, command, f"host-heard-{row.position}")

    async def _empty(self, row: HostRow, now: datetime) -> None:
        """Tell the sessions still there again; spaced out, for as long as a machine is counted there."""
        host = row.folded
        age_s = (microseconds(now) - row.step_us) / 1e6
        number = self._spacing.due(f"{host.host_id}/{row.position}", age_s)
        if number is None:
            return
        if host.phase is HostPhase.LOST:
            last_seen_at = self._watch.waited_from(host.host_id, host.boot_id, host.registered_at)
            await self._evacuation.host_lost(host.host_id, last_seen_at, row.position, number + 1)
        else:
            await self._evacuation.host_draining(host.host_id, row.position, number + 1)

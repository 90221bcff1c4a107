"""What heartbeats say of hosts, in memory only: after a restart every host has the whole time again.

Silence counts only while we hear ourselves: a scheduler that was stopped, or cut off from the bus, has no right to
call anybody lost. Each beat we publish a probe and take note of hearing it.
"""

from collections import OrderedDict
from datetime import datetime
from typing import Final

import msgspec

from torpor_contracts.host import HostHeartbeat, VmObservation
from torpor_contracts.ids import HostId, VmId
from torpor_messaging.ports import Clock

HOSTS_MAX: Final = 20_000
GAP_BEATS_MAX: Final = 2.0
"""A gap between two probes counts for so many beats at most: what is longer, we did not listen."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """The machines a host had at `observed_at` (its clock); heard at `received_at` (ours)."""

    observed_at: datetime
    received_at: datetime
    vms: dict[VmId, VmObservation]


class _Known(msgspec.Struct, kw_only=True):
    """A host's present boot: when it was heard last on the listening clock, and its last two inventories."""

    boot_id: str
    heard_s: float
    seen_at: datetime | None = None
    latest: Inventory | None = None
    previous: Inventory | None = None


class HostWatch:
    """Remembers heartbeats. `beat_s` is how often a probe is sent."""

    def __init__(self, clock: Clock, beat_s: float) -> None:
        self._clock = clock
        self._gap_s_max = beat_s * GAP_BEATS_MAX
        self._started_at = clock.now()
        self._listened_s = 0.0
        self._probe_at_s: float | None = None
        self._hosts: OrderedDict[HostId, _Known] = OrderedDict()

    def heard_ourselves(self) -> None:
        """A probe of ours came back."""
        now_s = self._clock.monotonic_s()
        if self._probe_at_s is not None:
            self._listened_s += min(now_s - self._probe_at_s, self._gap_s_max)
        self._probe_at_s = now_s

    def heard(self, heartbeat: HostHeartbeat) -> None:
        """A host gave a sign of life."""
        known = self._known(heartbeat.host_id, heartbeat.boot_id)
        known.heard_s = self._listened_s
        known.seen_at = self._clock.now()
        known.previous = known.latest
        known.latest = Inventory(
            observed_at=heartbeat.observed_at,
            received_at=known.seen_at,
            vms={observation.vm_id: observation for observation in heartbeat.vms},
        )

    def silent_s(self, host_id: HostId, boot_id: str) -> float:
        """For how long we have listened in vain; counted from the first question about a boot that was never heard."""
        return self._listened_s - self._known(host_id, boot_id).heard_s

    def seen_at(self, host_id: HostId, boot_id: str) -> datetime | None:
        """When this boot of the host was heard last."""
        known = self._hosts.get(host_id)
        return known.seen_at if known is not None and known.boot_id == boot_id else None

    def waited_from(self, host_id: HostId, boot_id: str, registered_at: datetime | None) -> datetime:
        """The last moment that speaks for the host: its heartbeat, its registration, or our own start."""
        seen_at = self.seen_at(host_id, boot_id)
        return seen_at or max(registered_at or self._started_at, self._started_at)

    def inventories(self, host_id: HostId, boot_id: str) -> tuple[Inventory, Inventory] | None:
        """The last two inventories of this boot, newest first; None until there are two."""
        known = self._hosts.get(host_id)
        if known is None or known.boot_id != boot_id or known.latest is None or known.previous is None:
            return None
        return known.latest, known.previous

    def _known(self, host_id: HostId, boot_id: str) -> _Known:
        known = self._hosts.get(host_id)
        if known is None or known.boot_id != boot_id:
            known = _Known(boot_id=boot_id, heard_s=self._listened_s)
            self._hosts[host_id] = known
            if len(self._hosts) > HOSTS_MAX:
                self._hosts.popitem(last=False)
        return known

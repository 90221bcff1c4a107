"""Meters: intervals of running and stored time, opened and closed by what was observed, never by what was asked for.

Rules, in one place:
- Running time opens at the observed start of a machine and closes at the first observed end (suspended, stopped,
  quarantined, reaped), or at the last heartbeat of a host that was declared lost.
- A close by a lost host can only get shorter: an end that the host reports later and that lies before it replaces it;
  one that lies after it is noted and not charged, since by then another machine may run the session.
- A machine that its session found alive again opens a new interval at that moment: the time in which nobody saw it
  is not charged.
- A session pays for one machine at a time: what it has given up, or replaced by a newer machine, is charged no
  further, and an interval never starts before the one before it is over. Such a meter stays open, as an alarm, until
  an end is observed, or until the session has the machine again.
- Stored time opens when the store has recorded a checkpoint and closes when its parts are freed.
"""

from typing import Literal

import msgspec

from torpor_contracts.checkpoint import CheckpointRecorded
from torpor_contracts.ids import HostId, SessionId, TenantId, VmId
from torpor_contracts.usage import MeterKind
from torpor_contracts.vm import VmStarted
from torpor_eventlog.instants import to_us

RunningEnd = Literal["vm-suspended", "vm-stopped", "vm-quarantined", "vm-reaped", "host-lost"]
GivenUp = Literal["superseded", "start-given-up", "session-lost", "session-terminated", "session-failed", "vm-released"]


class Meter(msgspec.Struct, frozen=True, kw_only=True):
    """One interval. `meter_id` is the machine's id when `running`, the checkpoint's when `stored`.

    Later intervals of the same machine add the position that opened them: `<vm id>.<position>`.
    `given_up_us` is when the session was known to hold the machine no more while the meter was open.
    `late_end_us` is an end the host reported after the meter had been closed for it.
    """

    meter_id: str
    kind: MeterKind
    tenant_id: TenantId
    session_id: SessionId
    incarnation: int
    vm_id: VmId | None
    host_id: HostId | None
    vcpus: int
    memory_mib: int
    stored_bytes: int
    opened_us: int
    opened_position: int
    closed_us: int | None = None
    closed_position: int | None = None
    closed_cause: str | None = None
    given_up_us: int | None = None
    given_up_position: int | None = None
    given_up_cause: GivenUp | None = None
    late_end_us: int | None = None
    late_end_position: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether no end was observed yet."""
        return self.closed_us is None

    @property
    def is_alarm(self) -> bool:
        """Whether the meter runs on for a machine that its session has given up."""
        return self.is_open and self.given_up_us is not None

    @property
    def charge_ends_us(self) -> int | None:
        """When the charged interval ends, None while it goes on."""
        return min((end for end in (self.closed_us, self.given_up_us) if end is not None), default=None)

    def charged_until_us(self, now_us: int) -> int:
        """The end of the charged interval, as of `now_us`; never before its start."""
        ends_us = self.charge_ends_us
        return max(self.opened_us, now_us if ends_us is None else min(now_us, ends_us))


class Tenure(msgspec.Struct, frozen=True, kw_only=True):
    """Which machine a session has now, and which meter was the last to open for it.

    `vm_id` is the machine the session asked for last, None once it has given that up; `asked` tells a session that
    has no machine from one whose requests this log does not hold.
    """

    session_id: SessionId
    asked: bool = False
    vm_id: VmId | None = None
    meter_id: str | None = None

    def holds(self, vm_id: VmId) -> bool:
        """Whether the session would say that this machine is its own."""
        return not self.asked or self.vm_id == vm_id


def running(event: VmStarted, tenant_id: TenantId, position: int, previous: Meter | None, tenure: Tenure) -> Meter:
    """The meter that a machine's observed start opens; `previous` is the last meter of the same session."""
    started_us = to_us(event.observed_at)
    opened_us = max(started_us, (previous.charge_ends_us or 0) if previous is not None else 0)
    meter = Meter(
        meter_id=event.vm_id,
        kind="running",
        tenant_id=tenant_id,
        session_id=event.session_id,
        incarnation=event.incarnation,
        vm_id=event.vm_id,
        host_id=event.host_id,
        vcpus=event.machine.vcpus,
        memory_mib=event.machine.memory_mib,
        stored_bytes=0,
        opened_us=opened_us,
        opened_position=position,
    )
    return meter if tenure.holds(event.vm_id) else given_up(meter, opened_us, position, "start-given-up")


def stored(event: CheckpointRecorded, position: int) -> Meter:
    """The meter that a recorded checkpoint opens."""
    return Meter(
        meter_id=event.checkpoint_id,
        kind="stored",
        tenant_id=event.tenant_id,
        session_id=event.manifest.session_id,
        incarnation=event.manifest.incarnation,
        vm_id=None,
        host_id=None,
        vcpus=0,
        memory_mib=0,
        stored_bytes=event.stored_bytes,
        opened_us=to_us(event.recorded_at),
        opened_position=position,
    )


def closed(meter: Meter, end_us: int, position: int, cause: RunningEnd | Literal["freed"]) -> Meter:
    """The meter after an end was reported; see the rules above for one that is closed already."""
    if meter.given_up_us is not None:
        end_us = min(end_us, meter.given_up_us)
    end_us = max(end_us, meter.opened_us)
    if meter.closed_us is None:
        return msgspec.structs.replace(meter, closed_us=end_us, closed_position=position, closed_cause=cause)
    if meter.closed_cause != "host-lost" or cause == "host-lost" or meter.late_end_us is not None:
        return meter
    if end_us < meter.closed_us:
        return msgspec.structs.replace(meter, closed_us=end_us, closed_position=position, closed_cause=cause)
    return msgspec.structs.replace(meter, late_end_us=end_us, late_end_position=position)


def given_up(meter: Meter, at_us: int, position: int, cause: GivenUp) -> Meter:
    """The meter after its session was known to hold the machine no more; the first such moment stands."""
    if not meter.is_open or meter.given_up_us is not None:
        return meter
    return msgspec.structs.replace(
        meter, given_up_us=max(at_us, meter.opened_us), given_up_position=position, given_up_cause=cause
    )


def recovered(meter: Meter, newest: Meter | None, at_us: int, position: int) -> Meter:
    """The meter that runs from now on for a machine that its session has again: the same, or a new interval.

    `meter` is the machine's last one, `newest` the session's. It is answered unchanged when an end was observed, or
    when another machine has followed.
    """
    if newest is not None and newest.opened_position > meter.opened_position:
        return meter
    if meter.is_open:
        return msgspec.structs.replace(meter, given_up_us=None, given_up_position=None, given_up_cause=None)
    if meter.closed_cause != "host-lost" or meter.late_end_us is not None:
        return meter
    return msgspec.structs.replace(
        meter,
        meter_id=f"{meter.vm_id}.{position}",
        opened_us=max(at_us, meter.charge_ends_us or 0),
        opened_position=position,
        closed_us=None,
        closed_position=None,
        closed_cause=None,
        given_up_us=None,
        given_up_position=None,
        given_up_cause=None,
        late_end_us=None,
        late_end_position=None,
    )

"""Laws of the bill: intervals rest on what hosts observed, never overlap, and stay open only while a machine runs."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from torpor_billing.domain.meters import Meter
from torpor_contracts.checkpoint import CheckpointFreed, CheckpointRecorded
from torpor_contracts.host import HostLost
from torpor_contracts.vm import VmQuarantined, VmReaped, VmStarted, VmStopped, VmSuspended
from torpor_eventlog.instants import to_us
from torpor_simulation.history import History, Violation

ENDS: Final = (VmSuspended, VmStopped, VmQuarantined, VmReaped)


def billed(meters: Sequence[Meter], history: History, running: Mapping[Any, str]) -> Iterator[Violation]:
    """Hold every meter against the log, and against the machines that run at rest."""
    for meter in meters:
        if meter.kind == "running":
            yield from _opened(meter, history)
            yield from _closed(meter, history)
        else:
            yield from _stored(meter, history)
    yield from _apart(meters)
    open_now = {meter.vm_id for meter in meters if meter.kind == "running" and meter.is_open}
    for vm_id in sorted(str(vm_id) for vm_id in open_now ^ set(running)):
        yield Violation("billing", f"{vm_id} runs or is billed, but not both")
    metered = {meter.vm_id for meter in meters if meter.kind == "running"}
    for _, event in history.of(VmStarted):
        if event.vm_id not in metered:
            yield Violation("billing", f"{event.vm_id} ran and was never metered")


def _opened(meter: Meter, history: History) -> Iterator[Violation]:
    event = history.entries[meter.opened_position - 1].event
    if isinstance(event, VmStarted):
        if event.vm_id != meter.vm_id or meter.opened_us < to_us(event.observed_at):
            yield Violation("billing", f"{meter.meter_id} opened before its machine was seen running")
    elif type(event).__name__ != "SessionRecovered":
        yield Violation("billing", f"{meter.meter_id} opened on {type(event).__name__}, which nobody observed")


def _closed(meter: Meter, history: History) -> Iterator[Violation]:
    if meter.closed_position is None or meter.closed_us is None:
        return
    event = history.entries[meter.closed_position - 1].event
    if isinstance(event, HostLost):
        ended_us = to_us(event.last_seen_at)
        sound = event.host_id == meter.host_id
    elif isinstance(event, ENDS):
        ended_us = to_us(event.observed_at)
        sound = event.vm_id == meter.vm_id
    else:
        yield Violation("billing", f"{meter.meter_id} closed on {type(event).__name__}, which nobody observed")
        return
    if not sound:
        yield Violation("billing", f"{meter.meter_id} closed on the end of another machine")
    due_us = ended_us if meter.given_up_us is None else min(ended_us, meter.given_up_us)
    if meter.closed_us != max(due_us, meter.opened_us):
        yield Violation("billing", f"{meter.meter_id} closed at {meter.closed_us}, observed was {ended_us}")


def _stored(meter: Meter, history: History) -> Iterator[Violation]:
    if not isinstance(history.entries[meter.opened_position - 1].event, CheckpointRecorded):
        yield Violation("billing", f"{meter.meter_id} is billed as stored and was not recorded")
    if meter.closed_position is not None:
        event = history.entries[meter.closed_position - 1].event
        if not isinstance(event, CheckpointFreed):
            yield Violation("billing", f"{meter.meter_id} closed on {type(event).__name__}")


def _apart(meters: Sequence[Meter]) -> Iterator[Violation]:
    by_session: dict[str, list[Meter]] = {}
    for meter in meters:
        # An interval of no length charges nothing: a machine that came up after its session had given it up has one.
        if meter.kind == "running" and meter.charge_ends_us != meter.opened_us:
            by_session.setdefault(meter.session_id, []).append(meter)
    for session_id, own in by_session.items():
        own.sort(key=lambda meter: (meter.opened_us, meter.charge_ends_us or meter.opened_us))
        for earlier, later in pairwise(own):
            ends_us = earlier.charge_ends_us
            if ends_us is None or ends_us > later.opened_us:
                yield Violation("billing", f"{session_id} is billed twice: {earlier.meter_id} and {later.meter_id}")

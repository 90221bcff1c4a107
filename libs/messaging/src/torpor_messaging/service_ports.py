"""The ports every service is built from, as one bundle: production and the simulation each make their own."""

from dataclasses import dataclass

from torpor_eventlog.port import EventLog
from torpor_eventlog.views_port import ViewStore
from torpor_messaging.ports import Bus, Clock, Ids, Timers


@dataclass(frozen=True)
class ServicePorts:
    """What a service's `build(settings, ports)` is given. `views` belongs to this service alone."""

    log: EventLog
    views: ViewStore
    bus: Bus
    timers: Timers
    clock: Clock
    ids: Ids

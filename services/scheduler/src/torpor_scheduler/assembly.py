"""Puts the scheduler together from its settings and ports; production and the simulation both start here."""

from torpor_contracts.ids import SYSTEM_TENANT
from torpor_messaging.service import BackgroundRoute, CommandRoute, ObservationRoute, Service, TimerRoute
from torpor_messaging.service_ports import ServicePorts
from torpor_messaging.timers import sweeper
from torpor_scheduler.evacuation import Evacuation
from torpor_scheduler.fleet import Fleet
from torpor_scheduler.handlers import Handlers
from torpor_scheduler.keeping_hosts import HostKeeper
from torpor_scheduler.projections import Views
from torpor_scheduler.queries import Queries
from torpor_scheduler.reactors import Reactor
from torpor_scheduler.reconcile import Reconciler
from torpor_scheduler.sending import SERVICE, Sender
from torpor_scheduler.settings import SchedulerSettings
from torpor_scheduler.strays import Strays
from torpor_scheduler.streams import Streams
from torpor_scheduler.timing import Timing
from torpor_scheduler.watch import HostWatch

HEARTBEATS = f"obs.{SYSTEM_TENANT}.vm-host.heartbeat.*"


def build(settings: SchedulerSettings, ports: ServicePorts) -> Service:
    """The scheduler, ready to be run by an edge."""
    streams = Streams(ports)
    sender = Sender(ports.bus)
    watch = HostWatch(ports.clock, settings.look_every_s)
    evacuation = Evacuation(ports.views, sender)
    handlers = Handlers(ports, settings.rules(), streams, Fleet(ports.views, ports.clock), watch)
    keeper = HostKeeper(ports, watch, sender, evacuation, settings.host_lost_after_s)
    strays = Strays(ports.clock, streams, sender, settings.reconcile_after_s)
    reconciler = Reconciler(ports, watch, sender, strays, settings.reconcile_after_s)
    timing = Timing(ports.views, sender, settings.sweep_slack_s)
    return Service(
        name=SERVICE,
        commands=(CommandRoute(service=SERVICE, durable=SERVICE, handle=handlers.handle),),
        timers=(TimerRoute(service=SERVICE, durable=f"{SERVICE}-timers", handle=timing.fire),),
        observations=(
            ObservationRoute(subject=HEARTBEATS, handle=keeper.hear_host),
            ObservationRoute(subject=keeper.probe_subject, handle=keeper.hear_ourselves),
        ),
        queries=Queries(ports, watch).routes(),
        projections=(Views(),),
        reactors=(Reactor(ports, streams, sender, evacuation).route(),),
        background=(
            BackgroundRoute(name="look-at-hosts", every_s=settings.look_every_s, run=keeper.look),
            sweeper("sweep-timers", timing.overdue, timing.fire, ports.clock, every_s=settings.sweep_every_s),
            BackgroundRoute(
                name="reconcile",
                every_s=settings.reconcile_every_s,
                run=reconciler.look,
                first_s=settings.reconcile_every_s,
            ),
        ),
    )

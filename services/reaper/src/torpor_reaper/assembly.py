"""Puts the reaper together from its ports; the edge and the simulation both run what comes out."""

from typing import Final

from torpor_contracts.cleanup import CleanupConfirmed, CleanupProposed
from torpor_messaging.service import ObservationRoute, QueryRoute, ReactorRoute, Service
from torpor_messaging.service_ports import ServicePorts
from torpor_reaper.handlers import Heartbeats
from torpor_reaper.projections import Resources
from torpor_reaper.queries import ReaperQueries
from torpor_reaper.reactors import CONFIRMED, PROPOSED, HostRequests
from torpor_reaper.settings import ReaperSettings

SERVICE: Final = "reaper"
HEARTBEATS: Final = "obs.system.vm-host.heartbeat.*"


def build(settings: ReaperSettings, ports: ServicePorts) -> Service:
    """The whole of the reaper: it hears heartbeats, records steps, and asks hosts; it takes no commands."""
    heartbeats = Heartbeats(ports.log, ports.views, ports.clock, settings.rules(), settings.notice_s)
    requests = HostRequests(ports.bus)
    queries = ReaperQueries(ports.views, ports.clock, heartbeats, settings.silent_after_s)
    return Service(
        name=SERVICE,
        observations=[ObservationRoute(subject=HEARTBEATS, handle=heartbeats.on_heartbeat)],
        queries=[
            QueryRoute(service=SERVICE, type="resources", handle=queries.resources),
            QueryRoute(service=SERVICE, type="candidates", handle=queries.candidates),
        ],
        projections=[Resources()],
        reactors=[
            ReactorRoute(name=PROPOSED, reacts_to=(CleanupProposed,), react=requests.on_proposed),
            ReactorRoute(name=CONFIRMED, reacts_to=(CleanupConfirmed,), react=requests.on_confirmed),
        ],
    )

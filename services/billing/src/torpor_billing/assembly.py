"""Puts billing together from its ports; the edge and the simulation both run what comes out."""

from typing import Final

from torpor_billing.projections import Meters
from torpor_billing.queries import UsageQueries
from torpor_billing.settings import BillingSettings
from torpor_messaging.service import QueryRoute, Service
from torpor_messaging.service_ports import ServicePorts

SERVICE: Final = "billing"


def build(settings: BillingSettings, ports: ServicePorts) -> Service:
    """The whole of billing: one projection and one query; it takes no commands and appends nothing."""
    queries = UsageQueries(ports.views, ports.clock, settings.cards())
    return Service(
        name=SERVICE,
        queries=[QueryRoute(service=SERVICE, type="usage", handle=queries.usage)],
        projections=[Meters()],
    )

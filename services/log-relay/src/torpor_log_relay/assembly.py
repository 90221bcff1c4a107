"""Puts the log-relay together from its settings and ports."""

from collections.abc import Mapping
from typing import Any, Final

from torpor_contracts.ids import TenantId
from torpor_contracts.log_heads import HeadAnswer
from torpor_eventlog.following import Wake
from torpor_eventlog.relay import EventStream, Relay
from torpor_log_relay.settings import LogRelaySettings
from torpor_log_relay.signing import ReadNewest, Signing
from torpor_messaging import subjects
from torpor_messaging.service import BackgroundRoute, ObservationRoute, QueryRoute, Service
from torpor_messaging.service_ports import ServicePorts

SERVICE: Final = "log-relay"

MISMATCH_PAUSE_S_MAX: Final = 5.0
"""How soon it looks again whether a stream that is not a copy of the log has been rebuilt."""


def build(settings: LogRelaySettings, ports: ServicePorts, stream: EventStream, read_newest: ReadNewest) -> Service:
    """The log-relay, ready to be run by an edge."""
    wake = Wake()
    relay = Relay(ports.log, stream, wake, poll_s=settings.poll_s)
    signing = Signing(ports.log, ports.bus, settings.signing_key, settings.log_name, settings.heads_file)

    async def start() -> None:
        await signing.open(read_newest)

    async def hinted(_subject: str, _data: bytes) -> None:
        wake.notify()

    async def head(_tenant_id: TenantId, _target: str, _parameters: Mapping[str, Any]) -> HeadAnswer:
        return await signing.answer(relay.position)

    return Service(
        name=SERVICE,
        observations=(ObservationRoute(subject=subjects.HINT, handle=hinted),),
        queries=(QueryRoute(service=SERVICE, type="head", handle=head),),
        background=(
            BackgroundRoute(name="relay", every_s=1.0, run=relay.run, pause_s_max=MISMATCH_PAUSE_S_MAX),
            BackgroundRoute(name="sign-heads", every_s=settings.sign_every_s, run=signing.sign, first_s=1.0),
        ),
        start=start,
    )

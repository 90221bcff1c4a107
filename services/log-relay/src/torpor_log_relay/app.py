"""The log-relay's composition root: settings from the environment, ports from the edge."""

import sys

from pydantic import ValidationError

from torpor_log_relay.assembly import SERVICE, build
from torpor_log_relay.settings import LogRelaySettings
from torpor_log_relay.signing import newest_in_stream
from torpor_messaging.edge import EXIT_REFUSED, run_service
from torpor_messaging.nats_bus import NatsBus
from torpor_messaging.nats_events import NatsEventStream
from torpor_messaging.service import Service
from torpor_messaging.service_ports import ServicePorts


def main() -> int:
    """Run the log-relay until it is told to stop; the process's exit code."""
    try:
        settings = LogRelaySettings()  # type: ignore[call-arg]  # from the environment
    except ValidationError as error:
        sys.stderr.write(f"{SERVICE}: correct these variables, TORPOR_DATA_DIR or TORPOR_LOG_RELAY_…: {error}\n")
        return EXIT_REFUSED

    def make(ports: ServicePorts) -> Service:
        assert isinstance(ports.bus, NatsBus), "the edge gives every service the bus over NATS"
        link = ports.bus.link
        return build(settings, ports, NatsEventStream(link), newest_in_stream(link.api))

    return run_service(SERVICE, make)

"""A message of a durable consumer, and the four ways to end or prolong its delivery."""

import json
from collections.abc import Mapping
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg

from torpor_contracts.errors import Poison
from torpor_messaging.nats_errors import as_torpor_errors

CONFIRMED_S: Final = 2.0
"""How long the server is given to confirm an acknowledgement."""

_REASON_MAX: Final = 120


class NatsDelivery:
    """`torpor_messaging.ports.Delivery` over JetStream.

    What ends a delivery is sent and, but for `ack_confirmed`, not confirmed. If it gets lost the message is delivered
    again, and the log answers the same.
    """

    def __init__(self, client: Client, message: Msg, stream: str) -> None:
        self._client = client
        self._reply = message.reply
        self.subject = message.subject
        self.headers: Mapping[str, str] = message.headers or {}
        self.data = message.data
        try:
            place = message.metadata
        except Exception as error:
            raise Poison(f"{self.subject} did not come from JetStream") from error
        if place.stream != stream:
            raise Poison(f"{self.subject} came from stream {place.stream}, not {stream}")
        self.sequence = place.sequence.stream
        self.attempt = place.num_delivered

    async def ack(self) -> None:
        """See `Delivery.ack`."""
        await self._say(b"+ACK")

    async def ack_confirmed(self) -> None:
        """See `Delivery.ack_confirmed`."""
        with as_torpor_errors(f"ending {self.subject}"):
            await self._client.request(self._reply, b"+ACK", timeout=CONFIRMED_S)

    async def nak(self, delay_s: float) -> None:
        """See `Delivery.nak`."""
        delay = json.dumps({"delay": int(delay_s * 1_000_000_000)}).encode()
        await self._say(b"-NAK " + delay if delay_s > 0 else b"-NAK")

    async def term(self, reason: str) -> None:
        """See `Delivery.term`."""
        await self._say(b"+TERM " + reason[:_REASON_MAX].encode())

    async def in_progress(self) -> None:
        """See `Delivery.in_progress`."""
        await self._say(b"+WPI")

    async def _say(self, what: bytes) -> None:
        with as_torpor_errors(f"ending {self.subject}"):
            await self._client.publish(self._reply, what)

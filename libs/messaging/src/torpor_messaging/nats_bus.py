"""The bus over NATS: commands stored in JetStream, questions and observations on core subjects."""

import asyncio
import json
from collections.abc import Mapping
from typing import Final

from nats.aio.msg import Msg

from torpor_contracts.errors import Transient
from torpor_messaging.envelope import REPLY, TRACE, Message, encode_command
from torpor_messaging.nats_errors import api_error, as_torpor_errors
from torpor_messaging.nats_link import Link
from torpor_messaging.policy import trace
from torpor_messaging.ports import Clock, OutgoingCommand

STORED_S: Final = 5.0
"""How long a publication waits for the server to say that it is stored."""


class NatsBus:
    """`torpor_messaging.ports.Bus`. No message ids are set: what makes a command happen once is the log.

    JetStream's deduplication is by an id that any tenant may use up for another.
    """

    def __init__(self, link: Link, clock: Clock) -> None:
        self.link = link
        self._clock = clock
        self._source = f"torpor/{link.identity.name}"

    async def send(self, command: OutgoingCommand) -> None:
        """See `Bus.send`."""
        message = self._encoded(command)
        await self.publish_stored(message.subject, message.data, message.headers)

    async def call(self, command: OutgoingCommand, timeout_s: float) -> bytes:
        """See `Bus.call`."""
        message = self._encoded(command)
        stored = await self.link.expect(message.subject)
        reply = await self.link.expect(message.subject, command.tenant_id)
        headers = message.headers | {REPLY: reply.inbox}
        try:
            with as_torpor_errors(message.subject):
                await self.link.client.publish(message.subject, message.data, reply=stored.inbox, headers=headers)
                async with asyncio.timeout(timeout_s):
                    # The reply may overtake the server's word that the command is stored; then that is not needed.
                    await asyncio.wait((stored.answer, reply.answer), return_when=asyncio.FIRST_COMPLETED)
                    if not reply.answer.done():
                        _check_stored(message.subject, stored.answer.result())
                    return (await reply.answer).data
        finally:
            self.link.forget(stored)
            self.link.forget(reply)

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """See `Bus.publish`."""
        await self.link.publish(subject, data, headers)

    async def publish_stored(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """See `Bus.publish_stored`."""
        _check_stored(subject, await self.link.request(subject, data, STORED_S, headers))

    async def query(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """See `Bus.query`."""
        return (await self.link.request(subject, data, timeout_s)).data

    def _encoded(self, command: OutgoingCommand) -> Message:
        message = encode_command(command, self._source, self._clock.now())
        traced = trace.get()
        if traced is not None:
            message.headers[TRACE] = traced
        return message


def _check_stored(subject: str, answer: Msg) -> None:
    if (answer.headers or {}).get("Status") == "503":
        raise Transient(f"{subject}: no stream takes it", retry_after_s=1.0)
    try:
        said = json.loads(answer.data)
    except ValueError as error:
        raise Transient(f"{subject}: the server's answer makes no sense", retry_after_s=1.0) from error
    if "error" in said:
        raise api_error(subject, said["error"])
    if "seq" not in said:
        # Somebody answered who is no stream: the stream that should have taken it is not there.
        raise Transient(f"{subject}: it was not stored", retry_after_s=1.0)

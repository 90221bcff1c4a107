"""One NATS connection of one tenant: commands with their receipts, questions with their answers, subscriptions."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from torpor.client.discovery import Endpoint
from torpor.client.refusals import refusal_error, refused
from torpor.errors import Refused, Unavailable
from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.ids import CommandId, TenantId
from torpor_contracts.registry import QUERIES
from torpor_contracts.replies import Receipt, Refusal, Reply
from torpor_messaging import subjects
from torpor_messaging.nats_bus import NatsBus
from torpor_messaging.nats_errors import as_torpor_errors
from torpor_messaging.nats_link import Identity, Link
from torpor_messaging.ports import OutgoingCommand
from torpor_messaging.system import SystemClock

ATTEMPT_S_FIRST: Final = 2.0
ATTEMPT_S_MAX: Final = 8.0
ATTEMPTS_MAX: Final = 32
"""A command is published again, under the same id, after 2, 4, 8, 8… seconds without an answer, at most so often."""
ASKS_MAX: Final = 64
_ASK_S_MAX: Final = 5.0

# What happens on the wire is told by errors, not printed into the program that uses the SDK.
logging.getLogger("torpor_messaging").addHandler(logging.NullHandler())


class Connection:
    """Publishes, asks and subscribes as one tenant; connects again by itself after an outage."""

    def __init__(self, link: Link, tenant: str) -> None:
        self.tenant = tenant
        self._link = link
        self._bus = NatsBus(link, SystemClock())

    @classmethod
    async def open(cls, endpoint: Endpoint, timeout_s: float) -> "Connection":
        """Connect; `Unavailable` when the server is away, `Refused` when it does not know our key."""
        identity = Identity.client(endpoint.tenant, endpoint.seed_file, f"torpor sdk ({endpoint.tenant})")
        with _as_sdk_errors("see `torpor status`, and `torpor up` if it is not running"):
            return cls(await Link.open(endpoint.nats_url, identity, timeout_s=timeout_s), endpoint.tenant)

    async def close(self) -> None:
        """Close; what was published is sent first."""
        await self._link.close()

    def tell_reconnects(self, notify: Callable[[], None]) -> Callable[[], None]:
        """Call `notify` after each reconnect, until the function returned is called.

        Whoever follows something live must then look for what was missed.
        """
        return self._link.on_reconnect(notify)

    def inbox(self) -> str:
        """A fresh subject on which only we can be reached."""
        return self._link.client.new_inbox()

    async def subscribe(self, subject: str, handle: Callable[[Msg], Awaitable[None]]) -> Subscription:
        """Receive what is published on `subject` from now on."""
        with _as_sdk_errors(), as_torpor_errors(subject):
            return await self._link.client.subscribe(subject, cb=handle)

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Receive no more; nothing to do when the connection is gone."""
        with suppress(NatsError):
            await subscription.unsubscribe()

    async def publish(self, subject: str, data: bytes) -> None:
        """Publish on a core subject."""
        with _as_sdk_errors():
            await self._link.publish(subject, data)

    async def command(
        self, service: str, target: str, command: msgspec.Struct, command_id: str, timeout_s: float
    ) -> Receipt:
        """Publish a command and wait for its receipt; published again under the same id while nobody answers.

        Raises a `Refused` when it was refused, `Unavailable` when nobody answered within `timeout_s`.
        """
        outgoing = OutgoingCommand(
            tenant_id=TenantId(self.tenant),
            service=service,
            target=target,
            command=command,
            command_id=CommandId(command_id),
        )
        loop = asyncio.get_running_loop()
        deadline_s, pause_s = loop.time() + timeout_s, ATTEMPT_S_FIRST
        reason = "nobody answered"
        for _ in range(ATTEMPTS_MAX):
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                break
            try:
                with _as_sdk_errors():
                    answer = await self._bus.call(outgoing, min(pause_s, left_s))
            except Unavailable as away:
                # A time-out has waited already; a refusal to store comes at once, and time must pass.
                reason = away.message
                began_s = deadline_s - left_s
                await asyncio.sleep(max(0.0, min(0.2, left_s) - (loop.time() - began_s)))
                pause_s = min(pause_s * 2, ATTEMPT_S_MAX)
                continue
            reply = msgspec.json.decode(answer, type=Reply)
            if reply.receipt is not None:
                return reply.receipt
            if reply.refusal is not None:
                raise refusal_error(reply.refusal)
        raise Unavailable(
            f"no receipt for {command.__struct_config__.tag} within {timeout_s:g} s: {reason}",
            f"see `torpor status`; asking again with command id {command_id} is safe, it happens at most once",
            command_id,
        )

    async def query(
        self,
        service: str,
        kind: str,
        target: str = "-",
        parameters: Mapping[str, Any] | None = None,
        timeout_s: float = 10.0,
    ) -> Any:
        """Ask a service; its answer, of the type that `torpor_contracts.registry.QUERIES` states.

        Reads are repeated freely, a bounded number of times.
        """
        with _as_sdk_errors():
            subject = subjects.query(self.tenant, service, kind, target)
        given = {name: value for name, value in (parameters or {}).items() if value is not None}
        body = await self.ask(subject, json.dumps(given).encode(), timeout_s, f"the {service} does not answer")
        fields = json.loads(body)
        if isinstance(fields, dict) and fields.get("refusal"):
            raise refusal_error(msgspec.convert(fields["refusal"], Refusal))
        return msgspec.convert(fields, QUERIES[service][kind].answer, strict=False)

    async def newest(self, stream: str, subject: str, timeout_s: float = 10.0) -> Msg | None:
        """The newest message that a stream holds on a subject."""
        with _as_sdk_errors():
            message = await self._link.request(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", timeout_s)
        return None if (message.headers or {}).get("Status") == "404" else message

    async def ask(self, subject: str, data: bytes, timeout_s: float, complaint: str, patience_s: float = 1.0) -> bytes:
        """One request with its answer; asked again, after a pause, while nobody is there to answer.

        `patience_s` is how long the first try waits.
        """
        loop = asyncio.get_running_loop()
        deadline_s, pause_s = loop.time() + timeout_s, 0.05
        reason = "no answer"
        for _ in range(ASKS_MAX):
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                break
            try:
                with _as_sdk_errors():
                    return await self._bus.query(subject, data, min(patience_s, left_s))
            except Unavailable as away:
                reason = away.message
                await asyncio.sleep(min(pause_s, max(0.0, deadline_s - loop.time())))
                # A server that has just come back may swallow a request; a busy service needs patience.
                patience_s = min(patience_s * 2, max(patience_s, _ASK_S_MAX))
                pause_s = min(pause_s * 2, 1.0)
        raise Unavailable(f"{complaint}: {reason}", "see `torpor status`")


@contextmanager
def _as_sdk_errors(advice: str = "see `torpor status`") -> Iterator[None]:
    try:
        yield
    except Refused:
        raise
    except Rejected as error:
        raise refused(error.code, error.message, error.advice) from error
    except Transient as error:
        raise Unavailable(str(error), advice) from error

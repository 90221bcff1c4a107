"""One NATS connection of one tenant: commands with their receipts, questions with their answers, subscriptions."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from torpor.client.discovery import Endpoint
from torpor.client.refusals import refusal_error
from torpor.errors import Unavailable
from torpor_contracts.ids import CommandId, TenantId
from torpor_contracts.registry import QUERIES
from torpor_contracts.replies import Receipt, Refusal, Reply
from torpor_messaging import subjects
from torpor_messaging.envelope import REPLY, encode_command
from torpor_messaging.ports import OutgoingCommand

ATTEMPT_S_FIRST: Final = 2.0
ATTEMPTS_MAX: Final = 8
"""A command is published again, under the same id, after 2, 4, 8, 8… seconds without an answer, at most so often."""
_RECONNECT_PAUSE_S: Final = 0.2
_RECONNECTS_MAX: Final = 600


class Connection:
    """Publishes, asks and subscribes as one tenant; outlives restarts of the server for about two minutes."""

    def __init__(self, client: NatsClient, tenant: str) -> None:
        self.tenant = tenant
        self.reconnects = 0
        self._client = client
        self._inbox = client.new_inbox()
        self._answers: dict[str, asyncio.Queue[Msg]] = {}
        self._next_answer = 0
        self._on_reconnect: set[Callable[[], None]] = set()

    @classmethod
    async def open(cls, endpoint: Endpoint, timeout_s: float) -> "Connection":
        """Connect; `Unavailable` when the server is away or does not know our key."""
        client = NatsClient()
        connection: Connection | None = None

        async def reconnected() -> None:
            if connection is not None:
                connection.note_reconnect()

        async def noted(_error: Exception) -> None:
            """Errors of single operations come back from them; nothing is to be printed."""

        seed = _seed(endpoint)
        try:
            await asyncio.wait_for(
                client.connect(
                    endpoint.nats_url,
                    name=f"torpor sdk ({endpoint.tenant})",
                    nkeys_seed_str=seed,
                    inbox_prefix=subjects.inbox_prefix(endpoint.tenant),
                    error_cb=noted,
                    reconnected_cb=reconnected,
                    connect_timeout=2,
                    reconnect_time_wait=_RECONNECT_PAUSE_S,  # type: ignore[arg-type]  # seconds, fractions too
                    max_reconnect_attempts=3,
                ),
                timeout_s,
            )
        except (OSError, NatsError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            advice = "see `torpor status`, and `torpor up` if it is not running"
            if "authorization" in reason.lower():
                advice = "use the seed file of a user of this server (TORPOR_NKEY_SEED_FILE)"
            raise Unavailable(f"cannot connect to NATS at {endpoint.nats_url}: {reason}", advice) from error
        client.options["max_reconnect_attempts"] = _RECONNECTS_MAX
        connection = cls(client, endpoint.tenant)
        await client.subscribe(f"{connection._inbox}.*", cb=connection._answered)
        return connection

    async def close(self) -> None:
        """Close; what was published is sent first."""
        if self._client.is_connected:
            with suppress(NatsError, TimeoutError):
                await self._client.flush(1)
        await self._client.close()

    def note_reconnect(self) -> None:
        """The server was away: whoever follows something live must look for what it missed."""
        self.reconnects += 1
        for notify in tuple(self._on_reconnect):
            notify()

    def tell_reconnects(self, notify: Callable[[], None]) -> Callable[[], None]:
        """Call `notify` after each reconnect, until the function returned is called."""
        self._on_reconnect.add(notify)
        return lambda: self._on_reconnect.discard(notify)

    def inbox(self) -> str:
        """A fresh subject on which only we can be reached."""
        return self._client.new_inbox()

    async def subscribe(self, subject: str, handle: Callable[[Msg], Awaitable[None]]) -> Subscription:
        """Receive what is published on `subject` from now on."""
        try:
            return await self._client.subscribe(subject, cb=handle)
        except NatsError as error:
            raise _away(error) from error

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Receive no more; nothing to do when the connection is gone."""
        try:
            await subscription.unsubscribe()
        except NatsError:
            return

    async def publish(self, subject: str, data: bytes) -> None:
        """Publish on a core subject."""
        try:
            await self._client.publish(subject, data)
        except NatsError as error:
            raise _away(error) from error

    # --- commands ---------------------------------------------------------------------------------------------

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
        message = encode_command(outgoing, "torpor/sdk", datetime.now(UTC))
        self._next_answer += 1
        token = str(self._next_answer)
        answers = self._answers[token] = asyncio.Queue(maxsize=2 * ATTEMPTS_MAX)
        inbox = f"{self._inbox}.{token}"
        headers = {**message.headers, REPLY: inbox}
        loop = asyncio.get_running_loop()
        deadline_s, pause_s = loop.time() + timeout_s, ATTEMPT_S_FIRST
        reason = "nobody answered"
        try:
            for _ in range(ATTEMPTS_MAX):
                left_s = deadline_s - loop.time()
                if left_s <= 0:
                    break
                try:
                    # The same inbox takes the stream's acknowledgement and the service's reply, whichever comes.
                    await self._client.publish(message.subject, message.data, reply=inbox, headers=headers)
                    answer = await self._answer(answers, min(pause_s, left_s))
                except NatsError as error:
                    answer, reason = None, f"NATS is away ({type(error).__name__})"
                    await asyncio.sleep(min(pause_s, left_s))
                if isinstance(answer, Receipt):
                    return answer
                reason = answer or reason
                pause_s = min(pause_s * 2, 8.0)
        finally:
            del self._answers[token]
        raise Unavailable(
            f"no receipt for {command.__struct_config__.tag} within {timeout_s:g} s: {reason}",
            f"see `torpor status`; asking again with command id {command_id} is safe, it happens at most once",
            command_id,
        )

    async def _answer(self, answers: asyncio.Queue[Msg], timeout_s: float) -> Receipt | str | None:
        """The receipt; or why there is none yet."""
        stored = "the command was not stored: NATS did not acknowledge it"
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            try:
                message = await asyncio.wait_for(answers.get(), max(0.0, deadline_s - loop.time()))
            except TimeoutError:
                return stored
            if (message.headers or {}).get("Status") == "503":
                stored = "the stream COMMANDS is not there"
                continue
            body = json.loads(message.data)
            if "stream" in body and "seq" in body:
                stored = "the command is stored, and waits for its service"
            elif "error" in body:
                stored = f"the command was not stored: {body['error'].get('description')}"
            else:
                reply = msgspec.json.decode(message.data, type=Reply)
                if reply.receipt is not None:
                    return reply.receipt
                if reply.refusal is not None:
                    raise refusal_error(reply.refusal)

    async def _answered(self, message: Msg) -> None:
        answers = self._answers.get(message.subject.rpartition(".")[2])
        if answers is not None and not answers.full():
            answers.put_nowait(message)

    # --- questions --------------------------------------------------------------------------------------------

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
        subject = subjects.query(self.tenant, service, kind, target)
        data = json.dumps(dict(parameters or {})).encode()
        body = await self.request(subject, data, timeout_s, f"the {service} does not answer")
        fields = json.loads(body)
        if isinstance(fields, dict) and fields.get("refusal"):
            raise refusal_error(msgspec.convert(fields["refusal"], Refusal))
        return msgspec.convert(fields, QUERIES[service][kind].answer, strict=False)

    async def request(self, subject: str, data: bytes, timeout_s: float, complaint: str) -> bytes:
        """One request with its answer; asked again, with a pause, while nobody is there to answer."""
        loop = asyncio.get_running_loop()
        deadline_s, pause_s = loop.time() + timeout_s, 0.05
        reason = "no answer"
        for _ in range(64):
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                break
            try:
                answer = await self._client.request(subject, data, timeout=min(5.0, left_s))
            except (NatsError, TimeoutError) as error:
                reason = type(error).__name__
                await asyncio.sleep(min(pause_s, left_s))
                pause_s = min(pause_s * 2, 1.0)
            else:
                return answer.data
        raise Unavailable(f"{complaint} ({reason})", "see `torpor status`")


def _seed(endpoint: Endpoint) -> str | None:
    if endpoint.seed_file is None:
        return None
    try:
        return endpoint.seed_file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise Unavailable(
            f"cannot read the seed file {endpoint.seed_file}: {error.strerror}",
            "run as the user who owns the data directory, or name another with TORPOR_NKEY_SEED_FILE",
        ) from error


def _away(error: NatsError) -> Unavailable:
    return Unavailable(f"NATS is away ({type(error).__name__})", "see `torpor status`")

"""Reads what JetStream streams hold, in order and without gaps, from any sequence on, and then what comes.

Each reader is an ephemeral consumer whose filter stands in the subject of its creation, so that the server's
permissions can fence a tenant. It is made anew after the last message seen whenever one is missing, whenever the
connection was lost, and whenever its heartbeat stays away.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final

from nats.aio.msg import Msg

from torpor.client.connection import Connection
from torpor.errors import Unavailable

_HEARTBEAT_S: Final = 2.0
_SILENCE_S: Final = 3 * _HEARTBEAT_S
_WAITING_MAX: Final = 1024
_RENEWALS_MAX: Final = 60
"""Consumers made in a row without one message in between, before a reader gives up."""


@dataclass(frozen=True)
class StoredMessage:
    """A message of a stream; `source` is the reader it came by."""

    source: "StreamReader"
    sequence: int
    subject: str
    headers: dict[str, str]
    data: bytes


class StreamReader:
    """One filter on one stream, read from `from_sequence` on."""

    def __init__(self, connection: Connection, stream: str, subject: str, from_sequence: int = 1) -> None:
        self.stream = stream
        self.subject = subject
        self.next_sequence = max(from_sequence, 1)
        self.pending = 0
        self.heard_s = 0.0
        self._connection = connection
        self._name = self._deliver = ""
        self._last = 0
        self._renewals = 0
        self._subscription: Any = None
        self._forget: Callable[[], None] = lambda: None

    async def open(self, waiting: "Waiting") -> None:
        """Make the consumer, delivering into `waiting`; to be called again to make it anew."""
        await self.close()
        self._renewals += 1
        if self._renewals > _RENEWALS_MAX:
            raise Unavailable(f"the stream {self.stream} cannot be followed", "see `torpor status`")
        deliver = self._deliver = self._connection.inbox()
        self._name, self._last = f"sdk-{deliver.rpartition('.')[2].lower()}", 0

        async def received(message: Msg) -> None:
            # Waits while the queue is full; the server then waits too, as its flow control goes unanswered.
            await waiting.put((self, deliver, message))

        def reconnected() -> None:
            if not waiting.full():
                waiting.put_nowait((self, deliver, None))

        self._subscription = await self._connection.subscribe(deliver, received)
        self._forget = self._connection.tell_reconnects(reconnected)
        request = json.dumps({"stream_name": self.stream, "config": self._config(deliver)}).encode()
        answer = json.loads(
            await self._connection.ask(
                f"$JS.API.CONSUMER.CREATE.{self.stream}.{self._name}.{self.subject}",
                request,
                10.0,
                f"the stream {self.stream} does not answer",
            )
        )
        if "error" in answer:
            raise Unavailable(
                f"the stream {self.stream} cannot be read: {answer['error'].get('description')}", "see `torpor status`"
            )
        self.pending = int(answer["num_pending"])
        self.heard_s = asyncio.get_running_loop().time()

    def _config(self, deliver: str) -> dict[str, Any]:
        return {
            "name": self._name,
            "deliver_subject": deliver,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self.next_sequence,
            "filter_subject": self.subject,
            "ack_policy": "none",
            "max_deliver": 1,
            "flow_control": True,
            "idle_heartbeat": int(_HEARTBEAT_S * 1e9),
            "inactive_threshold": int(10e9),
            "mem_storage": True,
            "num_replicas": 1,
        }

    async def close(self) -> None:
        """Drop the consumer. The server drops it by itself after a while, so nothing hangs on this."""
        self._forget()
        if self._subscription is None:
            return
        subscription, self._subscription = self._subscription, None
        await self._connection.unsubscribe(subscription)
        with suppress(Unavailable):
            await self._connection.publish(f"$JS.API.CONSUMER.DELETE.{self.stream}.{self._name}", b"")

    async def judge(self, deliver: str, message: Msg | None) -> StoredMessage | bool:
        """The stored message that came; True for a sign of life, False when something is missing."""
        if deliver != self._deliver:
            return True  # of a consumer given up before
        if message is None:
            return False
        self.heard_s = asyncio.get_running_loop().time()
        headers = message.headers or {}
        if headers.get("Status") == "100":
            # A request to answer when we have come so far: what makes the server wait for us.
            answer_to = message.reply or headers.get("Nats-Consumer-Stalled")
            if answer_to:
                await self._connection.publish(answer_to, b"")
            return int(headers.get("Nats-Last-Consumer", self._last)) <= self._last
        if not message.reply:
            return True
        place = message.metadata
        if place.sequence.consumer != self._last + 1:
            return False
        self._last, self._renewals = place.sequence.consumer, 0
        self.next_sequence, self.pending = place.sequence.stream + 1, place.num_pending
        return StoredMessage(self, place.sequence.stream, message.subject, dict(headers), message.data)


Waiting = asyncio.Queue[tuple[StreamReader, str, Msg | None]]
"""What readers have received, on which inbox, and nobody has looked at yet; no message: reconnected."""


def waiting_queue() -> Waiting:
    """An empty queue for readers to deliver into; bounded."""
    return asyncio.Queue(maxsize=_WAITING_MAX)


async def merged(waiting: Waiting, readers: Sequence[StreamReader]) -> AsyncGenerator[StoredMessage, None]:
    """Messages of opened readers as they come, each reader's in order; for ever. The caller closes the readers."""
    loop = asyncio.get_running_loop()
    while True:
        if waiting.empty():
            silent_at_s = min(reader.heard_s for reader in readers) + _SILENCE_S
            try:
                # Not `wait_for`, which can lose a cancellation that comes together with a message.
                async with asyncio.timeout_at(max(silent_at_s, loop.time() + 0.01)):
                    reader, deliver, message = await waiting.get()
            except TimeoutError:
                for quiet in readers:
                    if quiet.heard_s + _SILENCE_S <= loop.time():
                        await quiet.open(waiting)
                continue
        else:
            # A wait costs a task; a replay of many messages rarely has to wait.
            reader, deliver, message = waiting.get_nowait()
        verdict = await reader.judge(deliver, message)
        if isinstance(verdict, StoredMessage):
            yield verdict
        elif not verdict:
            await reader.open(waiting)


async def read_stream(
    connection: Connection, stream: str, subject: str, from_sequence: int = 1, *, follow: bool = False
) -> AsyncGenerator[StoredMessage, None]:
    """Messages on `subject` from `from_sequence` on; ends with the last one stored now, or never when `follow`."""
    reader = StreamReader(connection, stream, subject, from_sequence)
    waiting = waiting_queue()
    try:
        await reader.open(waiting)
        if not reader.pending and not follow:
            return
        async with aclosing(merged(waiting, [reader])) as messages:
            async for message in messages:
                yield message
                if not reader.pending and not follow:
                    return
    finally:
        await reader.close()

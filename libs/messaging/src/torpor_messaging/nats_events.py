"""The stream `EVENTS`: published by the relay with a fence, followed by everybody, and read whole by an audit.

It is a copy. Nothing here decides what is true, and nothing here repairs: `torpor_eventlog` does, from the log.
"""

import asyncio
import base64
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

from nats.aio.msg import Msg

from torpor_contracts.errors import Poison, TorporError, Transient
from torpor_eventlog.following import Backoff
from torpor_eventlog.healing import Carried
from torpor_eventlog.port import Recorded
from torpor_eventlog.relay import FencedOut, StreamEnd, StreamMismatch
from torpor_messaging.envelope import decode_event_message, encode_event
from torpor_messaging.nats_errors import WRONG_LAST_SEQUENCE, api_error, as_torpor_errors
from torpor_messaging.nats_link import Link
from torpor_messaging.streams import EVENTS, recreate_events

PUBLISHED_S: Final = 10.0
"""How long a window of publishes waits for all its answers."""

PULL_MAX: Final = 500
PULL_BYTES_MAX: Final = 8 * 1024 * 1024
PULL_S: Final = 30.0
HEARTBEAT_S: Final = 10.0
SILENCE_S: Final = 2.5 * HEARTBEAT_S
"""So long without even a heartbeat, and a follower asks anew."""

FORGOTTEN_S: Final = 60.0
"""When the server forgets a follower that asks no more."""

READ_S: Final = 10.0
READ_MAX: Final = 1000
"""The most messages the server hands out for one direct request."""
_log: Final = logging.getLogger(__name__)
_NOTHING: Final = "404"
_END_OF_BATCH: Final = "204"
_HEARTBEAT: Final = "100"
_REQUEST_ENDED: Final = ("Batch Completed", "Message Size Exceeds MaxBytes", "Exceeded MaxWaiting")


class NatsEventStream:
    """`torpor_eventlog.relay.EventStream`, and for an administrator `torpor_eventlog.audit.stream.StoredStream`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._inbox = ""
        self._window: _Window | None = None

    async def last(self) -> StreamEnd:
        """See `EventStream.last`."""
        answer = await self._link.api(f"STREAM.INFO.{EVENTS}")
        if "error" in answer:
            raise api_error(f"stream {EVENTS}", answer["error"])
        sequence = int(answer["state"]["last_seq"])
        if sequence == 0:
            return StreamEnd(0, None)
        _, row = await self._stored(sequence)
        return StreamEnd(sequence, None if row is None else row.digest)

    async def publish(self, rows: Sequence[Recorded]) -> None:
        """See `EventStream.publish`. `StreamMismatch` when what took a refused position is no copy of its row."""
        if not rows:
            return
        client = self._link.client
        if not self._inbox:
            self._inbox = client.new_inbox()
            with as_torpor_errors("listening for the stream's answers"):
                await client.subscribe(f"{self._inbox}.*", cb=self._answered)
        window = self._window = _Window(rows[0].position, len(rows))
        try:
            with as_torpor_errors(f"relaying to {EVENTS}"):
                await self._link.publish_many(self._fenced(row) for row in rows)
                async with asyncio.timeout(PUBLISHED_S):
                    await window.done
        except FencedOut:
            await self._check_fence(rows[window.refused - rows[0].position])
            raise
        finally:
            self._window = None
            window.done.cancel()

    async def read(self, after_sequence: int, limit: int) -> list[Carried]:
        """See `StoredStream.read`."""
        client = self._link.client
        inbox = client.new_inbox()
        with as_torpor_errors(f"reading {EVENTS}"):
            subscription = await client.subscribe(inbox)
            try:
                ask = {
                    "batch": min(limit, READ_MAX),
                    "max_bytes": PULL_BYTES_MAX,
                    "seq": after_sequence + 1,
                    "next_by_subj": "evt.>",
                }
                await client.publish(f"$JS.API.DIRECT.GET.{EVENTS}", json.dumps(ask).encode(), reply=inbox)
                found: list[Carried] = []
                async with asyncio.timeout(READ_S):
                    while True:
                        message = await subscription.next_msg(READ_S)
                        headers = message.headers or {}
                        status = headers.get("Status")
                        if status in (_NOTHING, _END_OF_BATCH):
                            return found
                        if status is not None:
                            raise Transient(f"reading {EVENTS}: {status} {headers.get('Description', '')}")
                        found.append(Carried(int(headers["Nats-Sequence"]), _row(headers, message.data)))
            finally:
                await subscription.unsubscribe()

    async def recreate(self) -> None:
        """See `StoredStream.recreate`."""
        await recreate_events(self._link)

    async def _check_fence(self, refused: Recorded) -> None:
        """Another relay's copy in our way is none of our business; anything else an operator must hear of."""
        found, row = await self._stored(refused.position)
        if found and row != refused:
            raise StreamMismatch(refused.position, "something that is no copy of the log's row stands there")

    async def _stored(self, sequence: int) -> tuple[bool, Recorded | None]:
        """Whether there is a message of that sequence, and the row it carries."""
        answer = await self._link.api(f"STREAM.MSG.GET.{EVENTS}", {"seq": sequence})
        if "error" in answer:
            return False, None
        message = answer["message"]
        headers = _headers(base64.b64decode(message.get("hdrs", "")))
        return True, _row(headers, base64.b64decode(message.get("data", "")))

    def _fenced(self, row: Recorded) -> tuple[str, str, dict[str, str], bytes]:
        subject, headers, data = encode_event(row)
        headers["Nats-Expected-Last-Sequence"] = str(row.position - 1)
        headers["Nats-Expected-Stream"] = EVENTS
        return subject, f"{self._inbox}.{row.position}", headers, data

    async def _answered(self, message: Msg) -> None:
        window = self._window
        if window is not None:
            window.answered(int(message.subject.rpartition(".")[2]), message)


class _Window:
    """The publishes in flight, and the first answer that says no."""

    def __init__(self, first: int, count: int) -> None:
        self._missing = set(range(first, first + count))
        self.refused = first
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answered(self, position: int, message: Msg) -> None:
        """Take the server's answer to the publish of `position`."""
        if position not in self._missing or self.done.done():
            return
        error = _publish_error(position, message)
        if error is not None:
            self.refused = position
            self.done.set_exception(error)
            return
        self._missing.remove(position)
        if not self._missing:
            self.done.set_result(None)


def _publish_error(position: int, message: Msg) -> TorporError | None:
    if b'"error"' not in message.data and b'"seq"' in message.data:
        return None
    if (message.headers or {}).get("Status") == "503":
        return Transient(f"there is no stream {EVENTS}", retry_after_s=1.0)
    error: dict[str, Any] = json.loads(message.data or b"{}").get("error", {})
    if error.get("err_code") in WRONG_LAST_SEQUENCE:
        return FencedOut(f"position {position} was refused: {error.get('description')}")
    return api_error(f"relaying position {position}", error)


class NatsEventSource:
    """`torpor_eventlog.healing.StreamSource`: a consumer of its own for each follower, which nobody else can guess."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def follow(self, after_sequence: int) -> AsyncGenerator[list[Carried], None]:
        """See `StreamSource.follow`."""
        puller = _Puller(self._link)
        await puller.open(after_sequence)
        try:
            while True:
                yield await puller.batch()
        finally:
            await puller.close()


class PatientEventSource:
    """A source that never ends: while the stream is away it waits, and then goes on after the last message it gave.

    So a `HealingFeed` over it, which looks into the log after some silence, serves its followers all the time.
    """

    def __init__(self, source: NatsEventSource) -> None:
        self._source = source

    async def follow(self, after_sequence: int) -> AsyncGenerator[list[Carried], None]:
        """See `StreamSource.follow`."""
        backoff = Backoff(first_s=0.05, max_s=2.0)
        while True:
            try:
                async with aclosing(self._source.follow(after_sequence)) as batches:
                    async for batch in batches:
                        backoff.worked()
                        yield batch
                        after_sequence = batch[-1].sequence
            except Transient as error:
                _log.info("%s; again soon", error)
            await asyncio.sleep(backoff.failed())


class _Puller:
    """Asks for messages in bounded portions, one request at a time, so that who reads slowly is sent little."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._client = link.client
        self._arrived: deque[Msg] = deque()
        self._something = asyncio.Event()
        self._due = 0
        self._next_consumer_sequence = 1
        self._lost = False
        self._forget: Callable[[], None] = lambda: None

    async def open(self, after_sequence: int) -> None:
        """Make the consumer. `Transient` when the stream is not there."""
        self._inbox = self._client.new_inbox()
        self._name = f"follow-{self._inbox.rpartition('.')[2]}"
        with as_torpor_errors(f"following {EVENTS}"):
            self._subscription = await self._client.subscribe(self._inbox, cb=self._arrive)
        self._forget = self._link.on_reconnect(self._connection_lost)
        config = {
            "name": self._name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": after_sequence + 1,
            "filter_subject": "evt.>",
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(FORGOTTEN_S * 1e9),
        }
        try:
            answer = await self._link.api(
                f"CONSUMER.CREATE.{EVENTS}.{self._name}.evt.>", {"stream_name": EVENTS, "config": config}
            )
            if "error" in answer:
                raise api_error(f"following {EVENTS}", answer["error"])
        except TorporError:
            await self.close()
            raise

    async def batch(self) -> list[Carried]:
        """What has arrived since the last call, at least one message."""
        while not self._arrived:
            if self._lost:
                raise Transient(f"following {EVENTS}: the connection was lost", retry_after_s=0.1)
            if self._due <= 0:
                await self._ask()
            self._something.clear()
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._something.wait()
            except TimeoutError:
                raise Transient(f"following {EVENTS}: the server is silent", retry_after_s=0.1) from None
        found = []
        while self._arrived:
            found.append(self._carried(self._arrived.popleft()))
        return found

    async def close(self) -> None:
        """Let the consumer go; the server forgets it by itself when it does not hear of this."""
        self._forget()
        try:
            with as_torpor_errors(f"following {EVENTS}"):
                await self._subscription.unsubscribe()
                await self._client.publish(f"$JS.API.CONSUMER.DELETE.{EVENTS}.{self._name}")
        except TorporError:
            return

    async def _ask(self) -> None:
        request = {
            "batch": PULL_MAX,
            "max_bytes": PULL_BYTES_MAX,
            "expires": int(PULL_S * 1e9),
            "idle_heartbeat": int(HEARTBEAT_S * 1e9),
        }
        self._due = PULL_MAX
        with as_torpor_errors(f"following {EVENTS}"):
            await self._client.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{EVENTS}.{self._name}", json.dumps(request).encode(), reply=self._inbox
            )

    async def _arrive(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get("Status")
        if status is None:
            self._due -= 1
            self._arrived.append(message)
        elif status != _HEARTBEAT:
            said = headers.get("Description", "")
            if status in (_NOTHING, "408") or said.startswith(_REQUEST_ENDED):
                self._due = 0
            else:
                # The consumer or its stream is gone, or the server is about to be.
                self._lost = True
        self._something.set()

    def _connection_lost(self) -> None:
        self._lost = True
        self._something.set()

    def _carried(self, message: Msg) -> Carried:
        stream_sequence, consumer_sequence = _sequences(message.reply)
        if consumer_sequence != self._next_consumer_sequence:
            raise Transient(f"following {EVENTS}: a message got lost on its way", retry_after_s=0.1)
        self._next_consumer_sequence += 1
        return Carried(stream_sequence, _row(message.headers or {}, message.data))


def _sequences(reply: str) -> tuple[int, int]:
    """Stream and consumer sequence of `$JS.ACK[.<domain>.<account>].<stream>.<consumer>.<n>.<stream>.<consumer>…`."""
    tokens = reply.split(".")
    first = 5 if len(tokens) == 9 else 7  # noqa: PLR2004  (the form without domain and account)
    return int(tokens[first]), int(tokens[first + 1])


def _row(headers: dict[str, str], data: bytes) -> Recorded | None:
    try:
        return decode_event_message(headers, data)
    except Poison:
        return None


def _headers(block: bytes) -> dict[str, str]:
    found = {}
    for line in block.decode(errors="replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            found[name] = value.strip()
    return found

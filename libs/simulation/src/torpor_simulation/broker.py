"""The simulated server: JetStream's streams and durable consumers, and core subjects, all in one loop's memory.

It models what Torpor relies on: work queues, explicit acknowledgement with a wait, attempts and their bound, windows of
message ids, fenced sequences, message schedules. It outlives every process of the world.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from torpor_simulation.clock import BEGINNING
from torpor_simulation.consumer import Consumer, ConsumerSpec
from torpor_simulation.network import Network
from torpor_simulation.subjects import matches, split

DEDUP_WINDOW_S: Final = 120.0
WRONG_LAST_SEQUENCE: Final = 10071
"""JetStream's `err_code` when `Nats-Expected-Last-Sequence` does not hold."""


class Refused(Exception):  # noqa: N818  (the server's answer)
    """The server refused a publication; `code` is JetStream's `err_code`."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code


@dataclass(frozen=True)
class StoredMessage:
    """A message as a stream keeps it."""

    sequence: int
    subject: str
    headers: Mapping[str, str]
    data: bytes


@dataclass(frozen=True)
class StreamSpec:
    """A stream: the subjects it captures, whether handled messages leave it, and whether it keeps one a subject."""

    name: str
    subjects: tuple[str, ...]
    work_queue: bool = False
    one_per_subject: bool = False


@dataclass
class Stream:
    """A stream's content and its consumers."""

    spec: StreamSpec
    patterns: tuple[tuple[str, ...], ...]
    messages: dict[int, StoredMessage] = field(default_factory=dict)
    last_sequence: int = 0
    newest: dict[str, int] = field(default_factory=dict)
    ids: dict[str, tuple[int, float]] = field(default_factory=dict)
    consumers: dict[str, Consumer] = field(default_factory=dict)
    appended: list[asyncio.Future[None]] = field(default_factory=list)


class Broker:
    """The server. Its methods happen at once; delay and loss are the network's, on the way here and back."""

    def __init__(self, network: Network, streams: Sequence[StreamSpec]) -> None:
        self.network = network
        self._loop = asyncio.get_running_loop()
        self.streams = {spec.name: Stream(spec, tuple(split(subject) for subject in spec.subjects)) for spec in streams}
        self._core: dict[int, tuple[tuple[str, ...], Callable[[str, Mapping[str, str], bytes], None]]] = {}
        self._next_core = 0
        self._schedules: dict[str, asyncio.TimerHandle] = {}
        self.copies: dict[str, int] = {}
        """How many copies of each command were delivered or may be: publications, and duplicates the network made."""
        network.on_healed.append(self._pump)

    def publish(self, subject: str, headers: Mapping[str, str], data: bytes) -> int | None:
        """Store the message if a stream captures its subject (its sequence), and hand it to core subscribers."""
        tokens = split(subject)
        for stream in self.streams.values():
            if any(matches(pattern, tokens) for pattern in stream.patterns):
                return self._store(stream, subject, headers, data)
        self.publish_core(subject, headers, data)
        return None

    def publish_core(self, subject: str, headers: Mapping[str, str], data: bytes) -> int:
        """Hand a message to everybody who listens now; answers how many that were."""
        tokens = split(subject)
        heard = [hear for pattern, hear in list(self._core.values()) if matches(pattern, tokens)]
        for hear in heard:
            hear(subject, headers, data)
        return len(heard)

    def listen(self, pattern: str, hear: Callable[[str, Mapping[str, str], bytes], None]) -> Callable[[], None]:
        """Hear core messages whose subject matches; the answer ends it."""
        key = self._next_core
        self._next_core += 1
        self._core[key] = (split(pattern), hear)

        def end() -> None:
            self._core.pop(key, None)

        return end

    def consumer(self, stream_name: str, spec: ConsumerSpec) -> Consumer:
        """The durable consumer of that name, made if it is not there yet."""
        stream = self.streams[stream_name]
        known = stream.consumers.get(spec.durable)
        if known is not None:
            return known
        made = Consumer(self, stream_name, spec)
        stream.consumers[spec.durable] = made
        for message in stream.messages.values():
            made.offer(message)
        return made

    def message(self, stream_name: str, sequence: int) -> StoredMessage | None:
        """A stored message, or None when it is not there (any more)."""
        return self.streams[stream_name].messages.get(sequence)

    def handled(self, stream_name: str, sequence: int) -> None:
        """A consumer is done with a message: a work queue forgets it."""
        stream = self.streams[stream_name]
        if stream.spec.work_queue:
            stream.messages.pop(sequence, None)

    def advise(self, kind: str, stream_name: str, durable: str, body: Mapping[str, object]) -> None:
        """Publish an advisory about a consumer, as the server does; a stream may capture it."""
        subject = f"$JS.EVENT.ADVISORY.CONSUMER.{kind}.{stream_name}.{durable}"
        advice = {"type": f"io.nats.jetstream.advisory.v1.{kind.lower()}", "stream": stream_name, "consumer": durable}
        self.publish(subject, {}, json.dumps({**advice, **body}).encode())

    async def appended(self, stream_name: str) -> None:
        """Wait for the stream's next message."""
        future: asyncio.Future[None] = self._loop.create_future()
        self.streams[stream_name].appended.append(future)
        await future

    def count_copy(self, message: StoredMessage) -> None:
        """Another copy of this message is on its way."""
        command_id = message.headers.get("ce-id")
        if command_id is not None:
            self.copies[command_id] = self.copies.get(command_id, 0) + 1

    def forget_schedules(self) -> None:
        """Lose every schedule that waits, as if the stream of timers had been lost."""
        for handle in self._schedules.values():
            handle.cancel()
        self._schedules.clear()

    def _pump(self) -> None:
        for stream in self.streams.values():
            for consumer in stream.consumers.values():
                consumer.pump()

    def _store(self, stream: Stream, subject: str, headers: Mapping[str, str], data: bytes) -> int:
        expected = headers.get("Nats-Expected-Last-Sequence")
        message_id = headers.get("Nats-Msg-Id")
        if message_id is not None:
            known = stream.ids.get(message_id)
            if known is not None and self._loop.time() - known[1] <= DEDUP_WINDOW_S:
                return known[0]
        if expected is not None and int(expected) != stream.last_sequence:
            raise Refused(WRONG_LAST_SEQUENCE, f"wrong last sequence: {stream.last_sequence}")
        if "Nats-Schedule" in headers:
            self._schedule(stream, subject, headers, data)
        stream.last_sequence += 1
        message = StoredMessage(stream.last_sequence, subject, headers, data)
        stream.messages[message.sequence] = message
        if stream.spec.one_per_subject:
            stream.messages.pop(stream.newest.get(subject, 0), None)
            stream.newest[subject] = message.sequence
        self.count_copy(message)
        if message_id is not None:
            stream.ids[message_id] = (message.sequence, self._loop.time())
        for consumer in stream.consumers.values():
            consumer.offer(message)
        waiting, stream.appended = stream.appended, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        self.publish_core(subject, headers, data)
        return message.sequence

    def _schedule(self, stream: Stream, subject: str, headers: Mapping[str, str], data: bytes) -> None:
        replaced = self._schedules.pop(subject, None)
        if replaced is not None:
            replaced.cancel()
        due_at = datetime.fromisoformat(headers["Nats-Schedule"].removeprefix("@at "))
        late_s = self.network.uniform_s(self.network.faults.schedule_late_s)
        due_s = (due_at - BEGINNING).total_seconds() + late_s
        if self.network.chance(self.network.faults.schedule_lost):
            return
        target = headers["Nats-Schedule-Target"]
        kept = {name: value for name, value in headers.items() if not name.startswith("Nats-")}

        def fire() -> None:
            self._schedules.pop(subject, None)
            stream.messages.pop(stream.newest.get(subject, 0), None)
            self._store(stream, target, kept, data)

        self._schedules[subject] = self._loop.call_at(max(due_s, self._loop.time()), fire)

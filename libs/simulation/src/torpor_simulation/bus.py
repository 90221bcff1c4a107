"""The bus as one simulated process reaches it: production's envelope, the simulated server, and the network between."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from torpor_contracts.errors import Transient
from torpor_messaging import subjects
from torpor_messaging.envelope import REPLY, encode_command
from torpor_messaging.ports import Clock, Ids, OutgoingCommand
from torpor_simulation.broker import Broker, StoredMessage
from torpor_simulation.consumer import INSTANT_S, Consumer
from torpor_simulation.network import Network
from torpor_simulation.process import Process
from torpor_simulation.surroundings import Surroundings

ANSWER_TIMEOUT_S: Final = 2.0
"""How long a publication waits for the server to say that it is stored."""

Answer = Callable[[str, bytes], Awaitable[bytes]]
"""Answers a question: (subject, data) -> data."""


class SimBus:
    """`torpor_messaging.ports.Bus` for one process."""

    def __init__(self, broker: Broker, questions: "Questions", around: Surroundings, clock: Clock, ids: Ids) -> None:
        self._broker = broker
        self._questions = questions
        self._around = around
        self._clock = clock
        self._ids = ids
        self._last_departure_s = 0.0

    async def send(self, command: OutgoingCommand) -> None:
        """Publish a command durably."""
        message = encode_command(command, self._around.process.name, self._clock.now())
        self._around.note("send", message.subject, command.command_id)
        await self._store(message.subject, message.headers, message.data)

    async def call(self, command: OutgoingCommand, timeout_s: float) -> bytes:
        """Publish a command and wait for its reply."""
        message = encode_command(command, self._around.process.name, self._clock.now())
        inbox = f"{subjects.inbox_prefix(command.tenant_id)}.{self._ids.new('r')}"
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def take(_subject: str, _headers: Mapping[str, str], data: bytes) -> None:
            if not answered.done():
                answered.set_result(data)

        end = self.listen(inbox, take)
        self._around.note("call", message.subject, command.command_id)
        storing = asyncio.ensure_future(self._store(message.subject, {**message.headers, REPLY: inbox}, message.data))
        try:
            async with asyncio.timeout(timeout_s):
                # The reply may overtake the server's word that the command is stored; then that is not needed.
                await asyncio.wait((storing, answered), return_when=asyncio.FIRST_COMPLETED)
                if not answered.done():
                    await storing
                return await answered
        except TimeoutError:
            raise Transient(f"{message.subject} was not answered in {timeout_s} s", retry_after_s=0.1) from None
        finally:
            end()
            if not storing.done():
                storing.cancel()
            elif not storing.cancelled():
                storing.exception()
            self._around.process.check()

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Publish without waiting for anybody; the process may die just before."""
        around = self._around
        await around.faults.enter(around.process, f"bus.publish {subject.partition('.')[0]}")
        around.reach_bus()
        loop = asyncio.get_running_loop()
        leaves_s = max(loop.time() + around.network.delay_s(), self._last_departure_s + INSTANT_S)
        self._last_departure_s = leaves_s
        loop.call_at(leaves_s, self._broker.publish_core, subject, dict(headers or {}), data)

    async def publish_stored(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Publish and wait until it is stored."""
        self._around.note("store", subject)
        await self._store(subject, dict(headers or {}), data)

    async def query(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """Ask, and wait for one answer."""
        around = self._around
        around.reach_bus()
        await asyncio.sleep(around.network.delay_s())
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._questions.ask(subject, data)
                await asyncio.sleep(around.network.delay_s())
        except TimeoutError:
            raise Transient(f"{subject} was not answered in {timeout_s} s", retry_after_s=0.1) from None
        around.reach_bus()
        return answer

    def listen(self, pattern: str, hear: Callable[[str, Mapping[str, str], bytes], None]) -> Callable[[], None]:
        """Hear core messages for as long as the process lives and is reachable; some get lost on the way."""
        around = self._around

        def arrive(subject: str, headers: Mapping[str, str], data: bytes) -> None:
            if not around.process.alive or not around.network.reaches_bus(around.machine):
                return
            if not around.network.chance(around.network.faults.core_lost):
                hear(subject, headers, data)

        return self._broker.listen(pattern, arrive)

    async def _store(self, subject: str, headers: Mapping[str, str], data: bytes) -> None:
        around = self._around
        await around.faults.enter(around.process, f"bus.store {subject.partition('.')[0]}")
        await asyncio.sleep(around.network.delay_s())
        around.reach_bus()
        self._broker.publish(subject, headers, data)
        around.faults.strike(around.process, f"bus.stored {subject.partition('.')[0]}")
        if around.network.chance(around.network.faults.stored_but_unanswered):
            around.note("unanswered", subject)
            await asyncio.sleep(ANSWER_TIMEOUT_S)
            around.process.check()
            raise Transient(f"the server did not say whether {subject} is stored", retry_after_s=0.1)
        await asyncio.sleep(around.network.delay_s())
        around.reach_bus()


class Questions:
    """Who answers which questions now; one of the replicas gets each."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._answerers: dict[str, list[tuple[str, Process, Answer]]] = {}

    def serve(self, pattern: str, machine: str, process: Process, answer: Answer) -> Callable[[], None]:
        """Answer questions of this pattern; the answer ends it."""
        entry = (machine, process, answer)
        self._answerers.setdefault(pattern, []).append(entry)

        def end() -> None:
            if entry in self._answerers[pattern]:
                self._answerers[pattern].remove(entry)

        return end

    async def ask(self, subject: str, data: bytes) -> bytes:
        """The answer of one who listens, `Transient` when nobody does."""
        asked = subjects.parse_query(subject)
        pattern = subjects.query_filter(asked.service, asked.type)
        known = self._answerers.get(pattern, ())
        there = [entry for entry in known if entry[1].alive and self._network.reaches_bus(entry[0])]
        if not there:
            raise Transient(f"nobody answers {subject}", retry_after_s=0.2)
        _, process, answer = there[self._network.pick(len(there))]
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def reply() -> None:
            content = await answer(subject, data)
            if not answered.done():
                answered.set_result(content)

        process.spawn(reply(), "answer")
        return await answered


class SimDelivery:
    """`torpor_messaging.ports.Delivery`: a message in the hands of one process; what it says about it may get lost."""

    def __init__(
        self,
        message: StoredMessage,
        attempt: int,
        consumer: Consumer,
        around: Surroundings,
        acking: Callable[["SimDelivery"], None] | None = None,
    ) -> None:
        self.subject = message.subject
        self.headers = message.headers
        self.data = message.data
        self.sequence = message.sequence
        self.attempt = attempt
        self._consumer = consumer
        self._around = around
        self._acking = acking

    async def ack(self) -> None:
        """Handled."""
        if self._acking is not None:
            self._acking(self)
        self._consumer.let_go(self.sequence)
        self._around.faults.strike(self._around.process, "ack")
        self._tell(self._consumer.ack, self.sequence)
        self._around.faults.strike(self._around.process, "acked")

    async def ack_confirmed(self) -> None:
        """Handled, and the server has said so; that answer, too, may get lost."""
        around = self._around
        self._consumer.let_go(self.sequence)
        around.faults.strike(around.process, "ack")
        around.reach_bus()
        await asyncio.sleep(around.network.delay_s())
        around.reach_bus()
        self._consumer.ack(self.sequence)
        if around.network.chance(around.network.faults.ack_lost):
            around.note("unheard", "ack", self.subject, self.sequence)
            await asyncio.sleep(ANSWER_TIMEOUT_S)
            raise Transient(f"the server did not confirm the end of {self.subject}")
        await asyncio.sleep(around.network.delay_s())
        around.reach_bus()
        around.faults.strike(around.process, "acked")

    async def nak(self, delay_s: float) -> None:
        """Not handled."""
        self._consumer.let_go(self.sequence)
        self._around.faults.strike(self._around.process, "nak")
        self._tell(self._consumer.nak, self.sequence, delay_s)

    async def term(self, reason: str) -> None:
        """Never again."""
        self._consumer.let_go(self.sequence)
        self._around.faults.strike(self._around.process, "term")
        self._tell(self._consumer.term, self.sequence, reason)

    async def in_progress(self) -> None:
        """Still at it."""
        self._around.process.check()
        self._tell(self._consumer.progress, self.sequence)

    def _tell(self, say: Callable[..., None], *args: object) -> None:
        """Fire and forget, as a client does: nobody learns that it did not arrive."""
        around = self._around
        if not around.network.reaches_bus(around.machine) or around.network.chance(around.network.faults.ack_lost):
            around.note("unheard", say.__name__, self.subject, self.sequence)
            return
        asyncio.get_running_loop().call_later(around.network.delay_s(), say, *args)

"""A durable consumer of the simulated server: who gets which message when, and how often."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torpor_simulation.subjects import matches, split

if TYPE_CHECKING:
    from torpor_simulation.broker import Broker, StoredMessage


INSTANT_S: Final = 1e-6
"""What keeps two arrivals apart: the loop shuffles whatever is due at the same time."""


@dataclass(frozen=True)
class ConsumerSpec:
    """What a consumer is made with; the names are JetStream's, units last."""

    durable: str
    filters: tuple[str, ...]
    ack_wait_s: float = 5.0
    deliveries_max: int = 20
    ack_pending_max: int = 256


@dataclass(eq=False)
class Member:
    """A client that takes messages of a consumer; one of its members gets each."""

    machine: str
    receive: Callable[["StoredMessage", int], None]


@dataclass
class _Pending:
    attempt: int
    waits: asyncio.TimerHandle


class Consumer:
    """Delivers messages of one stream that match its filters, each until it is acknowledged or has had its attempts."""

    def __init__(self, broker: "Broker", stream_name: str, spec: ConsumerSpec) -> None:
        self._broker = broker
        self._network = broker.network
        self._loop = asyncio.get_running_loop()
        self._stream_name = stream_name
        self.spec = spec
        self._patterns = tuple(split(subject) for subject in spec.filters)
        self._fresh: deque[int] = deque()
        self._again: deque[int] = deque()
        self._attempts: dict[int, int] = {}
        self._pending: dict[int, _Pending] = {}
        self._members: list[Member] = []
        self._in_hand: dict[int, int] = {}
        self._last_arrival_s: dict[tuple[str, str], float] = {}
        self.exhausted: list[int] = []
        """Sequences that had all their attempts; the server leaves them where they are and says so."""

    def join(self, member: Member) -> Callable[[], None]:
        """Take part in the deliveries; the answer ends it."""
        self._members.append(member)
        self.pump()

        def leave() -> None:
            if member in self._members:
                self._members.remove(member)

        return leave

    def offer(self, message: "StoredMessage") -> None:
        """A message was stored: queue it if it is for this consumer."""
        tokens = split(message.subject)
        if any(matches(pattern, tokens) for pattern in self._patterns):
            self._fresh.append(message.sequence)
            self.pump()

    def pump(self) -> None:
        """Deliver while there is something to deliver, somebody to take it, and room for unacknowledged messages."""
        while (self._again or self._fresh) and len(self._pending) < self.spec.ack_pending_max:
            reachable = [member for member in self._members if self._network.seems_there(member.machine)]
            if not reachable:
                return
            sequence = self._again.popleft() if self._again else self._fresh.popleft()
            message = self._broker.message(self._stream_name, sequence)
            if message is None:
                continue
            attempt = self._attempts.get(sequence, 0) + 1
            if attempt > self.spec.deliveries_max:
                self._exhaust(sequence)
                continue
            if self._in_hand.get(sequence):
                # Whoever took too long over it has it still: now two are at it.
                self._broker.count_copy(message)
            self._attempts[sequence] = attempt
            self._pending[sequence] = _Pending(attempt, self._wait(sequence))
            self._deliver(reachable[self._network.pick(len(reachable))], message, attempt)
            if self._network.chance(self._network.faults.duplicated):
                self._broker.count_copy(message)
                self._deliver(reachable[self._network.pick(len(reachable))], message, attempt)

    def let_go(self, sequence: int) -> None:
        """Somebody has come to an end with a delivery, whether or not the server hears of it."""
        self._in_hand[sequence] = self._in_hand.get(sequence, 1) - 1

    def ack(self, sequence: int) -> None:
        """The message was handled."""
        if self._settle(sequence):
            self._attempts.pop(sequence, None)
            self._broker.handled(self._stream_name, sequence)
            self.pump()

    def nak(self, sequence: int, delay_s: float) -> None:
        """The message was not handled: deliver it again, in `delay_s`."""
        if self._settle(sequence):
            self._loop.call_later(delay_s, self._redeliver, sequence)
            self.pump()

    def term(self, sequence: int, reason: str) -> None:
        """The message is never to be delivered again."""
        if self._settle(sequence):
            self._attempts.pop(sequence, None)
            self._broker.advise(
                "MSG_TERMINATED", self._stream_name, self.spec.durable, {"stream_seq": sequence, "reason": reason}
            )
            self._broker.handled(self._stream_name, sequence)
            self.pump()

    def progress(self, sequence: int) -> None:
        """Its handler is still at it: the wait for the acknowledgement starts afresh."""
        pending = self._pending.get(sequence)
        if pending is not None:
            pending.waits.cancel()
            pending.waits = self._wait(sequence)

    @property
    def outstanding(self) -> int:
        """Messages that this consumer has not got rid of."""
        return len(self._fresh) + len(self._attempts)

    def _settle(self, sequence: int) -> bool:
        pending = self._pending.pop(sequence, None)
        if pending is None:
            return False
        pending.waits.cancel()
        return True

    def _wait(self, sequence: int) -> asyncio.TimerHandle:
        return self._loop.call_later(self.spec.ack_wait_s, self._waited, sequence)

    def _waited(self, sequence: int) -> None:
        if self._pending.pop(sequence, None) is not None:
            self._redeliver(sequence)

    def _redeliver(self, sequence: int) -> None:
        self._again.append(sequence)
        self.pump()

    def _exhaust(self, sequence: int) -> None:
        self._attempts.pop(sequence, None)
        self.exhausted.append(sequence)
        self._broker.advise(
            "MAX_DELIVERIES",
            self._stream_name,
            self.spec.durable,
            {"stream_seq": sequence, "deliveries": self.spec.deliveries_max},
        )

    def _deliver(self, member: Member, message: "StoredMessage", attempt: int) -> None:
        """Messages of one subject reach one member in the order they were sent; any others overtake each other."""
        self._in_hand[message.sequence] = self._in_hand.get(message.sequence, 0) + 1
        arrives_s = self._loop.time() + self._network.delay_s()
        key = (member.machine, message.subject.rsplit(".", 1)[-1])
        arrives_s = max(arrives_s, self._last_arrival_s.get(key, 0.0) + INSTANT_S)
        self._last_arrival_s[key] = arrives_s
        self._loop.call_at(arrives_s, self._arrive, member, message, attempt)

    def _arrive(self, member: Member, message: "StoredMessage", attempt: int) -> None:
        if member in self._members and self._network.reaches_bus(member.machine):
            member.receive(message, attempt)

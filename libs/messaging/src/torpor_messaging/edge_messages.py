"""The FastStream side of a service: its routes as subscribers, with manual acknowledgement in this one place.

FastStream would reject, and so discard, what a handler failed on; here every delivery is ended by `ConsumerPolicy`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
from faststream.middlewares import AckPolicy
from faststream.nats import JStream, NatsBroker, NatsMessage
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig

from torpor_contracts.errors import InvariantViolation, Poison, Rejected, TorporError, Transient
from torpor_contracts.replies import Refusal, Reply
from torpor_messaging import subjects
from torpor_messaging.consumers import DurableSpec, delivers_to, ensure
from torpor_messaging.dispatch import OrderedDispatch
from torpor_messaging.nats_delivery import NatsDelivery
from torpor_messaging.nats_link import Identity, Link, read_seed, servers_of
from torpor_messaging.policy import ConsumerPolicy, Limits
from torpor_messaging.ports import Clock, Delivery
from torpor_messaging.service import CommandRoute, GuestRoute, ObservationRoute, QueryRoute, TimerRoute
from torpor_messaging.streams import COMMANDS, TIMERS

TIMER_ACK_WAIT_S: Final = 5.0
TIMERS_PARALLEL_MAX: Final = 64
QUERIES_PARALLEL_MAX: Final = 64
QUERY_BYTES_MAX: Final = 64 * 1024
GUESTS_PARALLEL_MAX: Final = 256
"""Requests to machines at once: many of them only wait for something to happen."""
GUESTS_HELD_MAX: Final = 256
"""Requests that wait for their turn; more are dropped, and asked again by whoever gets no answer."""
OBSERVATIONS_HELD_MAX: Final = 4096
"""Observations that wait for their handler; more are dropped, as nobody promised to keep them."""

LOOK_S: Final = 5.0
"""How often a service looks whether its consumers are still there; also after each reconnect."""

LOOK_AGAIN_S: Final = 1.0
"""How soon it looks again for one that is lost."""

_ANSWERED_TO: Final = ("_INBOX.", "_R_.")
"""Where questions come from: our own account, and by the server's hand the tenants'. Elsewhere nothing is published."""

_log: Final = logging.getLogger(__name__)


async def _whole(message: NatsMessage) -> Msg:
    """A decoder that decodes nothing: the envelope does, and knows how to refuse."""
    return message.raw_message


def make_broker(link: Link, url: str, identity: Identity) -> NatsBroker:
    """A FastStream broker whose connection is kept as all of ours are."""
    from faststream.nats import NatsNKey  # noqa: PLC0415  (loads the cryptography of nkeys, not needed without a key)

    security = NatsNKey.from_seed(read_seed(identity.seed_file)) if identity.seed_file is not None else None
    return NatsBroker(
        servers_of(url),
        **link.options(),
        security=security,
        ack_policy=AckPolicy.MANUAL,
        decoder=_whole,
        apply_types=False,
        logger=None,
    )


@dataclass
class _Consumer:
    spec: DurableSpec
    subscriber: Any
    dispatch: OrderedDispatch
    inbox: str


@dataclass
class MessageEdge:
    """Subscribes a service's routes, keeps the subscriptions alive, and lets go of them in order."""

    broker: NatsBroker
    link: Link
    clock: Clock
    service: str
    policy: Callable[[Limits], ConsumerPolicy]
    die: Callable[[InvariantViolation], None]
    failures: dict[str, int] = field(default_factory=dict)
    _consumers: list[_Consumer] = field(default_factory=list)
    _others: list[Any] = field(default_factory=list)
    _dispatches: AsyncExitStack = field(default_factory=AsyncExitStack)
    _look_now: asyncio.Event = field(default_factory=asyncio.Event)

    async def commands(self, route: CommandRoute) -> None:
        """Take the commands of a route."""
        limits = Limits(route.durable, route.deliveries_max)
        policy = self.policy(limits)

        async def process(delivery: Delivery) -> None:
            await policy.process(delivery, route.handle)

        spec = DurableSpec(
            stream=COMMANDS,
            durable=route.durable,
            subject=subjects.command_filter(route.service, route.target_filter),
            ack_wait_s=route.ack_wait_s,
            deliveries_max=route.deliveries_max + 1,
            ack_pending_max=2 * route.parallel_max,
        )
        await self._consume(spec, process, route.parallel_max)

    async def timers(self, route: TimerRoute) -> None:
        """Take the due timers of a route."""
        limits = Limits(route.durable)
        policy = self.policy(limits)

        async def process(delivery: Delivery) -> None:
            async def fire() -> None:
                due = subjects.parse_timer_due(delivery.subject)
                await route.handle(due.tenant_id, due.kind, due.target, delivery.data)

            await policy.process_plain(delivery, fire)

        spec = DurableSpec(
            stream=TIMERS,
            durable=route.durable,
            subject=subjects.timer_due_filter(route.service),
            ack_wait_s=TIMER_ACK_WAIT_S,
            deliveries_max=limits.deliveries_max + 1,
            ack_pending_max=2 * TIMERS_PARALLEL_MAX,
        )
        await self._consume(spec, process, TIMERS_PARALLEL_MAX)

    async def observations(self, route: ObservationRoute) -> None:
        """Hear a core subject; each replica hears all of it."""

        async def hear(message: Msg) -> None:
            await self._guarded(route.subject, lambda: route.handle(message.subject, message.data))

        subscriber = self.broker.subscriber(route.subject, pending_msgs_limit=OBSERVATIONS_HELD_MAX, no_reply=True)
        subscriber(hear)
        await self._start(subscriber)
        self._others.append(subscriber)

    async def queries(self, route: QueryRoute) -> None:
        """Answer questions; one of the replicas gets each."""

        async def answer(message: Msg) -> None:
            if not message.reply.startswith(_ANSWERED_TO):
                return
            answer = await self._refusing(message.subject, partial(self._answer, route, message))
            await self._guarded(message.subject, lambda: self.link.publish(message.reply, answer))

        subscriber = self.broker.subscriber(
            subjects.query_filter(route.service, route.type),
            queue=self.service,
            max_workers=QUERIES_PARALLEL_MAX,
            no_reply=True,
        )
        subscriber(answer)
        await self._start(subscriber)
        self._others.append(subscriber)

    async def guests(self, route: GuestRoute) -> None:
        """Answer what is asked of a host's machines; one process is the host."""

        async def answer(message: Msg) -> None:
            if not message.reply.startswith(_ANSWERED_TO):
                return
            answer = await self._refusing(message.subject, partial(self._guest_answer, route, message))
            await self._guarded(message.subject, lambda: self.link.publish(message.reply, answer))

        subscriber = self.broker.subscriber(
            subjects.guest_filter(route.host_id),
            max_workers=GUESTS_PARALLEL_MAX,
            pending_msgs_limit=GUESTS_HELD_MAX,
            no_reply=True,
        )
        subscriber(answer)
        await self._start(subscriber)
        self._others.append(subscriber)

    async def watch(self) -> None:
        """See to it, until cancelled, that every consumer is there and delivers to us."""
        forget = self.link.on_reconnect(self._look_now.set)
        try:
            while True:
                self._look_now.clear()
                for consumer in self._consumers:
                    await self._look(consumer)
                try:
                    lost = any(not consumer.inbox for consumer in self._consumers)
                    async with asyncio.timeout(LOOK_AGAIN_S if lost else LOOK_S):
                        await self._look_now.wait()
                except TimeoutError:
                    continue
        finally:
            forget()

    async def stop(self, timeout_s: float) -> None:
        """Take nothing new, finish what runs within `timeout_s`, hand back the rest."""
        for subscriber in [*self._others, *(consumer.subscriber for consumer in self._consumers)]:
            await self._guarded("stopping", subscriber.stop)
        drained = await asyncio.gather(*(consumer.dispatch.drain(timeout_s) for consumer in self._consumers))
        if not all(drained):
            _log.warning("not everything was finished in %.0f s; the rest is delivered again", timeout_s)

    async def close(self) -> None:
        """Let go of everything, finished or not."""
        await self._dispatches.aclose()

    async def _consume(
        self, spec: DurableSpec, process: Callable[[Delivery], Awaitable[None]], parallel_max: int
    ) -> None:
        inbox = await ensure(self.link, spec)
        dispatch = await self._dispatches.enter_async_context(
            OrderedDispatch(
                process,
                target_of,
                clock=self.clock,
                ack_wait_s=spec.ack_wait_s,
                parallel_max=parallel_max,
                held_max=spec.ack_pending_max,
            )
        )

        async def take(message: Msg) -> None:
            try:
                delivery = NatsDelivery(self.link.client, message, spec.stream)
            except Poison as error:
                _log.warning("consumer %s was sent something else: %s", spec.durable, error)
                return
            await dispatch.submit(delivery)

        subscriber = self.broker.subscriber(
            spec.subject,
            # nats-py binds to the durable consumer that has the queue's name.
            queue=spec.durable,
            stream=JStream(spec.stream, declare=False),
            config=ConsumerConfig(filter_subject=spec.subject),
            pending_msgs_limit=2 * spec.ack_pending_max,
            no_reply=True,
        )
        subscriber(take)
        self._consumers.append(_Consumer(spec, subscriber, dispatch, inbox))
        await self._start(subscriber)

    async def _look(self, consumer: _Consumer) -> None:
        try:
            if await delivers_to(self.link, consumer.spec) == consumer.inbox:
                return
            _log.warning("consumer %s was lost or made anew: subscribing again", consumer.spec.durable)
            await consumer.subscriber.stop()
            consumer.inbox = await ensure(self.link, consumer.spec)
            await self._start(consumer.subscriber)
        except TorporError as error:
            self._failed(consumer.spec.durable)
            consumer.inbox = ""
            _log.warning("consumer %s: %s", consumer.spec.durable, error)

    async def _start(self, subscriber: Any) -> None:
        # FastStream drops what arrives before it has noted that it runs, which it does only after subscribing.
        subscriber.running = True
        await subscriber.start()

    async def _answer(self, route: QueryRoute, message: Msg) -> bytes:
        asked = subjects.parse_query(message.subject)
        answer = await route.handle(asked.tenant_id, asked.target, _parameters(message.data))
        return msgspec.json.encode(answer)

    async def _guest_answer(self, route: GuestRoute, message: Msg) -> bytes:
        asked = subjects.parse_guest(message.subject)
        return await route.handle(asked.tenant_id, asked.type, asked.session_id, message.data)

    async def _refusing(self, subject: str, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """The answer, or the refusal that says why there is none."""
        try:
            return await work()
        except Rejected as refused:
            refusal = Refusal(code=refused.code, message=refused.message, advice=refused.advice)
        except Transient as error:
            refusal = Refusal(
                code="unavailable", message=str(error), advice="ask again", retry_after_s=error.retry_after_s
            )
        except InvariantViolation as error:
            self.die(error)
            raise
        except Exception as error:  # noqa: BLE001  (who asked is told of a bug; nobody else suffers from it)
            self._failed(subject.split(".")[3])
            _log.exception("%s failed", subject)
            refusal = Refusal(
                code="internal-error", message=f"{type(error).__name__}: {error}", advice="see the service's log"
            )
        return msgspec.json.encode(Reply(refusal=refusal))

    async def _guarded(self, what: str, work: Callable[[], Awaitable[object]]) -> None:
        """Nothing that one message, or one end, does may stop the others."""
        try:
            await work()
        except InvariantViolation as error:
            self.die(error)
        except TorporError as error:
            self._failed(what)
            _log.warning("%s: %s", what, error)
        except Exception:  # noqa: BLE001  (as said above)
            self._failed(what)
            _log.exception("%s failed", what)

    def _failed(self, what: str) -> None:
        self.failures[what] = self.failures.get(what, 0) + 1


def target_of(delivery: Delivery) -> str:
    """What deliveries are ordered by: the target of a command or timer; the policy refuses what has none."""
    try:
        if delivery.subject.startswith("cmd."):
            parsed = subjects.parse_command(delivery.subject)
            return f"{parsed.tenant_id} {parsed.target}"
        due = subjects.parse_timer_due(delivery.subject)
    except Rejected:
        return delivery.subject
    return f"{due.tenant_id} {due.target}"


def _parameters(data: bytes) -> dict[str, Any]:
    if len(data) > QUERY_BYTES_MAX:
        raise Rejected("payload-too-large", f"a question has at most {QUERY_BYTES_MAX} bytes", "ask for less at once")
    try:
        return msgspec.json.decode(data or b"{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Rejected(
            "malformed-query", f"the parameters are no JSON object: {error}", "send a JSON object, or nothing"
        ) from error

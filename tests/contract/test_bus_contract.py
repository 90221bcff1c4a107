"""What services rely on of a bus, its deliveries and its timers: shown for NATS, and for the bus of the simulation."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from tests.support.nats import NatsServer
from torpor_contracts.errors import Transient
from torpor_contracts.ids import CommandId, TenantId
from torpor_contracts.session import SuspendSession
from torpor_messaging import subjects
from torpor_messaging.consumers import DurableSpec, ensure
from torpor_messaging.envelope import REPLY, decode_command
from torpor_messaging.nats_bus import NatsBus
from torpor_messaging.nats_delivery import NatsDelivery
from torpor_messaging.nats_link import Link
from torpor_messaging.ports import Bus, Clock, Delivery, OutgoingCommand, Timers
from torpor_messaging.system import SystemClock
from torpor_messaging.timers import NatsTimers
from torpor_simulation.broker import Broker, StoredMessage, StreamSpec
from torpor_simulation.bus import Questions, SimBus, SimDelivery
from torpor_simulation.clock import SimClock, SimIds
from torpor_simulation.consumer import ConsumerSpec, Member
from torpor_simulation.faults import Faults
from torpor_simulation.loop import VirtualLoop
from torpor_simulation.network import Network, NetworkFaults
from torpor_simulation.process import Process
from torpor_simulation.surroundings import Surroundings
from torpor_simulation.trace import Trace

BOUND_S = 10.0
WAIT_S = 0.5
"""The acknowledgement wait of the consumers here."""

Deliveries = asyncio.Queue[Delivery]
Answer = Callable[[str, bytes], Coroutine[Any, Any, bytes]]
TENANT = TenantId("default")


@dataclass(frozen=True)
class World:
    """A bus with what stands on its other side."""

    bus: Bus
    timers: Timers
    clock: Clock
    consume: Callable[[str, str, int], Coroutine[Any, Any, Deliveries]]
    """The deliveries of a stream on a subject, each at most so many times."""
    serve: Callable[[Answer], Coroutine[Any, Any, None]]
    """Answer the questions `seen` of the scheduler."""

    async def commands(self, deliveries_max: int = 5) -> Deliveries:
        return await self.consume("COMMANDS", subjects.command_filter("scheduler", "*"), deliveries_max)


Scenario = Callable[[World], Coroutine[Any, Any, None]]


def on_simulation(scenario: Scenario) -> None:
    async def main() -> None:
        network, trace = Network(1, NetworkFaults()), Trace()
        streams = (
            StreamSpec("COMMANDS", ("cmd.>",), work_queue=True),
            StreamSpec("TIMERS", ("timer.>",), work_queue=True),
        )
        broker, questions = Broker(network, streams), Questions(network)
        process = Process("one")
        around = Surroundings(process, "here", network, Faults.none(trace), trace)
        clock = SimClock(process)
        bus = SimBus(broker, questions, around, clock, SimIds("1"))

        async def consume(stream: str, subject: str, deliveries_max: int) -> Deliveries:
            arrived: Deliveries = asyncio.Queue()
            spec = ConsumerSpec(
                durable="under-test", filters=(subject,), ack_wait_s=WAIT_S, deliveries_max=deliveries_max
            )
            consumer = broker.consumer(stream, spec)

            def receive(message: StoredMessage, attempt: int) -> None:
                arrived.put_nowait(SimDelivery(message, attempt, consumer, around))

            consumer.join(Member("here", receive))
            return arrived

        async def serve(answer: Answer) -> None:
            questions.serve(subjects.query_filter("scheduler", "seen"), "here", process, answer)

        await scenario(World(bus, NatsTimers(bus), clock, consume, serve))

    loop = VirtualLoop(1)
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


@asynccontextmanager
async def linked(server: NatsServer, user: str) -> AsyncIterator[Link]:
    link = await server.link(user)
    try:
        yield link
    finally:
        await link.close()


def on_nats(server: NatsServer, scenario: Scenario) -> None:
    async def main() -> None:
        async with linked(server, "scheduler") as link, linked(server, "scheduler") as other:
            bus, clock = NatsBus(link, SystemClock()), SystemClock()

            async def consume(stream: str, subject: str, deliveries_max: int) -> Deliveries:
                arrived: Deliveries = asyncio.Queue()
                spec = DurableSpec(stream, "under-test", subject, WAIT_S, deliveries_max, 64)

                async def take(message: Any) -> None:
                    arrived.put_nowait(NatsDelivery(other.client, message, stream))

                await other.client.subscribe(await ensure(other, spec), queue="under-test", cb=take)
                await other.client.flush()
                return arrived

            async def serve(answer: Answer) -> None:
                async def take(message: Any) -> None:
                    await other.client.publish(message.reply, await answer(message.subject, message.data))

                await other.client.subscribe(subjects.query_filter("scheduler", "seen"), cb=take)
                await other.client.flush()

            await scenario(World(bus, NatsTimers(bus), clock, consume, serve))

    asyncio.run(main())


@pytest.fixture(params=["simulation", "nats"])
def run(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    if request.param == "simulation":
        return on_simulation
    server: NatsServer = request.getfixturevalue("nats_server")
    return lambda scenario: on_nats(server, scenario)


def suspend(target: str = "ses-1", command_id: str = "c-1") -> OutgoingCommand:
    return OutgoingCommand(
        tenant_id=TENANT,
        service="scheduler",
        target=target,
        command=SuspendSession(incarnation=3),
        command_id=CommandId(command_id),
        correlation_id="goal 1",
    )


async def next_of(deliveries: Deliveries, within_s: float = BOUND_S) -> Delivery:
    async with asyncio.timeout(within_s):
        return await deliveries.get()


async def silent(deliveries: Deliveries, for_s: float) -> bool:
    try:
        await next_of(deliveries, for_s)
    except TimeoutError:
        return True
    return False


def test_a_sent_command_is_delivered_whole(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        deliveries = await world.commands()
        await world.bus.send(suspend())
        delivery = await next_of(deliveries)
        incoming = decode_command(delivery)
        assert (incoming.command, incoming.command_id) == (SuspendSession(incarnation=3), "default/c-1")
        assert (incoming.correlation_id, delivery.attempt) == ("goal 1", 1)
        assert REPLY not in delivery.headers
        await delivery.ack()
        assert await silent(deliveries, 2.5 * WAIT_S), "what is acknowledged never comes again"

    run(scenario)


def test_what_was_sent_before_anybody_listened_is_delivered_too(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        for number in range(5):
            await world.bus.send(suspend(f"ses-{number}", f"c-{number}"))
        deliveries = await world.commands()
        targets = {subjects.parse_command((await next_of(deliveries)).subject).target for _ in range(5)}
        assert targets == {f"ses-{number}" for number in range(5)}

    run(scenario)


def test_commands_of_one_target_come_in_order(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        deliveries = await world.commands()
        for number in range(20):
            await world.bus.send(suspend(command_id=f"c-{number}"))
        arrived = []
        for _ in range(20):
            delivery = await next_of(deliveries)
            arrived.append(delivery.sequence)
            await delivery.ack()
        assert arrived == sorted(arrived)

    run(scenario)


def test_what_nobody_ends_comes_again_until_its_deliveries_are_used_up(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        deliveries = await world.commands(deliveries_max=3)
        await world.bus.send(suspend())
        attempts = []
        for _ in range(3):
            delivery = await next_of(deliveries)
            attempts.append((delivery.sequence, delivery.attempt))
        assert [attempt for _, attempt in attempts] == [1, 2, 3]
        assert len({sequence for sequence, _ in attempts}) == 1
        assert await silent(deliveries, 3 * WAIT_S)

    run(scenario)


def test_nak_comes_again_after_its_delay_and_term_never(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        deliveries = await world.commands()
        await world.bus.send(suspend())
        first = await next_of(deliveries)
        began_s = world.clock.monotonic_s()
        await first.nak(2 * WAIT_S)
        second = await next_of(deliveries)
        assert world.clock.monotonic_s() - began_s >= 2 * WAIT_S * 0.99
        assert second.attempt == 2
        await second.term("enough")
        assert await silent(deliveries, 3 * WAIT_S)

    run(scenario)


def test_progress_keeps_a_delivery_and_a_confirmed_ack_ends_it(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        deliveries = await world.commands()
        await world.bus.send(suspend())
        delivery = await next_of(deliveries)
        for _ in range(8):
            assert await silent(deliveries, WAIT_S / 2)
            await delivery.in_progress()
        await delivery.ack_confirmed()
        assert await silent(deliveries, 2.5 * WAIT_S)

    run(scenario)


def test_a_call_is_answered_where_it_says(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        deliveries = await world.commands()
        calls = [asyncio.ensure_future(world.bus.call(suspend(f"ses-{n}", f"c-{n}"), BOUND_S)) for n in range(5)]
        for _ in calls:
            delivery = await next_of(deliveries)
            subjects.check_reply(TENANT, delivery.headers[REPLY])
            await world.bus.publish(delivery.headers[REPLY], subjects.parse_command(delivery.subject).target.encode())
            await delivery.ack()
        assert await asyncio.gather(*calls) == [f"ses-{n}".encode() for n in range(5)]
        with pytest.raises(Transient):
            await world.bus.call(suspend(command_id="c-9"), WAIT_S)
        assert decode_command(await next_of(deliveries)).command_id == "default/c-9", "it was sent all the same"

    run(scenario)


def test_a_question_is_answered_or_transient(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(Transient):
            await world.bus.query("qry.default.scheduler.seen.ses-1", b"?", WAIT_S)

        async def answer(subject: str, data: bytes) -> bytes:
            return subject.encode() + data

        await world.serve(answer)
        async with asyncio.timeout(BOUND_S):
            answered = b""
            while not answered:  # the other account hears a moment later that somebody is there
                with suppress(Transient):
                    answered = await world.bus.query("qry.default.scheduler.seen.ses-1", b"?", BOUND_S)
        assert answered == b"qry.default.scheduler.seen.ses-1?"

    run(scenario)


def test_timers_are_never_early_and_replace_each_other(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        due = await world.consume("TIMERS", subjects.timer_due_filter("scheduler"), 5)
        soon = world.clock.now() + timedelta(seconds=1)
        await world.timers.set(TENANT, "scheduler", "idle", "ses-1", world.clock.now(), b"at once")
        first = await next_of(due)
        await first.ack()
        await world.timers.set(TENANT, "scheduler", "idle", "ses-1", soon + timedelta(hours=1), b"replaced")
        await world.timers.set(TENANT, "scheduler", "idle", "ses-1", soon, b"the last")
        await world.timers.set(TENANT, "scheduler", "start", "ses-1", soon, b"another kind")
        fired = {}
        for _ in range(2):
            delivery = await next_of(due)
            assert world.clock.now() >= soon
            parts = subjects.parse_timer_due(delivery.subject)
            fired[parts.kind] = (parts.tenant_id, parts.target, delivery.data)
            await delivery.ack()
        assert first.data == b"at once"
        assert fired == {"idle": (TENANT, "ses-1", b"the last"), "start": (TENANT, "ses-1", b"another kind")}
        assert await silent(due, WAIT_S)

    run(scenario)

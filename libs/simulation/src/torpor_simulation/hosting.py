"""Runs one service in one simulated process: production's policy, dispatch and followers in a simulated world."""

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from torpor_contracts.errors import InvariantViolation, Rejected, Transient
from torpor_contracts.replies import Refusal, Reply
from torpor_eventlog.feeds import SharedFeed
from torpor_eventlog.followers import ProjectionFollower, ReactorFollower
from torpor_eventlog.port import Recorded
from torpor_eventlog.views_port import ViewStore
from torpor_messaging import subjects
from torpor_messaging.dispatch import OrderedDispatch
from torpor_messaging.edge_loops import run_background
from torpor_messaging.policy import ConsumerPolicy, Limits
from torpor_messaging.ports import Clock, Delivery, Ids
from torpor_messaging.service import (
    BackgroundRoute,
    CommandRoute,
    ObservationRoute,
    QueryRoute,
    Service,
    TimerRoute,
)
from torpor_simulation.broker import Broker, StoredMessage
from torpor_simulation.bus import Questions, SimBus, SimDelivery
from torpor_simulation.consumer import ConsumerSpec, Member
from torpor_simulation.surroundings import Surroundings

TIMER_ACK_WAIT_S: Final = 5.0
TIMERS_PARALLEL_MAX: Final = 64
OBSERVATIONS_MAX: Final = 1024


@dataclass(frozen=True)
class Hosting:
    """What a service needs to be run, beside its own ports."""

    broker: Broker
    questions: Questions
    around: Surroundings
    bus: SimBus
    views: ViewStore
    clock: Clock
    ids: Ids
    feed: SharedFeed
    broken: Callable[[str], None]
    """Told of what no process may do: an invariant violated, a bug met."""
    acking: Callable[[SimDelivery], None]
    """Told when a delivery is about to be acknowledged."""

    async def run(self, service: Service) -> None:
        """Run all routes until the process dies."""
        if service.start is not None:
            await service.start()
        async with asyncio.TaskGroup() as routes:
            if service.projections or service.reactors:
                routes.create_task(self._or_die(self.feed.run))
            for projection in service.projections:
                follower = ProjectionFollower(projection, self.views, self.feed, dead=self._dead)
                routes.create_task(self._or_die(follower.run))
            for reactor in service.reactors:
                reacting = ReactorFollower(
                    reactor.name, reactor.reacts_to, reactor.react, self.views, self.feed, dead=self._dead
                )
                routes.create_task(self._or_die(reacting.run))
            for command in service.commands:
                routes.create_task(self._commands(command))
            for timer in service.timers:
                routes.create_task(self._timers(timer))
            for observation in service.observations:
                routes.create_task(self._observations(observation))
            for query in service.queries:
                routes.create_task(self._queries(query))
            for background in service.background:
                routes.create_task(self._background(background))

    async def _commands(self, route: CommandRoute) -> None:
        limits = Limits(durable=route.durable, deliveries_max=route.deliveries_max)
        policy = self._policy(limits)

        async def process(delivery: Delivery) -> object:
            outcome = await policy.process(delivery, route.handle)
            self.around.note("handled", delivery.subject, delivery.attempt, outcome)
            return outcome

        await self._consume(
            "COMMANDS",
            ConsumerSpec(
                durable=route.durable,
                filters=(subjects.command_filter(route.service, route.target_filter),),
                ack_wait_s=route.ack_wait_s,
                deliveries_max=route.deliveries_max + 1,
                ack_pending_max=2 * route.parallel_max,
            ),
            process,
            key=_target_of,
            parallel_max=route.parallel_max,
        )

    async def _timers(self, route: TimerRoute) -> None:
        limits = Limits(durable=route.durable)
        policy = self._policy(limits)

        async def process(delivery: Delivery) -> object:
            due = subjects.parse_timer_due(delivery.subject)
            return await policy.process_plain(
                delivery, lambda: route.handle(due.tenant_id, due.kind, due.target, delivery.data)
            )

        await self._consume(
            "TIMERS",
            ConsumerSpec(
                durable=route.durable,
                filters=(subjects.timer_due_filter(route.service),),
                ack_wait_s=TIMER_ACK_WAIT_S,
                deliveries_max=limits.deliveries_max + 1,
                ack_pending_max=2 * TIMERS_PARALLEL_MAX,
            ),
            process,
            key=_target_of,
            parallel_max=TIMERS_PARALLEL_MAX,
        )

    async def _consume(
        self,
        stream: str,
        spec: ConsumerSpec,
        process: Callable[[Delivery], Awaitable[object]],
        *,
        key: Callable[[Delivery], str],
        parallel_max: int,
    ) -> None:
        consumer = self.broker.consumer(stream, spec)
        arrived: asyncio.Queue[SimDelivery] = asyncio.Queue()

        def receive(message: StoredMessage, attempt: int) -> None:
            arrived.put_nowait(SimDelivery(message, attempt, consumer, self.around, self.acking))

        leave = consumer.join(Member(self.around.machine, receive))
        try:
            async with OrderedDispatch(
                process,
                key,
                clock=self.clock,
                ack_wait_s=spec.ack_wait_s,
                parallel_max=parallel_max,
                held_max=spec.ack_pending_max,
            ) as dispatch:
                while True:
                    await dispatch.submit(await arrived.get())
        finally:
            leave()

    async def _observations(self, route: ObservationRoute) -> None:
        heard: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(OBSERVATIONS_MAX)

        def hear(subject: str, _headers: Mapping[str, str], data: bytes) -> None:
            if not heard.full():
                heard.put_nowait((subject, data))

        end = self.bus.listen(route.subject, hear)
        try:
            while True:
                subject, data = await heard.get()
                await self._try(f"observation {subject}", functools.partial(route.handle, subject, data))
        finally:
            end()

    async def _queries(self, route: QueryRoute) -> None:
        async def answer(subject: str, data: bytes) -> bytes:
            asked = subjects.parse_query(subject)
            parameters: Mapping[str, Any] = msgspec.json.decode(data or b"{}")
            try:
                return msgspec.json.encode(await route.handle(asked.tenant_id, asked.target, parameters))
            except Rejected as refused:
                refusal = Refusal(code=refused.code, message=refused.message, advice=refused.advice)
                return msgspec.json.encode(Reply(refusal=refusal))

        end = self.questions.serve(
            subjects.query_filter(route.service, route.type), self.around.machine, self.around.process, answer
        )
        try:
            await asyncio.Event().wait()
        finally:
            end()

    async def _background(self, route: BackgroundRoute) -> None:
        async def watched() -> None:
            """What only time can heal may fail; anything else is a finding, although the loop would outlive it."""
            try:
                await route.run()
            except (Transient, InvariantViolation):
                raise
            except Exception as error:
                self.broken(f"{route.name} in {self.around.process.name}: {type(error).__name__}: {error}")
                raise

        await run_background(dataclasses.replace(route, run=watched), self.clock, self._die, {})

    async def _try(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """A loop outlives what fails in it, but for an invariant violated."""
        try:
            await work()
        except InvariantViolation as error:
            self._die(error)
        except Transient:
            self.around.note("failed", what)
        except Exception as error:  # noqa: BLE001  (as production's edge does; here it is a finding)
            self.broken(f"{what}: {type(error).__name__}: {error}")

    def _policy(self, limits: Limits) -> ConsumerPolicy:
        return ConsumerPolicy(limits, bus=self.bus, clock=self.clock, ids=self.ids, die=self._die)

    def _die(self, error: InvariantViolation) -> None:
        self.broken(f"invariant violated in {self.around.process.name}: {error}")
        self.around.process.kill()

    async def _or_die(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except InvariantViolation as error:
            self._die(error)

    async def _dead(self, consumer: str, recorded: Recorded, error: Exception) -> None:
        """Where an event goes that a follower cannot handle."""
        await self.bus.publish_stored(
            subjects.dead(consumer), recorded.data, {"Torpor-Dead-Reason": f"{type(error).__name__}: {error}"}
        )


def _target_of(delivery: Delivery) -> str:
    """What deliveries are ordered by, as production's edge has it."""
    if delivery.subject.startswith("cmd."):
        command = subjects.parse_command(delivery.subject)
        return f"{command.tenant_id} {command.target}"
    due = subjects.parse_timer_due(delivery.subject)
    return f"{due.tenant_id} {due.target}"

"""Runs a service over NATS: connection, log, views, routes, followers and loops, from the first check to the last ack.

Each service's `app.py` calls `run_service`; nothing else imports FastStream.
"""

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import uvloop

from torpor_contracts.errors import InvariantViolation, Rejected, TorporError, Transient
from torpor_eventlog.feeds import SharedFeed
from torpor_eventlog.followers import ProjectionFollower, ReactorFollower
from torpor_eventlog.following import Backoff
from torpor_eventlog.healing import Damage, HealingFeed
from torpor_eventlog.opening import open_log
from torpor_eventlog.port import Recorded
from torpor_eventlog.views_port import ViewStore
from torpor_messaging import logs, subjects
from torpor_messaging.edge_loops import Hints, run_background
from torpor_messaging.envelope import percent_encode
from torpor_messaging.nats_bus import NatsBus
from torpor_messaging.nats_events import NatsEventSource, PatientEventSource
from torpor_messaging.nats_link import Identity, Link
from torpor_messaging.policy import ConsumerPolicy, Limits
from torpor_messaging.service import QueryRoute, Service
from torpor_messaging.service_ports import ServicePorts
from torpor_messaging.settings import ServiceSettings
from torpor_messaging.streams import check_all
from torpor_messaging.system import SystemClock, SystemIds
from torpor_messaging.timers import NatsTimers

EXIT_REFUSED: Final = 78
"""EX_CONFIG of sysexits.h: somebody must change something before a restart helps."""

EXIT_AWAY: Final = 75
"""EX_TEMPFAIL: something we need is away."""

EXIT_BROKEN: Final = 70
"""EX_SOFTWARE: an invariant was violated; nothing more was acknowledged."""

if TYPE_CHECKING:
    from torpor_messaging.edge_messages import MessageEdge

_PR_SET_PDEATHSIG: Final = 1
_log: Final = logging.getLogger(__name__)
Opened = TypeVar("Opened")
Build = Callable[[ServicePorts], Service | Awaitable[Service]]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `qry.system.<service>.health.-`: given only once the service is ready.

    `positions`: how far each follower has come. `failures`: what failed how often since the start.
    """

    service: str
    ready: bool
    positions: dict[str, int]
    failures: dict[str, int]
    damages: int


def run_service(name: str, build: Build, settings: ServiceSettings | None = None) -> int:
    """Run a service until SIGTERM or SIGINT; the process's exit code. `build` may first look around, asynchronously."""
    try:
        told = settings or ServiceSettings()  # type: ignore[call-arg]  # from the environment
    except ValueError as error:
        sys.stderr.write(f"{name}: the settings are wrong: {error}\n")
        return EXIT_REFUSED
    logs.set_up(name, told.log_level)
    if told.die_with_parent:
        _die_with_parent()
    try:
        uvloop.run(Edge(name, build, told).run())
    except (TorporError, ExceptionGroup) as error:
        return _exit_code(name, error)
    return 0


class Edge:
    """One service in one process."""

    def __init__(self, name: str, build: Build, settings: ServiceSettings) -> None:
        self._name = name
        self._build = build
        self._settings = settings
        self._clock = SystemClock()
        self._ids = SystemIds()
        self._identity = Identity.service(name, settings.nkey_seed_file)
        self._link = Link(self._identity)
        self._bus = NatsBus(self._link, self._clock)
        self._hints = Hints(self._bus)
        self._stop = asyncio.Event()
        self._followers: list[ProjectionFollower | ReactorFollower] = []
        self._failures: dict[str, int] = {}
        self._damages = 0

    async def run(self) -> None:
        """Start, serve until told to stop, stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        async with AsyncExitStack() as opened:
            ports = await self._open(opened)
            built = self._build(ports)
            service = await built if isinstance(built, Awaitable) else built
            if service.start is not None:
                await service.start()
            if service.stop is not None:
                opened.push_async_callback(service.stop)
            await self._serve(service, ports)

    async def _open(self, opened: AsyncExitStack) -> ServicePorts:
        """Connect to everything; what is away is waited for, within bounds."""
        from torpor_messaging.edge_messages import make_broker  # noqa: PLC0415  (FastStream, after the checks above)

        broker = make_broker(self._link, self._settings.nats_url, self._identity)
        self._broker = broker
        await self._link.connect_with(broker.connect, self._settings.nats_url, self._settings.start_s)
        opened.push_async_callback(self._link.close)
        await self._patiently(lambda: check_all(self._link))
        log = await self._patiently(lambda: open_log(self._settings.log_dsn, self._hints.committed))
        opened.push_async_callback(log.close)
        views = open_views(self._settings.views_dsn, self._name)
        opened.push_async_callback(views.close)
        return ServicePorts(
            log=log, views=views, bus=self._bus, timers=NatsTimers(self._bus), clock=self._clock, ids=self._ids
        )

    async def _patiently(self, attempt: Callable[[], Awaitable[Opened]]) -> Opened:
        backoff = Backoff(first_s=0.1, max_s=2.0)
        until_s = self._clock.monotonic_s() + self._settings.start_s
        while True:
            try:
                return await attempt()
            except Transient as error:
                pause_s = backoff.failed()
                if self._stop.is_set() or self._clock.monotonic_s() + pause_s > until_s:
                    raise
                _log.warning("starting: %s; again in %.1f s", error, pause_s)
                await asyncio.sleep(pause_s)

    async def _serve(self, service: Service, ports: ServicePorts) -> None:
        from torpor_messaging.edge_messages import MessageEdge  # noqa: PLC0415  (as above)

        messages = MessageEdge(
            broker=self._broker,
            link=self._link,
            clock=self._clock,
            service=self._name,
            policy=self._policy,
            die=die,
            failures=self._failures,
        )
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(work, name=name)
                for name, work in (
                    ("hints", self._hints.run()),
                    ("connection", self._connection_kept()),
                    *self._follow(service, ports),
                )
            ]
            try:
                await self._subscribe(messages, service)
                running += [
                    tasks.create_task(run_background(route, self._clock, die, self._failures), name=route.name)
                    for route in service.background
                ]
                running.append(tasks.create_task(messages.watch(), name="watch"))
                await messages.queries(QueryRoute(service=self._name, type="health", handle=self._health))
                _log.info("ready")
                await self._stop.wait()
                _log.info("stopping")
                await messages.stop(self._settings.drain_s)
            finally:
                await messages.close()
                for task in running:
                    task.cancel()
        _log.info("stopped")

    async def _subscribe(self, messages: "MessageEdge", service: Service) -> None:
        for command in service.commands:
            await self._patiently(partial(messages.commands, command))
        for timer in service.timers:
            await self._patiently(partial(messages.timers, timer))
        for observation in service.observations:
            await messages.observations(observation)
        for query in service.queries:
            await messages.queries(query)
        for guest in service.guests:
            await messages.guests(guest)

    def _follow(self, service: Service, ports: ServicePorts) -> Sequence[tuple[str, Any]]:
        """What must run so that the service's projections and reactors do."""
        if not service.projections and not service.reactors:
            return []
        source = PatientEventSource(NatsEventSource(self._link))
        feed = SharedFeed(ports.log, HealingFeed(ports.log, source, self._damaged))
        self._followers = [
            ProjectionFollower(projection, ports.views, feed, dead=self._dead) for projection in service.projections
        ]
        self._followers += [
            ReactorFollower(route.name, route.reacts_to, route.react, ports.views, feed, dead=self._dead)
            for route in service.reactors
        ]
        return [("feed", _or_die(feed.run())), *((one.name, _or_die(one.run())) for one in self._followers)]

    async def _connection_kept(self) -> None:
        await self._link.closed.wait()
        raise Transient("the connection to NATS was closed for good")

    def _policy(self, limits: Limits) -> ConsumerPolicy:
        return ConsumerPolicy(limits, bus=self._bus, clock=self._clock, ids=self._ids, die=die)

    async def _health(self, _tenant: str, _target: str, _parameters: object) -> Health:
        return Health(
            service=self._name,
            ready=True,
            positions={follower.name: follower.position for follower in self._followers},
            failures=dict(self._failures),
            damages=self._damages,
        )

    async def _dead(self, consumer: str, recorded: Recorded, error: Exception) -> None:
        """Keep an event that a follower cannot handle."""
        headers = {
            "Torpor-Dead-Code": "poison",
            "Torpor-Dead-Reason": percent_encode(f"{type(error).__name__}: {error}"[:500]),
            "Torpor-Dead-Subject": subjects.event(recorded.tenant_id, recorded.tag, recorded.stream),
            "Torpor-Dead-Sequence": str(recorded.position),
            "ce-type": percent_encode(recorded.tag),
        }
        await self._bus.publish_stored(subjects.dead(consumer), recorded.data, headers)

    def _damaged(self, damage: Damage) -> None:
        self._damages += 1
        _log.error(
            "stream EVENTS is damaged at position %d (%s: %s); read from the log instead; "
            "run `torpor audit verify`, then `torpor audit rebuild --stream`",
            damage.position,
            damage.kind,
            damage.detail,
        )


def open_views(dsn: str, service: str) -> ViewStore:
    """The view store that a DSN names: an SQLite file, or a schema of a PostgreSQL database."""
    if dsn.startswith(("postgresql://", "postgres://")):
        from torpor_eventlog.views_postgres import PostgresViewStore  # noqa: PLC0415  (an embedded Torpor never needs it)

        return PostgresViewStore(dsn, service)
    from torpor_eventlog.opening import sqlite_path  # noqa: PLC0415  (as above)
    from torpor_eventlog.views_sqlite import SqliteViewStore  # noqa: PLC0415

    path: Path = sqlite_path(dsn)
    return SqliteViewStore(path)


def die(error: InvariantViolation) -> None:
    """End the process at once: nothing more is acknowledged, written or replied on what may be wrong."""
    _log.critical("invariant violated: %s", error, exc_info=error)
    logging.shutdown()
    os._exit(EXIT_BROKEN)


async def _or_die(work: Awaitable[object]) -> None:
    try:
        await work
    except InvariantViolation as error:
        die(error)


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(EXIT_AWAY)


def _exit_code(name: str, error: Exception) -> int:
    """Log what ended the service; who must act decides the code."""
    if isinstance(error, ExceptionGroup):
        return max(_exit_code(name, each) for each in error.exceptions)
    if isinstance(error, Rejected):
        _log.critical("%s ends: %s; %s", name, error.message, error.advice)
        return EXIT_REFUSED
    if isinstance(error, TorporError):
        _log.critical("%s ends: %s", name, error)
        return EXIT_AWAY
    _log.critical("%s ends: a bug", name, exc_info=error)
    return EXIT_BROKEN

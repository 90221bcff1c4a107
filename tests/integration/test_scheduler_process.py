"""The scheduler as a process on a real server with production's permissions: hosts are heard, missed, and said lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.nats import NatsServer
from tests.support.processes import ServiceProcess
from torpor_contracts.errors import TorporError
from torpor_contracts.host import HostCapacity, HostHeartbeat, RegisterHost
from torpor_contracts.ids import SYSTEM_TENANT, CommandId, HostId, TenantId
from torpor_contracts.replies import Receipt, Refusal, Reply
from torpor_contracts.scheduling import HostsAnswer, SessionView
from torpor_contracts.session import CreateSession, RetryRule, TerminateSession
from torpor_messaging.nats_bus import NatsBus
from torpor_messaging.nats_link import Link
from torpor_messaging.ports import OutgoingCommand
from torpor_messaging.system import SystemClock, SystemIds

pytestmark = pytest.mark.anyio
BOUND_S = 30.0
LOST_AFTER_S = 1.5
HOST = HostId("host-a")
DEFAULT = TenantId("default")


class World:
    """A server, the scheduler and the log-relay on it, and somebody who plays a host."""

    def __init__(self, server: NatsServer, directory: Path, links: dict[str, Link]) -> None:
        self.links = links
        self.buses = {user: NatsBus(link, SystemClock()) for user, link in links.items()}
        environment = {
            "TORPOR_SCHEDULER_HOST_LOST_AFTER_S": str(LOST_AFTER_S),
            "TORPOR_SCHEDULER_LOOK_EVERY_S": "0.25",
            "TORPOR_SCHEDULER_SWEEP_EVERY_S": "0.25",
        }
        self.scheduler = ServiceProcess("torpor_scheduler", "scheduler", server, directory, environment)
        self.relay = ServiceProcess(
            "torpor_log_relay", "log-relay", server, directory, {"TORPOR_DATA_DIR": str(directory)}
        )

    async def start(self) -> None:
        for process in (self.scheduler, self.relay):
            process.start()
        for process in (self.scheduler, self.relay):
            await process.ready(self.links["admin"])

    async def call(self, user: str, tenant: TenantId, target: str, command: msgspec.Struct) -> Receipt | Refusal:
        outgoing = OutgoingCommand(
            tenant_id=tenant,
            service="scheduler",
            target=target,
            command=command,
            command_id=CommandId(SystemIds().new("cmd")),
        )
        reply = msgspec.json.decode(await self.buses[user].call(outgoing, BOUND_S), type=Reply)
        answer = reply.receipt or reply.refusal
        assert answer is not None
        return answer

    async def register(self) -> None:
        command = RegisterHost(
            boot_id="boot-1",
            driver="simulated",
            fingerprint="simulated-1",
            capacity=HostCapacity(vcpus=4, memory_mib=4096, disk_mib=8192, vms_max=4),
        )
        assert isinstance(await self.call("vm-host", SYSTEM_TENANT, HOST, command), Receipt)

    async def beat(self) -> None:
        heartbeat = HostHeartbeat(host_id=HOST, boot_id="boot-1", observed_at=datetime.now(UTC), vms=[])
        await self.buses["vm-host"].publish(f"obs.system.vm-host.heartbeat.{HOST}", msgspec.json.encode(heartbeat))

    async def host_state(self) -> str:
        data = await self.buses["operator"].query("qry.system.scheduler.hosts.-", b"{}", BOUND_S)
        return next((host.state for host in msgspec.json.decode(data, type=HostsAnswer).hosts), "unknown")

    async def session(self, session_id: str) -> SessionView:
        data = await self.buses["tenant-default"].query(f"qry.default.scheduler.session.{session_id}", b"{}", BOUND_S)
        return msgspec.json.decode(data, type=SessionView)

    async def until(self, holds: Callable[[Any], bool], look: Callable[[], Any]) -> None:
        give_up_at = time.monotonic() + BOUND_S
        seen: Any = None
        while True:
            try:
                seen = await look()
                if holds(seen):
                    return
            except (TorporError, msgspec.MsgspecError) as error:
                seen = error
            assert time.monotonic() < give_up_at, (seen, self.scheduler.log.read_text()[-4000:])
            await asyncio.sleep(0.05)  # until it holds, bounded above


@pytest.fixture
async def world(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[World]:
    users = ("admin", "operator", "vm-host", "tenant-default")
    links = {user: await nats_server.link(user) for user in users}
    made = World(nats_server, tmp_path, links)
    await made.start()
    yield made
    for process in (made.scheduler, made.relay):
        process.kill()
    for link in links.values():
        await link.close()


async def test_a_host_that_beats_is_kept_and_one_that_falls_silent_is_lost_in_the_stated_time(world: World) -> None:
    await world.register()
    kept_until = time.monotonic() + 2 * LOST_AFTER_S
    while time.monotonic() < kept_until:
        await world.beat()
        await asyncio.sleep(0.3)  # the rhythm of a host
    assert await world.host_state() == "up"
    created = await world.call("tenant-default", DEFAULT, "s-1", CreateSession())
    assert isinstance(created, Receipt)
    await world.until(lambda view: view.state == "starting", lambda: world.session("s-1"))
    await world.beat()
    silent_at = time.monotonic()
    await world.until(lambda state: state == "lost", world.host_state)
    assert LOST_AFTER_S - 0.5 < time.monotonic() - silent_at < LOST_AFTER_S + 5.0
    await world.until(lambda view: view.state == "placing", lambda: world.session("s-1"))
    view = await world.session("s-1")
    assert view.problem is not None
    assert view.problem.code in ("host-lost", "not-placed")


async def test_timers_and_deadlines_come_over_the_bus(world: World) -> None:
    rule = RetryRule(attempts_max=2, backoff_s=0.2, backoff_s_max=0.2, deadline_s=1.0)
    await world.call("tenant-default", DEFAULT, "s-1", CreateSession(start_retry=rule))
    await world.until(lambda view: view.state == "failed", lambda: world.session("s-1"))
    view = await world.session("s-1")
    assert view.problem is not None
    assert view.problem.code == "not-placed"


async def test_it_goes_on_where_it_was_killed(world: World) -> None:
    await world.call("tenant-default", DEFAULT, "s-1", CreateSession())
    world.scheduler.kill()
    waiting = asyncio.ensure_future(world.call("tenant-default", DEFAULT, "s-1", TerminateSession()))
    world.scheduler.start()
    await world.scheduler.ready(world.links["admin"])
    assert isinstance(await waiting, Receipt)
    await world.until(lambda view: view.state == "terminated", lambda: world.session("s-1"))

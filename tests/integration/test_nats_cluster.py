"""Three servers with the configuration of docker-compose: streams of three replicas, and any server may be killed."""

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg

from tests.support.nats import BINARY, free_port
from torpor_contracts.errors import TorporError, Transient
from torpor_contracts.host import HostDraining
from torpor_contracts.ids import CommandId, HostId, TenantId
from torpor_contracts.replies import Reply
from torpor_contracts.session import SuspendSession
from torpor_eventlog.codec import encode_event
from torpor_eventlog.instants import from_us
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Commit
from torpor_eventlog.relay import Relay
from torpor_messaging.nats_bus import NatsBus
from torpor_messaging.nats_config import write_users
from torpor_messaging.nats_events import NatsEventStream
from torpor_messaging.nats_link import Identity, Link
from torpor_messaging.ports import OutgoingCommand
from torpor_messaging.streams import create_all
from torpor_messaging.system import SystemClock

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
BOUND_S = 60.0
NODES = (1, 2, 3)


class Cluster:
    """Three servers of this machine, each with `deploy/nats/cluster.conf` but for ports and paths."""

    def __init__(self, directory: Path) -> None:
        self.seeds, _ = write_users(directory / "config", tenants=["default"])
        self._directory = directory
        self._ports = {node: free_port() for node in NODES}
        self._routes = {node: free_port() for node in NODES}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.url = ",".join(f"nats://127.0.0.1:{port}" for port in self._ports.values())

    def start(self, node: int) -> None:
        text = (ROOT / "deploy/nats/cluster.conf").read_text()
        for old, new in {
            "$NATS_NAME": f"nats-{node}",
            "0.0.0.0:4222": f"127.0.0.1:{self._ports[node]}",
            "0.0.0.0:8222": f"127.0.0.1:{free_port()}",
            "0.0.0.0:6222": f"127.0.0.1:{self._routes[node]}",
            "/data": str(self._directory / f"store-{node}"),
            **{f"nats://nats-{other}:6222": f"nats://127.0.0.1:{self._routes[other]}" for other in NODES},
        }.items():
            assert old in text, f"{old} is not in cluster.conf"
            text = text.replace(old, new)
        configuration = self._directory / "etc/torpor" / f"node-{node}.conf"
        configuration.parent.mkdir(parents=True, exist_ok=True)
        configuration.write_text(text)
        assert BINARY is not None
        with (self._directory / f"node-{node}.log").open("ab") as log:
            self._processes[node] = subprocess.Popen([BINARY, "--config", configuration], stdout=log, stderr=log)

    def kill(self, node: int) -> None:
        process = self._processes.pop(node)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def check(self) -> None:
        for node, process in self._processes.items():
            assert process.poll() is None, (self._directory / f"node-{node}.log").read_text()

    def close(self) -> None:
        for node in list(self._processes):
            self.kill(node)

    async def link(self, user: str) -> Link:
        seed = self.seeds[user]
        if user.startswith("tenant-"):
            return await Link.open(self.url, Identity.client("default", seed), timeout_s=BOUND_S)
        if user == "admin":
            return await Link.open(self.url, Identity("admin", "_INBOX.system.admin", seed), timeout_s=BOUND_S)
        return await Link.open(self.url, Identity.service(user, seed), timeout_s=BOUND_S)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    for node in NODES:
        made.start(node)
    yield made
    made.close()


@pytest.fixture
async def admin(cluster: Cluster) -> AsyncIterator[Link]:
    link = await cluster.link("admin")
    give_up_at = time.monotonic() + BOUND_S
    while True:
        try:
            await create_all(link, replicas=3)
            break
        except TorporError:  # until the cluster has a leader
            cluster.check()
            assert time.monotonic() < give_up_at
            await asyncio.sleep(0.2)
    yield link
    await link.close()


async def leader_of(link: Link, stream: str) -> int:
    answer = await link.api(f"STREAM.INFO.{stream}")
    return int(str(answer["cluster"]["leader"]).removeprefix("nats-"))


async def append(log: MemoryLog, count: int) -> None:
    start = (await log.head()).position
    for number in range(start, start + count):
        stream = f"host-{number}"
        event = HostDraining(host_id=HostId(stream), reason="", requested_at=from_us(number))
        await log.append(
            Commit(
                command_id=CommandId(f"c-{number}"),
                tenant_id=TenantId("system"),
                causation_id="c",
                correlation_id="g",
                request_digest=number.to_bytes(32, "big"),
                occurred_at_us=number,
                expected={stream: 0},
                events=[encode_event(stream, event)],
            )
        )


async def test_the_relay_outlives_the_leader(cluster: Cluster, admin: Link) -> None:
    log = MemoryLog()
    await append(log, 500)
    link = await cluster.link("log-relay")
    relay = Relay(log, NatsEventStream(link))
    running = asyncio.ensure_future(relay.run())
    await relay.wait_for(500, BOUND_S)
    killed = await leader_of(admin, "EVENTS")
    await asyncio.to_thread(cluster.kill, killed)
    await append(log, 500)
    await relay.wait_for(1000, BOUND_S)
    cluster.start(killed)
    await append(log, 10)
    await relay.wait_for(1010, BOUND_S)
    running.cancel()
    rows = await log.read(0, 1010)
    stream = NatsEventStream(admin)
    read: list[Any] = []
    while len(read) < 1010:
        batch = await stream.read(len(read), 1000)
        assert batch
        read += batch
    assert read == [(row.position, row) for row in rows]
    await link.close()


async def test_commands_of_a_tenant_reach_a_service_on_another_server(cluster: Cluster, admin: Link) -> None:
    async def answer(message: Msg) -> None:
        assert message.headers is not None
        await admin.publish(message.headers["Torpor-Reply"], msgspec.json.encode(Reply()))

    await admin.client.subscribe("cmd.>", cb=answer)
    await admin.client.flush()
    client = await cluster.link("tenant-default")
    bus = NatsBus(client, SystemClock())

    async def call(number: int) -> bytes:
        give_up_at = time.monotonic() + BOUND_S
        while True:
            command = OutgoingCommand(
                tenant_id=TenantId("default"),
                service="scheduler",
                target=f"ses-{number}",
                command=SuspendSession(),
                command_id=CommandId(f"c-{number}"),
            )
            try:
                return await bus.call(command, 2.0)
            except Transient:
                assert time.monotonic() < give_up_at

    assert [await call(number) for number in range(3)] == [b"{}"] * 3
    killed = await leader_of(admin, "COMMANDS")
    await asyncio.to_thread(cluster.kill, killed)
    assert await call(3) == b"{}"
    await client.close()

"""Measures a command's way to its receipt: one client, NATS, the scheduler as a process, an SQLite log, and back."""

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from tests.bench import receipt_floor
from tests.support.nats import NatsServer
from tests.support.processes import ServiceProcess
from torpor.bench.figures import Figure, Say, figure, percentile
from torpor_contracts.errors import Transient
from torpor_contracts.ids import CommandId, TenantId
from torpor_contracts.replies import Reply
from torpor_contracts.session import CreateSession
from torpor_messaging.nats_bus import NatsBus
from torpor_messaging.nats_link import Link
from torpor_messaging.ports import OutgoingCommand
from torpor_messaging.system import SystemClock, SystemIds

COMMANDS: Final = 400
AT_A_TIME: Final = 40
"""Ours and the floor take turns of so many, so that both see the same machine."""
WARM_UP: Final = 40
ANSWER_S: Final = 10.0
START_S: Final = 10.0
TENANT: Final = TenantId("default")


async def command_receipt(say: Say) -> Figure:
    """Beside a bare NATS request that is answered after one durable insert. Values are milliseconds, the p50."""
    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as place:
        directory = Path(place)
        server = NatsServer(directory / "nats", tenants=["default"])
        await asyncio.to_thread(server.start)
        scheduler = ServiceProcess("torpor_scheduler", "scheduler", server, directory)
        floor = None
        try:
            await asyncio.to_thread(server.make_streams)
            say("starting the scheduler")
            admin, client = await server.link("admin"), await server.link("tenant-default")
            scheduler.start()
            await scheduler.ready(admin)
            floor = _start_floor(server, directory)
            await _until_it_answers(client)
            ours, bare = await _measure(client, say)
            await client.close()
            await admin.close()
        finally:
            if floor is not None:
                floor.kill()
                floor.wait()
            if scheduler.process is not None:
                scheduler.kill()
            server.kill()
    return figure(
        "log.command_receipt",
        percentile(ours, 0.5) or 0.0,
        "ms",
        ("at most", 12),
        of="ratio",
        floor=percentile(bare, 0.5),
        samples=ours,
    )


async def _measure(client: Link, say: Say) -> tuple[list[float], list[float]]:
    bus, ids = NatsBus(client, SystemClock()), SystemIds()
    ours: list[float] = []
    bare: list[float] = []
    for done in range(-WARM_UP, COMMANDS, AT_A_TIME):
        say(f"{max(done, 0)} of {COMMANDS} commands")
        for number in range(done, done + AT_A_TIME):
            began_s = time.perf_counter()
            await client.request(receipt_floor.SUBJECT, b"x" * 300, ANSWER_S)
            took_bare_ms = (time.perf_counter() - began_s) * 1000
            took_ms = await _create(bus, ids)
            if number >= 0:
                ours.append(took_ms)
                bare.append(took_bare_ms)
    return ours, bare


async def _create(bus: NatsBus, ids: SystemIds) -> float:
    command = OutgoingCommand(
        tenant_id=TENANT,
        service="scheduler",
        target=ids.new("ses"),
        command=CreateSession(),
        command_id=CommandId(ids.new("cmd")),
    )
    began_s = time.perf_counter()
    data = await bus.call(command, ANSWER_S)
    took_ms = (time.perf_counter() - began_s) * 1000
    assert msgspec.json.decode(data, type=Reply).receipt is not None, data
    return took_ms


def _start_floor(server: NatsServer, directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", receipt_floor.__name__, server.url, server.seed("scheduler"), directory / "floor.db"]
    )


async def _until_it_answers(client: Link) -> None:
    give_up_at_s = time.monotonic() + START_S
    while True:
        try:
            await client.request(receipt_floor.SUBJECT, b"x", 0.5)
        except Transient:
            if time.monotonic() > give_up_at_s:
                raise
            await asyncio.sleep(0.05)
        else:
            return


BENCHES: Final = {"log": [command_receipt]}

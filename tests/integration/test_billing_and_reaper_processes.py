"""Billing and the reaper as processes, on a real server and a real log: asked, told by heartbeats, killed."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.histories import Machine, append, session_over, stream_of
from tests.support.nats import NatsServer
from tests.support.processes import ServiceProcess
from torpor_contracts.cleanup import CandidatesAnswer, ResourcesAnswer
from torpor_contracts.host import HostHeartbeat, VmObservation
from torpor_contracts.ids import HostId, TenantId, VmId
from torpor_contracts.usage import UsageAnswer
from torpor_eventlog.sqlite import SqliteLog
from torpor_messaging.nats_bus import NatsBus
from torpor_messaging.nats_link import Link
from torpor_messaging.system import SystemClock

pytestmark = pytest.mark.anyio
BOUND_S = 20.0
DEFAULT = TenantId("default")
MACHINE = replace(Machine(), tenant_id=DEFAULT)
QUICK = {"TORPOR_REAPER_NOTICE_S": "0", "TORPOR_REAPER_GRACE_S": "0"}


class World:
    """A server, a log, the two services, and those who talk to them."""

    def __init__(self, server: NatsServer, directory: Path, log: SqliteLog, links: dict[str, Link]) -> None:
        self.server = server
        self.directory = directory
        self.log = log
        self.links = links
        self.processes: list[ServiceProcess] = []

    async def start(self, service: str, **environment: str) -> ServiceProcess:
        process = ServiceProcess(f"torpor_{service}", service, self.server, self.directory, environment)
        self.processes.append(process)
        process.start()
        await process.ready(self.links["admin"])
        return process

    async def happened(self, *events: msgspec.Struct | tuple[str, msgspec.Struct]) -> None:
        for given in events:
            stream, event = given if isinstance(given, tuple) else (stream_of(given), given)
            await append(self.log, event, stream, tenant=DEFAULT)

    async def query(self, subject: str, user: str = "tenant-default", data: bytes = b"") -> bytes:
        return await NatsBus(self.links[user], SystemClock()).query(subject, data, BOUND_S)

    async def until(self, subject: str, condition: Callable[[Any], bool], user: str = "tenant-default") -> Any:
        give_up_at = time.monotonic() + BOUND_S
        while not condition(answer := json.loads(await self.query(subject, user))):
            assert time.monotonic() < give_up_at, answer
            await asyncio.sleep(0.05)  # until the condition holds, bounded above
        return answer

    async def beat(self, vm_id: VmId, second: int) -> None:
        """A heartbeat of host-a, which has this machine."""
        heartbeat = HostHeartbeat(
            host_id=HostId("host-a"),
            boot_id="boot-1",
            observed_at=datetime.now(UTC) + timedelta(seconds=second),
            vms=[VmObservation(vm_id=vm_id, session_id=None, incarnation=None, state="unknown")],
        )
        await self.links["vm-host"].publish("obs.system.vm-host.heartbeat.host-a", msgspec.json.encode(heartbeat))

    async def command(self, sequence: int) -> Any:
        """A stored command, waited for."""
        jetstream = self.links["admin"].client.jetstream()
        give_up_at = time.monotonic() + BOUND_S
        while (await jetstream.stream_info("COMMANDS")).state.messages < sequence:
            assert time.monotonic() < give_up_at, f"there are no {sequence} commands"
            await asyncio.sleep(0.05)  # until it is there, bounded above
        first = (await jetstream.stream_info("COMMANDS")).state.first_seq
        return await jetstream.get_msg("COMMANDS", first + sequence - 1)


@pytest.fixture
async def world(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[World]:
    log = await SqliteLog.open(tmp_path / "log.db")
    users = ("admin", "operator", "tenant-default", "tenant-other", "vm-host")
    made = World(nats_server, tmp_path, log, {user: await nats_server.link(user) for user in users})
    yield made
    for process in made.processes:
        process.kill()
    for link in made.links.values():
        await link.close()
    await log.close()


async def test_usage_is_answered_line_by_line_also_after_a_kill(world: World) -> None:
    await world.happened(("s-1", MACHINE.asked_for(0)), MACHINE.claimed(1), MACHINE.started(2))
    billing = await world.start("billing")
    subject = "qry.default.billing.usage.s-1"
    await world.until(subject, lambda answer: answer["position"] == 3)
    billing.kill()
    await world.happened(MACHINE.suspended(62), MACHINE.released(62))
    await world.start("billing")
    await world.until(subject, lambda answer: answer["position"] == 5)
    answer = msgspec.json.decode(await world.query(subject), type=UsageAnswer)
    (line,) = answer.lines
    assert (line.opened_position, line.closed_position, line.seconds) == (3, 4, Decimal(60))
    assert str(answer.totals.amount) == "0.000907500"
    refused = json.loads(await world.query(subject, data=b'{"limit": 0}'))
    assert refused["refusal"]["code"] == "illegal-query"
    elsewhere = json.loads(await world.query("qry.other.billing.usage.s-1", "tenant-other"))
    assert elsewhere["lines"] == []


async def test_the_reaper_freezes_what_nobody_claims_and_answers_what_is_held(world: World) -> None:
    await world.happened(("s-1", MACHINE.asked_for(0)), MACHINE.claimed(1), MACHINE.started(2))
    reaper = await world.start("reaper", **QUICK)
    await world.until("qry.default.reaper.resources.s-1", lambda answer: answer["position"] == 3)
    resources = msgspec.json.decode(await world.query("qry.default.reaper.resources.s-1"), type=ResourcesAnswer)
    assert {claim.holder for claim in resources.resources} == {"incarnation 1 of session s-1"}
    assert json.loads(await world.query("qry.other.reaper.resources.s-1", "tenant-other"))["resources"] == []

    await world.happened(("s-1", session_over(30)))
    await world.until("qry.default.reaper.candidates.-", lambda answer: len(answer["candidates"]) == 1)
    await world.beat(MACHINE.vm_id, 0)
    freeze = await world.command(1)
    assert freeze.subject == "cmd.default.vm-host.quarantine-vm.host-a.vm-1"
    reaper.kill()
    await world.happened(MACHINE.quarantined(50))
    await world.start("reaper", **QUICK)
    await world.until(
        "qry.default.reaper.candidates.-", lambda answer: answer["candidates"][0]["state"] == "quarantined"
    )
    await world.beat(MACHINE.vm_id, 1)
    reap = await world.command(2)
    assert reap.subject == "cmd.default.vm-host.reap-vm.host-a.vm-1"
    assert json.loads(reap.data)["checked_position"] == 6
    answer = await world.query("qry.system.reaper.candidates.-", "operator")
    (candidate,) = msgspec.json.decode(answer, type=CandidatesAnswer).candidates
    assert (candidate.state, candidate.tenant_id, candidate.reason) == ("confirmed", "default", "superseded")

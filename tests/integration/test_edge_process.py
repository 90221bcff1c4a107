"""A service as a process, under the real edge, on a real server: started, asked, killed, and started again."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.support.nats import NatsServer
from tests.support.processes import ServiceProcess
from torpor_contracts.errors import TorporError, Transient
from torpor_contracts.ids import CommandId, TenantId
from torpor_contracts.replies import Receipt, Refusal, Reply
from torpor_contracts.session import SuspendSession, TerminateSession
from torpor_messaging.edge import EXIT_AWAY, EXIT_BROKEN, EXIT_REFUSED
from torpor_messaging.nats_bus import NatsBus
from torpor_messaging.nats_link import Link
from torpor_messaging.ports import OutgoingCommand
from torpor_messaging.streams import create_all
from torpor_messaging.system import SystemClock, SystemIds

pytestmark = pytest.mark.anyio
BOUND_S = 20.0
SERVICE = "tests.support.edge_service"


class World:
    """A server, a service, and those who talk to it."""

    def __init__(self, server: NatsServer, directory: Path, admin: Link, client: Link) -> None:
        self.server = server
        self.directory = directory
        self.admin = admin
        self.client = client
        self.bus = NatsBus(client, SystemClock())
        self.processes: list[ServiceProcess] = []

    async def start(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        ready: bool = True,
        module: str = SERVICE,
        user: str = "scheduler",
    ) -> ServiceProcess:
        process = ServiceProcess(module, user, self.server, self.directory, environment)
        self.processes.append(process)
        process.start()
        if ready:
            await process.ready(self.admin)
        return process

    async def terminate(
        self, target: str, reason: str = "", command_id: str | None = None, timeout_s: float = BOUND_S
    ) -> Receipt | Refusal:
        return await self.call(target, TerminateSession(reason=reason), command_id, timeout_s)

    async def call(
        self, target: str, command: msgspec.Struct, command_id: str | None = None, timeout_s: float = BOUND_S
    ) -> Receipt | Refusal:
        outgoing = OutgoingCommand(
            tenant_id=TenantId("default"),
            service="scheduler",
            target=target,
            command=command,
            command_id=CommandId(command_id or SystemIds().new("cmd")),
        )
        reply = msgspec.json.decode(await self.bus.call(outgoing, timeout_s), type=Reply)
        answer = reply.receipt or reply.refusal
        assert answer is not None
        return answer

    async def query(self, type_: str, target: str = "-", data: bytes = b"{}") -> Any:
        return json.loads(await self.bus.query(f"qry.default.scheduler.{type_}.{target}", data, BOUND_S))

    async def until(self, condition: Callable[[Any], bool], type_: str, target: str = "-") -> Any:
        give_up_at = time.monotonic() + BOUND_S
        while True:
            try:
                answer = await self.query(type_, target)
            except TorporError as error:
                answer = {"error": str(error)}
            if "error" not in answer and "refusal" not in answer and condition(answer):
                return answer
            assert time.monotonic() < give_up_at, answer
            await asyncio.sleep(0.02)  # until the condition holds, bounded above

    async def dead(self) -> list[dict[str, str]]:
        jetstream = self.admin.client.jetstream()
        state = (await jetstream.stream_info("DEAD")).state
        letters = []
        for sequence in range(1, state.last_seq + 1):
            message = await jetstream.get_msg("DEAD", sequence)
            if message.subject == "dead.scheduler":
                letters.append(dict(message.headers or {}))
        return letters

    async def pending(self) -> int:
        return int((await self.admin.api("STREAM.INFO.COMMANDS"))["state"]["messages"])

    async def until_pending(self, count: int) -> None:
        give_up_at = time.monotonic() + BOUND_S
        while (now := await self.pending()) != count:
            assert time.monotonic() < give_up_at, f"{now} commands are in the stream, not {count}"
            await asyncio.sleep(0.02)  # until they are, bounded above


@pytest.fixture
async def world(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[World]:
    made = World(nats_server, tmp_path, await nats_server.link("admin"), await nats_server.link("tenant-default"))
    yield made
    for process in made.processes:
        process.kill()
    await made.client.close()
    await made.admin.close()


def receipt(answer: Receipt | Refusal) -> Receipt:
    assert isinstance(answer, Receipt), answer
    return answer


def refusal(answer: Receipt | Refusal) -> Refusal:
    assert isinstance(answer, Refusal), answer
    return answer


async def test_commands_are_answered_with_their_first_receipt(world: World) -> None:
    await world.start()
    first = receipt(await world.terminate("ses-1", "a", "c-1"))
    assert (first.command_id, first.stream, first.version, first.position) == ("c-1", "ses-1", 1, 1)
    assert receipt(await world.terminate("ses-1", "b", "c-2")).version == 2
    assert receipt(await world.terminate("ses-1", "a", "c-1")) == first
    assert refusal(await world.terminate("ses-1", "x", "c-1")).code == "command-id-reused"
    assert refusal(await world.terminate("ses-1", "refuse")).code == "wrong-state"
    assert refusal(await world.terminate("ses-1", "ignore")).code == "ignored"
    assert receipt(await world.terminate("ses-1", "flaky")).version == 3
    await world.until_pending(0)


async def test_a_plain_client_is_refused_in_words(world: World) -> None:
    await world.start()
    replies: asyncio.Queue[Any] = asyncio.Queue()

    async def note(message: Any) -> None:
        replies.put_nowait(json.loads(message.data))

    await world.client.client.subscribe("_INBOX.default.plain", cb=note)
    for subject, data, headers, code in (
        ("cmd.default.scheduler.terminate-session.ses-1", b"{", {}, "malformed-command"),
        ("cmd.default.scheduler.terminate-session.ses-1", b'{"why":1}', {}, "malformed-command"),
        ("cmd.default.scheduler.terminate-session.ses-1", b"x" * 300_000, {}, "payload-too-large"),
        ("cmd.default.scheduler.fly-session.ses-1", b"{}", {}, "unknown-command"),
        ("cmd.default.scheduler.terminate-session.SES", b"{}", {}, "illegal-subject"),
        ("cmd.default.scheduler.terminate-session.ses-1", b"{}", {"ce-id": "a b"}, "illegal-command-id"),
    ):
        await world.client.client.jetstream().publish(
            subject, data, headers={"Torpor-Reply": "_INBOX.default.plain", **headers}
        )
        if code is not None:
            answer = await asyncio.wait_for(replies.get(), BOUND_S)
            assert answer["refusal"]["code"] == code
            assert answer["refusal"]["advice"]
    assert receipt(await world.terminate("ses-1")).version == 1, "the service lives on"
    await world.until_pending(0)
    assert not await world.dead()


async def test_one_target_in_order_others_in_parallel(world: World) -> None:
    await world.start()
    started = time.monotonic()
    slow = [world.terminate(f"ses-{number}", "slow 1.0") for number in range(8)]
    for number in range(20):
        await world.bus.send(
            OutgoingCommand(
                tenant_id=TenantId("default"),
                service="scheduler",
                target="ses-0",
                command=TerminateSession(reason=str(number)),
                command_id=CommandId(f"c-{number}"),
            )
        )
    await asyncio.gather(*slow)
    assert time.monotonic() - started < 5.0, "eight slow ones took no longer than one"
    reasons = (await world.until(lambda row: row["count"] == 21, "seen", "ses-0"))["reasons"]
    numbers = [reason for reason in reasons if not reason.startswith("slow")]
    assert numbers == [str(number) for number in range(20)]


async def test_a_handler_that_works_longer_than_the_wait_is_not_given_it_twice(world: World) -> None:
    await world.start()
    assert receipt(await world.terminate("ses-1", "slow 3.0")).version == 1
    await world.until_pending(0)
    assert (await world.until(lambda row: row["count"] >= 1, "seen", "ses-1"))["count"] == 1


async def test_a_killed_process_loses_no_command(world: World) -> None:
    process = await world.start()
    calls = [asyncio.ensure_future(world.terminate(f"ses-{number % 3}", "slow 0.5")) for number in range(12)]
    await world.until_pending(12)
    process.kill()
    await world.start()
    versions = [receipt(answer).version for answer in await asyncio.gather(*calls)]
    assert sorted(versions) == sorted([1, 2, 3, 4] * 3)
    await world.until_pending(0)


async def test_poison_is_buried_and_the_asker_told(world: World) -> None:
    await world.start()
    assert refusal(await world.terminate("ses-1", "poison", "c-1")).code == "poison"
    [letter] = await world.dead()
    assert letter["Torpor-Dead-Subject"] == "cmd.default.scheduler.terminate-session.ses-1"
    assert letter["ce-id"] == "c-1"
    await world.until_pending(0)


async def test_a_violated_invariant_ends_the_process(world: World) -> None:
    process = await world.start()
    with pytest.raises(Transient):
        await world.terminate("ses-1", "die", timeout_s=1.0)
    assert process.wait() == EXIT_BROKEN
    assert await world.pending() == 1


async def test_a_message_that_kills_every_process_is_buried_in_the_end(world: World) -> None:
    calling = asyncio.ensure_future(world.terminate("ses-1", "exit"))
    for _ in range(2):
        process = await world.start({"TEST_DELIVERIES_MAX": "2"}, ready=False)
        assert await asyncio.to_thread(process.wait) == 9
    await world.start({"TEST_DELIVERIES_MAX": "2"})
    assert refusal(await calling).code == "given up"
    [letter] = await world.dead()
    assert letter["Torpor-Dead-Deliveries"] == "3"
    assert receipt(await world.terminate("ses-1")).version == 1


async def test_views_reactions_timers_observations_and_loops(world: World) -> None:
    await world.start()
    await world.start({"TORPOR_DATA_DIR": str(world.directory)}, module="torpor_log_relay", user="log-relay")
    receipt(await world.terminate("ses-1", "a"))
    receipt(await world.terminate("ses-1", "set-timer 7"))
    await world.admin.publish("obs.system.vm-host.heartbeat.host-1", b"bug")
    await world.admin.publish("obs.system.vm-host.heartbeat.host-1", b"alive")
    assert (await world.until(lambda row: row["count"] == 2, "seen", "ses-1"))["reasons"] == ["a", "set-timer 7"]
    expected = {
        "reaction ses-1 1 a",
        "reaction ses-1 2 set-timer 7",
        "timer idle ses-1 7",
        "obs.system.vm-host.heartbeat.host-1 bug",
        "obs.system.vm-host.heartbeat.host-1 alive",
    }
    state = await world.until(lambda state: expected <= set(state["reasons"]), "state")
    await world.until(lambda later: later["count"] > max(3, state["count"]), "state")
    health = json.loads((await world.admin.request("qry.system.scheduler.health.-", b"", BOUND_S)).data)
    assert health["ready"]
    assert health["positions"] == {"seen": 2, "test-reactor": 2}
    assert health["failures"] == {"obs.system.vm-host.heartbeat.*": 1, "beat": 1}


async def test_queries_are_answered_or_refused(world: World) -> None:
    await world.start()
    assert (await world.query("seen", "ses-9"))["refusal"]["code"] == "not-found"
    assert (await world.query("seen", "ses-9", b'{"bug":1}'))["refusal"]["code"] == "internal-error"
    waiting = (await world.query("seen", "ses-9", b'{"wait":1}'))["refusal"]
    assert (waiting["code"], waiting["retry_after_s"]) == ("unavailable", 0.5)
    for data in (b"{", b"[]", b"[" * 60_000, b"x" * 70_000):
        code = (await world.query("seen", "ses-9", data))["refusal"]["code"]
        assert code == ("payload-too-large" if len(data) > 65_536 else "malformed-query")
    assert (await world.query("seen", "ses-9", b""))["refusal"]["code"] == "not-found"
    heard = []

    async def note(message: Any) -> None:
        heard.append(message.subject)

    await world.admin.client.subscribe("hint.>", cb=note)
    await world.admin.client.publish("qry.default.scheduler.state.-", b"", reply="hint.log")
    await world.admin.client.publish("qry.default.scheduler.seen.SES", b"", reply="hint.log")
    assert (await world.query("state"))["stream"] == ""
    assert not heard


async def test_a_killed_server_costs_nothing_but_time(world: World) -> None:
    await world.start()
    receipt(await world.terminate("ses-1", "a", "c-1"))
    await asyncio.to_thread(world.server.kill)
    await asyncio.to_thread(world.server.start)
    assert receipt(await world.terminate("ses-1", "b", "c-2")).version == 2
    await world.until(lambda row: row["count"] == 2, "seen", "ses-1")


async def test_consumers_that_the_server_lost_are_made_anew(world: World) -> None:
    process = await world.start()
    receipt(await world.terminate("ses-1", "a"))
    await asyncio.to_thread(world.server.kill)
    world.server.wipe()
    await asyncio.to_thread(world.server.start)
    await create_all(world.admin)
    assert receipt(await world.terminate("ses-1", "b")).version == 2
    await world.admin.api("CONSUMER.DELETE.COMMANDS.scheduler")
    assert receipt(await world.terminate("ses-1", "c")).version == 3
    assert process.process is not None
    assert process.process.poll() is None, "it lived through all of it"


async def test_it_finishes_what_runs_and_stops(world: World) -> None:
    process = await world.start()
    running = asyncio.ensure_future(world.terminate("ses-1", "slow 1.0"))
    await world.until(lambda state: "slow" in state["reasons"], "state")
    assert await asyncio.to_thread(process.stop) == 0
    assert receipt(await running).version == 1
    assert await world.pending() == 0


async def test_without_streams_it_says_what_to_do_and_stops(bare_nats: NatsServer, tmp_path: Path) -> None:
    process = ServiceProcess(SERVICE, "scheduler", bare_nats, tmp_path, {"TORPOR_START_S": "5"})
    process.start()
    assert await asyncio.to_thread(process.wait) == EXIT_REFUSED
    assert "setup_streams" in process.log.read_text()


async def test_without_a_server_it_waits_and_stops(bare_nats: NatsServer, tmp_path: Path) -> None:
    bare_nats.kill()
    process = ServiceProcess(SERVICE, "scheduler", bare_nats, tmp_path, {"TORPOR_START_S": "1"})
    process.start()
    assert await asyncio.to_thread(process.wait) == EXIT_AWAY
    assert "cannot connect to NATS" in process.log.read_text()


async def test_wrong_settings_are_named(bare_nats: NatsServer, tmp_path: Path) -> None:
    process = ServiceProcess(SERVICE, "scheduler", bare_nats, tmp_path, {"TORPOR_NATS_URL": "http://here"})
    process.start()
    assert await asyncio.to_thread(process.wait) == EXIT_REFUSED
    assert "nats://host:port" in process.log.read_text()


async def test_the_log_shows_no_secret(world: World) -> None:
    process = await world.start({"TORPOR_LOG_LEVEL": "debug"})
    receipt(await world.terminate("ses-1"))
    seed = world.server.seed("scheduler").read_text().strip()
    written = process.log.read_text()
    assert "ready" in written
    assert seed not in written


async def test_idling_costs_next_to_nothing(world: World) -> None:
    process = await world.start()
    receipt(await world.call("ses-1", SuspendSession()))
    assert process.process is not None
    watched = psutil.Process(process.process.pid)
    await asyncio.to_thread(watched.cpu_percent, 1.0)  # what a start leaves to do
    used = await asyncio.to_thread(watched.cpu_percent, 4.0)
    assert used < 5.0, f"{used} % of a core"  # its own loop beats 20 times a second

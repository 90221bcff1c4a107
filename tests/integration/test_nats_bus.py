"""The bus, the timers and the streams on a real server, and what is said when the server is not what it should be."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from tests.support.nats import NatsServer, free_port
from torpor_contracts.errors import Rejected, TorporError, Transient
from torpor_contracts.ids import CommandId, TenantId
from torpor_contracts.session import CreateSession, SuspendSession
from torpor_messaging.nats_bus import NatsBus
from torpor_messaging.nats_config import write_users
from torpor_messaging.nats_link import Identity, Link
from torpor_messaging.policy import trace
from torpor_messaging.ports import OutgoingCommand
from torpor_messaging.streams import check_all, create_all
from torpor_messaging.system import SystemClock
from torpor_messaging.timers import NatsTimers

pytestmark = pytest.mark.anyio
BOUND_S = 10.0
SHORT_S = 0.3
TENANT = TenantId("default")
Connect = Callable[[str], Awaitable[Link]]


@pytest.fixture
async def connect(bare_nats: NatsServer) -> AsyncIterator[Connect]:
    links: list[Link] = []

    async def open_link(user: str) -> Link:
        links.append(await bare_nats.link(user))
        return links[-1]

    yield open_link
    for link in links:
        await link.close()


@pytest.fixture
async def streams(connect: Connect) -> list[str]:
    return await create_all(await connect("admin"))


def suspend(target: str = "ses-1", **changes: Any) -> OutgoingCommand:
    fields: dict[str, Any] = {
        "tenant_id": TENANT,
        "service": "scheduler",
        "target": target,
        "command": SuspendSession(),
        "command_id": CommandId("c-1"),
    }
    return OutgoingCommand(**(fields | changes))


def code(error: pytest.ExceptionInfo[Rejected]) -> str:
    assert error.value.advice
    return error.value.code


async def test_a_sent_command_is_stored(connect: Connect, streams: list[str]) -> None:
    assert streams == ["COMMANDS", "EVENTS", "OUTPUT", "TIMERS", "DEAD", "HEADS"]
    bus = NatsBus(await connect("scheduler"), SystemClock())
    traced = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    token = trace.set(traced)
    await bus.send(suspend())
    trace.reset(token)
    await bus.send(suspend(command_id=CommandId("c-2")))
    jetstream = (await connect("admin")).client.jetstream()
    state = (await jetstream.stream_info("COMMANDS")).state
    assert state.messages == 2
    first = await jetstream.get_msg("COMMANDS", state.first_seq)
    assert first.subject == "cmd.default.scheduler.suspend-session.ses-1"
    assert first.headers is not None
    assert (first.headers["ce-id"], first.headers["traceparent"]) == ("c-1", traced)


async def test_sequences_never_come_again_after_the_stream_was_lost(connect: Connect, streams: list[str]) -> None:
    admin = await connect("admin")
    bus = NatsBus(await connect("scheduler"), SystemClock())
    await bus.send(suspend())
    before = (await admin.api("STREAM.INFO.COMMANDS"))["state"]["last_seq"]
    await admin.api("STREAM.DELETE.COMMANDS")
    await create_all(admin)
    await bus.send(suspend())
    assert (await admin.api("STREAM.INFO.COMMANDS"))["state"]["last_seq"] > before


async def test_a_call_is_answered_by_the_service_at_an_inbox_of_the_tenant(
    connect: Connect, streams: list[str]
) -> None:
    service, seen = await connect("admin"), []

    async def answer(message: Msg) -> None:
        assert message.headers is not None
        seen.append(message.headers["Torpor-Reply"])
        await service.publish(message.headers["Torpor-Reply"], b'{"receipt":1}')

    await service.client.subscribe("cmd.>", cb=answer)
    await service.client.flush()
    client, tenant = (
        NatsBus(await connect("scheduler"), SystemClock()),
        NatsBus(await connect("tenant-default"), SystemClock()),
    )
    assert await client.call(suspend(), BOUND_S) == b'{"receipt":1}'
    assert await tenant.call(suspend(), BOUND_S) == b'{"receipt":1}'
    await asyncio.gather(*(client.call(suspend(f"ses-{number}"), BOUND_S) for number in range(50)))
    assert all(inbox.startswith("_INBOX.default.") for inbox in seen)


async def test_a_call_that_nobody_answers_is_transient(connect: Connect, streams: list[str]) -> None:
    bus = NatsBus(await connect("scheduler"), SystemClock())
    with pytest.raises(Transient):
        await bus.call(suspend(), SHORT_S)


async def test_without_streams_everything_stored_is_transient(connect: Connect) -> None:
    bus = NatsBus(await connect("scheduler"), SystemClock())
    with pytest.raises(Transient):
        await bus.send(suspend())
    with pytest.raises(Transient):
        await bus.call(suspend(), SHORT_S)
    with pytest.raises(Transient):
        await bus.publish_stored("dead.a", b"")


async def test_a_full_stream_is_transient(connect: Connect, streams: list[str]) -> None:
    admin = await connect("admin")
    config = (await admin.api("STREAM.INFO.COMMANDS"))["config"]
    assert "error" not in await admin.api("STREAM.UPDATE.COMMANDS", {**config, "max_msgs": 1})
    bus = NatsBus(await connect("scheduler"), SystemClock())
    await bus.send(suspend())
    with pytest.raises(Transient, match="maximum messages"):
        await bus.send(suspend())
    with pytest.raises(Transient, match="maximum messages"):
        await bus.call(suspend(), BOUND_S)


async def test_what_is_not_permitted_is_refused_at_once(connect: Connect, streams: list[str]) -> None:
    bus = NatsBus(await connect("tenant-default"), SystemClock())
    for attempt in (
        bus.send(suspend(tenant_id=TenantId("other"))),
        bus.call(suspend(tenant_id=TenantId("other")), 60.0),
        bus.publish_stored("dead.a", b""),
        bus.query("qry.other.scheduler.sessions.-", b"", 60.0),
    ):
        with pytest.raises(Rejected) as refused:
            await asyncio.wait_for(attempt, BOUND_S)
        assert code(refused) == "not-permitted"


async def test_an_oversized_payload_is_refused(connect: Connect, streams: list[str]) -> None:
    bus = NatsBus(await connect("scheduler"), SystemClock())
    for attempt in (
        bus.send(suspend(command=CreateSession(metadata={"a": "x" * 300_000}))),
        bus.publish_stored("dead.a", b"x" * 2_000_000),
        bus.publish("hint.log", b"x" * 2_000_000),
        bus.query("qry.default.scheduler.sessions.-", b"x" * 2_000_000, 1.0),
    ):
        with pytest.raises(Rejected) as refused:
            await attempt
        assert code(refused) == "payload-too-large"


async def answered(bus: NatsBus, subject: str) -> bytes:
    """The answer, once the server has let the other account know that somebody is there."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                return await bus.query(subject, b"?", BOUND_S)
            except Transient:
                continue


async def test_a_question_is_answered_or_transient(connect: Connect) -> None:
    service, bus = await connect("scheduler"), NatsBus(await connect("tenant-default"), SystemClock())

    async def answer(message: Msg) -> None:
        await service.client.publish(message.reply, b"answer to " + message.data)

    with pytest.raises(Transient, match="nobody"):
        await bus.query("qry.default.scheduler.sessions.-", b"?", BOUND_S)
    await service.client.subscribe("qry.*.scheduler.>", cb=answer)
    await service.client.flush()
    assert await answered(bus, "qry.default.scheduler.sessions.-") == b"answer to ?"


async def test_the_bus_works_again_after_the_server_was_killed(
    connect: Connect, streams: list[str], bare_nats: NatsServer
) -> None:
    bus = NatsBus(await connect("scheduler"), SystemClock())
    await bus.send(suspend())
    await asyncio.to_thread(bare_nats.kill)
    with pytest.raises(Transient):
        await bus.query("qry.default.scheduler.sessions.-", b"", SHORT_S)
    await asyncio.to_thread(bare_nats.start)
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                await bus.send(suspend())
                break
            except Transient:
                continue


@asynccontextmanager
async def due_timers(link: Link) -> AsyncIterator[asyncio.Queue[tuple[str, bytes, datetime]]]:
    arrived: asyncio.Queue[tuple[str, bytes, datetime]] = asyncio.Queue()

    async def note(message: Msg) -> None:
        arrived.put_nowait((message.subject, message.data, datetime.now(UTC)))
        await message.ack()

    subscription = await link.client.jetstream().subscribe(
        "timer.due.*.scheduler.>", stream="TIMERS", durable="test-timers", cb=note, manual_ack=True
    )
    yield arrived
    await subscription.unsubscribe()


async def test_timers_are_never_early_replace_each_other_and_leave_nothing(
    connect: Connect, streams: list[str]
) -> None:
    admin, timers = await connect("admin"), NatsTimers(NatsBus(await connect("scheduler"), SystemClock()))
    start = datetime.now(UTC)
    due = {f"ses-{number}": start + timedelta(milliseconds=300 + 37 * number) for number in range(20)}
    for target, due_at in due.items():
        await timers.set(TENANT, "scheduler", "idle", target, due_at + timedelta(seconds=60), b"stale")
        await timers.set(TENANT, "scheduler", "idle", target, due_at, target.encode())
    await timers.set(TENANT, "scheduler", "stop", "ses-0", start - timedelta(hours=1), b"past")
    async with due_timers(admin) as arrived:
        for _ in range(21):
            subject, data, at = await asyncio.wait_for(arrived.get(), BOUND_S)
            if data == b"past":
                assert subject == "timer.due.default.scheduler.stop.ses-0"
                continue
            assert subject == f"timer.due.default.scheduler.idle.{data.decode()}"
            assert timedelta(0) <= at - due.pop(data.decode()) < timedelta(seconds=2)
        await admin.client.flush()
    assert not due
    assert (await admin.api("STREAM.INFO.TIMERS"))["state"]["messages"] == 0


async def test_timers_outlive_a_kill_of_the_server(connect: Connect, streams: list[str], bare_nats: NatsServer) -> None:
    timers = NatsTimers(NatsBus(await connect("scheduler"), SystemClock()))
    soon, later = datetime.now(UTC) + timedelta(seconds=0.2), datetime.now(UTC) + timedelta(seconds=2.5)
    await timers.set(TENANT, "scheduler", "idle", "ses-1", soon, b"1")
    await timers.set(TENANT, "scheduler", "idle", "ses-2", later, b"2")
    await asyncio.to_thread(bare_nats.kill)
    await asyncio.to_thread(bare_nats.start)
    fired: dict[bytes, datetime] = {}
    async with due_timers(await connect("admin")) as arrived:
        while len(fired) < 2:
            _, data, at = await asyncio.wait_for(arrived.get(), BOUND_S)
            assert data not in fired, "it fires once"
            fired[data] = at
    assert fired[b"1"] >= soon
    assert fired[b"2"] >= later


async def test_dead_letters_and_advisories_are_kept(connect: Connect, streams: list[str]) -> None:
    admin = await connect("admin")
    bus = NatsBus(await connect("scheduler"), SystemClock())
    await bus.publish_stored("dead.scheduler-commands", b"{}")
    await bus.send(suspend())
    jetstream = admin.client.jetstream()
    pull = await jetstream.pull_subscribe("cmd.>", durable="t", stream="COMMANDS")
    [message] = await pull.fetch(1, timeout=2)
    await message.term()
    async with asyncio.timeout(BOUND_S):
        while (state := (await admin.api("STREAM.INFO.DEAD"))["state"])["messages"] < 2:
            pass
    subjects = {(await jetstream.get_msg("DEAD", sequence)).subject for sequence in range(1, state["messages"] + 1)}
    assert subjects == {"dead.scheduler-commands", "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.COMMANDS.t"}


async def test_services_insist_on_the_streams_as_they_must_be(connect: Connect) -> None:
    admin, service = await connect("admin"), await connect("scheduler")
    with pytest.raises(Rejected) as missing:
        await check_all(service)
    assert code(missing) == "stream-missing"
    await create_all(admin)
    assert await create_all(admin) == []
    await check_all(service)
    config = (await admin.api("STREAM.INFO.EVENTS"))["config"]
    assert "error" not in await admin.api("STREAM.UPDATE.EVENTS", {**config, "max_msgs": 3})
    with pytest.raises(Rejected, match="max_msgs") as differs:
        await check_all(service)
    assert code(differs) == "stream-differs"
    with pytest.raises(Rejected):
        await create_all(admin)
    await check_all(service, ["COMMANDS", "OUTPUT"])


async def open_and_fail(url: str, identity: Identity, timeout_s: float = 2.0) -> TorporError:
    try:
        link = await Link.open(url, identity, timeout_s=timeout_s)
    except TorporError as error:
        return error
    await link.close()
    raise AssertionError("it connected")


async def test_an_unknown_key_is_refused_with_advice(bare_nats: NatsServer, tmp_path: Path) -> None:
    seeds, _ = write_users(tmp_path / "foreign", tenants=["default"])
    error = await open_and_fail(bare_nats.url, Identity.service("scheduler", seeds["scheduler"]))
    assert isinstance(error, Rejected)
    assert error.code == "nats-credentials"
    for content in ("", "SUNOTAKEY", "rubbish"):
        (tmp_path / "seed").write_text(content)
        error = await open_and_fail(bare_nats.url, Identity.service("scheduler", tmp_path / "seed"))
        assert isinstance(error, Rejected), content
        assert error.code == "nats-credentials"
    error = await open_and_fail(bare_nats.url, Identity.service("scheduler", tmp_path / "missing"))
    assert isinstance(error, Rejected)


async def test_an_absent_server_is_transient() -> None:
    error = await open_and_fail(f"nats://127.0.0.1:{free_port()}", Identity("x", "_INBOX.x"), timeout_s=0.5)
    assert isinstance(error, Transient)


@asynccontextmanager
async def pretender(first: bytes) -> AsyncIterator[str]:
    """Something that listens on a port, says `first`, and answers every PING."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        try:
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("version", ["2.11.9", "2.9.0", "", "nonsense", "2.12"])
async def test_a_wrong_server_version_is_refused_with_advice(version: str) -> None:
    info = {"server_id": "x", "version": version, "max_payload": 1048576, "headers": True, "proto": 1}
    async with pretender(b"INFO " + json.dumps(info).encode() + b"\r\n") as url:
        error = await open_and_fail(url, Identity("x", "_INBOX.x"))
    assert isinstance(error, Rejected)
    assert error.code == "nats-server-version"
    assert "nats-server" in error.advice


@pytest.mark.parametrize("version", ["2.12.0", "2.15.1", "2.16.0-RC.1", "v3.0.0"])
async def test_a_new_enough_version_is_taken(version: str) -> None:
    info = {"server_id": "x", "version": version, "max_payload": 1048576, "headers": True, "proto": 1}
    async with pretender(b"INFO " + json.dumps(info).encode() + b"\r\n") as url:
        link = await Link.open(url, Identity("x", "_INBOX.x"), timeout_s=2.0)
        await link.close()


async def test_another_program_on_the_port_is_named() -> None:
    async with pretender(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        error = await open_and_fail(url, Identity("x", "_INBOX.x"), timeout_s=1.0)
    assert isinstance(error, Rejected)
    assert error.code == "not-a-nats-server"

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from nats.aio.msg import Msg

import torpor
from tests.support.nats import NatsServer
from torpor.client.models import Chunk
from torpor_contracts import session as contract
from torpor_contracts.ids import ExecId, HostId, SessionId, TenantId, VmId
from torpor_contracts.replies import Reply
from torpor_messaging.nats_keys import ensure_key

from .small_scheduler import SmallScheduler, refusal

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SESSION = "ses-1"
REQUESTED = contract.SessionRequested(
    session_id=SessionId(SESSION),
    tenant_id=TenantId("default"),
    machine=contract.MachineSpec(),
    idle_after_s=None,
    start_retry=contract.RetryRule(),
    metadata={},
    requested_at=NOW,
)
STARTED = contract.SessionStarted(vm_id=VmId("vm-1"), host_id=HostId("host-1"), incarnation=1, observed_at=NOW)
FAILED = contract.SessionFailed(incarnation=1, code="no-host", detail="no host", way_out="add one", observed_at=NOW)


def ended(program: str, output_bytes: int, outcome: str = "exited", exit_code: int | None = 0) -> contract.ExecEnded:
    return contract.ExecEnded(
        exec_id=ExecId(program),
        incarnation=1,
        outcome=outcome,  # type: ignore[arg-type]
        exit_code=exit_code,
        detail="",
        output_bytes=output_bytes,
        observed_at=NOW,
    )


@pytest.fixture
def server(nats_server: NatsServer) -> NatsServer:
    """A server with the accounts and permissions of production."""
    return nats_server


@asynccontextmanager
async def both(server: NatsServer) -> AsyncIterator[tuple[SmallScheduler, torpor.Torpor]]:
    scheduler = await SmallScheduler.connect(server)
    async with torpor.connect(nats_url=server.url, nkey_seed_file=server.seed("tenant-default"), tenant="default") as t:
        yield scheduler, t
    await scheduler.close()


def scenario(server: NatsServer, act: Callable[[SmallScheduler, torpor.Torpor], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), both(server) as (scheduler, t):
            await act(scheduler, t)

    asyncio.run(run())


def test_create_returns_once_the_machine_was_seen_running(server: NatsServer) -> None:
    async def act(scheduler: SmallScheduler, t: torpor.Torpor) -> None:
        async def create(_message: Msg) -> Reply:
            receipt = await scheduler.event(SESSION, REQUESTED)
            await scheduler.event(SESSION, STARTED)
            return Reply(receipt=receipt)

        scheduler.on_command = create
        session = await t.sessions.create(session_id=SESSION, metadata={"owner": "me"})
        assert session.receipt is not None
        assert (session.receipt.position, session.position) == (1, 2)
        sent = scheduler.commands[0]
        assert sent.subject == "cmd.default.scheduler.create-session.ses-1"
        assert msgspec.json.decode(sent.data)["metadata"] == {"owner": "me"}
        assert sent.headers is not None
        assert sent.headers["Torpor-Reply"].startswith("_INBOX.default.")

    scenario(server, act)


def test_a_session_that_goes_elsewhere_raises_with_its_way_out(server: NatsServer) -> None:
    async def act(scheduler: SmallScheduler, t: torpor.Torpor) -> None:
        async def create(_message: Msg) -> Reply:
            receipt = await scheduler.event(SESSION, REQUESTED)
            await scheduler.event(SESSION, FAILED)
            return Reply(receipt=receipt)

        scheduler.on_command = create
        with pytest.raises(torpor.SessionEnded, match="add one") as raised:
            await t.sessions.create(session_id=SESSION)
        assert (raised.value.code, raised.value.position) == ("no-host", 2)

    scenario(server, act)


def test_an_effect_that_does_not_come_is_not_yet_and_keeps_its_receipt(server: NatsServer) -> None:
    async def act(scheduler: SmallScheduler, t: torpor.Torpor) -> None:
        async def create(_message: Msg) -> Reply:
            return Reply(receipt=await scheduler.event(SESSION, REQUESTED))

        scheduler.on_command = create
        with pytest.raises(torpor.NotYet, match="session-started") as raised:
            await t.sessions.create(session_id=SESSION, timeout_s=0.7)
        assert raised.value.receipt.position == 1

    scenario(server, act)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("session-exists", torpor.SessionExists),
        ("session-not-found", torpor.SessionNotFound),
        ("stale-incarnation", torpor.StaleIncarnation),
        ("command-id-reused", torpor.CommandIdReused),
        ("already-suspended", torpor.WrongState),
        ("session-terminated", torpor.WrongState),
        ("illegal-machine", torpor.InvalidRequest),
        ("metadata-too-large", torpor.InvalidRequest),
        ("foreign-tenant", torpor.NotPermitted),
        ("something-new", torpor.Refused),
    ],
)
def test_a_refusal_is_an_error_of_its_kind(server: NatsServer, code: str, kind: type[torpor.Refused]) -> None:
    async def act(scheduler: SmallScheduler, t: torpor.Torpor) -> None:
        async def refuse(_message: Msg) -> Reply:
            return refusal(code)

        scheduler.on_command = refuse
        with pytest.raises(torpor.Refused) as raised:
            await t.sessions.handle(SESSION).suspend()
        assert type(raised.value) is kind
        assert (raised.value.code, raised.value.advice) == (code, "do otherwise")

    scenario(server, act)


def test_a_command_nobody_answers_is_unavailable_and_stays_stored(server: NatsServer) -> None:
    async def act(scheduler: SmallScheduler, t: torpor.Torpor) -> None:
        with pytest.raises(torpor.Unavailable, match="no answer came in time") as raised:
            await t.sessions.handle(SESSION).resume(command_id="cmd-7", timeout_s=0.5)
        assert raised.value.command_id == "cmd-7"
        assert (await scheduler.client.jetstream().stream_info("COMMANDS")).state.messages == 1

    scenario(server, act)


def test_a_lost_reply_is_asked_for_again_under_the_same_id(server: NatsServer) -> None:
    async def act(scheduler: SmallScheduler, t: torpor.Torpor) -> None:
        async def second_time(_message: Msg) -> Reply | None:
            return refusal("session-not-found") if len(scheduler.commands) == 2 else None

        scheduler.on_command = second_time
        with pytest.raises(torpor.SessionNotFound):
            await t.sessions.handle(SESSION).terminate(command_id="cmd-7")
        assert [message.headers["ce-id"] for message in scheduler.commands if message.headers] == ["cmd-7", "cmd-7"]

    scenario(server, act)


def test_a_chosen_command_id_makes_the_whole_command_repeatable(server: NatsServer) -> None:
    async def act(scheduler: SmallScheduler, t: torpor.Torpor) -> None:
        async def refuse(_message: Msg) -> Reply:
            return refusal("session-exists")

        scheduler.on_command = refuse
        for _ in range(2):
            with pytest.raises(torpor.SessionExists):
                await t.sessions.create(command_id="order-1")
            with pytest.raises(torpor.SessionExists):
                await t.sessions.handle(SESSION).exec("true", command_id="order-2")
        first, second = ([(m.subject, m.data) for m in scheduler.commands[n::2]] for n in (0, 1))
        assert first[0] == first[1]
        assert second[0] == second[1]

    scenario(server, act)


async def ran(scheduler: SmallScheduler, pieces: list[tuple[int, bytes, dict[str, str]]], total: int) -> Reply:
    """A program's whole life: recorded, its output published, its end recorded."""
    requested = contract.ExecRequested(
        exec_id=ExecId("exec-1"), program=contract.ExecSpec(argv=["x"]), requested_at=NOW
    )
    receipt = await scheduler.event(SESSION, requested)
    for offset, data, headers in pieces:
        await scheduler.output(SESSION, "exec-1", offset, data, **headers)
    await scheduler.event(SESSION, ended("exec-1", total, exit_code=3))
    return Reply(receipt=receipt)


def test_a_program_gives_its_output_in_order_and_its_exit_code(server: NatsServer) -> None:
    async def act(scheduler: SmallScheduler, t: torpor.Torpor) -> None:
        async def run(_message: Msg) -> Reply:
            pieces: list[tuple[int, bytes, dict[str, str]]] = [
                (0, b"one ", {}),
                (4, b"oops", {"Stream": "stderr"}),
                (0, b"one ", {}),  # a repeat, as after a crash of the host
                (8, b"two", {}),
                (11, b"", {"End": "exited", "Exit-Code": "3"}),
            ]
            return await ran(scheduler, pieces, 11)

        scheduler.on_command = run
        seen: list[Chunk] = []
        result = await t.sessions.handle(SESSION).exec("x", exec_id="exec-1", on_output=seen.append)
        assert (result.stdout, result.stderr, result.exit_code) == ("one two", "oops", 3)
        assert (result.outcome, result.missing_bytes, result.ok) == ("exited", 0, False)
        assert [chunk.offset for chunk in seen] == [0, 4, 8]

    scenario(server, act)


def test_output_can_be_read_as_it_comes_and_later_from_any_byte(server: NatsServer) -> None:
    async def act(scheduler: SmallScheduler, t: torpor.Torpor) -> None:
        async def run(_message: Msg) -> Reply:
            return await ran(scheduler, [(0, b"abc", {}), (3, b"def", {}), (6, b"", {"End": "exited"})], 6)

        scheduler.on_command = run
        session = t.sessions.handle(SESSION)
        program = session.exec("x", exec_id="exec-1")
        assert [chunk.data async for chunk in program] == [b"abc", b"def"]
        assert program.result.exit_code == 3
        assert [chunk.data async for chunk in session.output("exec-1", from_offset=4)] == [b"ef"]

    scenario(server, act)


def test_output_that_is_no_longer_stored_is_counted(server: NatsServer) -> None:
    async def act(scheduler: SmallScheduler, t: torpor.Torpor) -> None:
        async def run(_message: Msg) -> Reply:
            return await ran(scheduler, [(5, b"later", {}), (10, b"", {"End": "exited"})], 10)

        scheduler.on_command = run
        result = await t.sessions.handle(SESSION).exec("x", exec_id="exec-1")
        assert (result.stdout, result.missing_bytes) == ("later", 5)

    scenario(server, act)


def test_a_program_whose_machine_was_lost_ends_without_output(server: NatsServer) -> None:
    async def act(scheduler: SmallScheduler, t: torpor.Torpor) -> None:
        async def run(_message: Msg) -> Reply:
            requested = contract.ExecRequested(
                exec_id=ExecId("exec-1"), program=contract.ExecSpec(argv=["x"]), requested_at=NOW
            )
            receipt = await scheduler.event(SESSION, requested)
            await scheduler.event(SESSION, ended("exec-1", 0, outcome="lost", exit_code=None))
            return Reply(receipt=receipt)

        scheduler.on_command = run
        result = await t.sessions.handle(SESSION).exec("x", exec_id="exec-1")
        assert (result.outcome, result.exit_code, result.ok) == ("lost", None, False)

    scenario(server, act)


def test_a_wait_survives_a_killed_server(server: NatsServer) -> None:
    async def act(scheduler: SmallScheduler, t: torpor.Torpor) -> None:
        async def create(_message: Msg) -> Reply:
            return Reply(receipt=await scheduler.event(SESSION, REQUESTED))

        scheduler.on_command = create
        waiting = asyncio.create_task(t.sessions.create(session_id=SESSION))
        while not scheduler.replies:
            await scheduler.client.flush()
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        while not scheduler.client.is_connected:
            await asyncio.wait([waiting], timeout=0.05)
        await scheduler.event(SESSION, STARTED)
        session = await waiting
        assert session.position == 2

    scenario(server, act)


def test_events_are_read_from_a_position_and_followed(server: NatsServer) -> None:
    async def act(scheduler: SmallScheduler, t: torpor.Torpor) -> None:
        await scheduler.event(SESSION, REQUESTED)
        await scheduler.event("ses-2", REQUESTED)
        await scheduler.event(SESSION, STARTED)
        assert [event.position async for event in t.events()] == [1, 2, 3]
        assert [event.position async for event in t.events(from_position=2)] == [2, 3]
        assert [event.position async for event in t.events(from_position=9)] == []
        own = [event async for event in t.events(session_id=SESSION)]
        assert [event.type for event in own] == ["session-requested.v1", "session-started.v1"]
        assert own[1].body == STARTED
        followed = t.events(from_position=3, follow=True)
        assert (await anext(followed)).position == 3
        await scheduler.event(SESSION, FAILED)
        assert (await anext(followed)).position == 4
        await followed.aclose()

    scenario(server, act)


def test_an_illegal_session_id_is_refused_before_anything_is_sent(server: NatsServer) -> None:
    async def act(scheduler: SmallScheduler, t: torpor.Torpor) -> None:
        for bad in ("ses.1", "ses *", "", "Ünrein", "x" * 64):
            with pytest.raises(torpor.InvalidRequest):
                await t.sessions.handle(bad).suspend()
        assert not scheduler.commands

    scenario(server, act)


def test_a_wrong_key_and_a_foreign_tenant_are_refused(server: NatsServer, tmp_path: Path) -> None:
    async def act() -> None:
        stranger = tmp_path / "stranger.nk"
        ensure_key(stranger)
        with pytest.raises(torpor.Refused, match="key"):
            async with torpor.connect(nats_url=server.url, nkey_seed_file=stranger, tenant="default"):
                pass
        own = server.seed("tenant-default")
        with pytest.raises(torpor.TorporError):
            async with torpor.connect(nats_url=server.url, nkey_seed_file=own, tenant="other") as t:
                await t.sessions.handle(SESSION).suspend(timeout_s=2)
        with pytest.raises(torpor.NotPermitted):
            async with torpor.connect(nats_url=server.url, nkey_seed_file=own, tenant="default") as t:
                await t.hosts.drain("host-1")

    asyncio.run(act())


def test_nobody_at_home_is_unavailable_with_advice(tmp_path: Path) -> None:
    async def act() -> None:
        with pytest.raises(torpor.Unavailable, match="torpor up"):
            async with torpor.connect(data_dir=tmp_path):
                pass
        with pytest.raises(torpor.Unavailable, match="cannot connect"):
            async with torpor.connect(nats_url="nats://127.0.0.1:1", tenant="default", timeout_s=3):
                pass

    asyncio.run(act())

"""Who may what on a real server: everything that must be refused is tried."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import nats.errors
import pytest
from nats.js.api import AckPolicy, ConsumerConfig

from tests.support.nats import NatsServer
from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.registry import COMMANDS
from torpor_messaging.nats_link import Link
from torpor_messaging.permissions import SERVICES
from torpor_messaging.streams import EVENTS
from torpor_messaging.subjects import type_token

pytestmark = pytest.mark.anyio
SHORT_S = 0.3
BOUND_S = 10.0
STREAMS = ("COMMANDS", "EVENTS", "OUTPUT", "TIMERS", "DEAD", "HEADS")
Connect = Callable[[str], Awaitable[Link]]


@pytest.fixture
async def connect(nats_server: NatsServer) -> AsyncIterator[Connect]:
    links: list[Link] = []

    async def open_link(user: str) -> Link:
        links.append(await nats_server.link(user))
        return links[-1]

    yield open_link
    for link in links:
        await link.close()


async def refused(link: Link, subject: str, data: bytes = b"{}") -> bool:
    """Whether the server forbids publishing there; False when it was answered, or nobody was there to answer."""
    try:
        await link.request(subject, data, SHORT_S)
    except Rejected as error:
        return error.code == "not-permitted"
    except Transient:
        return False
    return False


async def hears(link: Link, listener: str, subject: str, speaker: Link, wait_s: float = SHORT_S) -> bool:
    """Whether `link`, listening on `listener`, gets what `speaker` publishes on `subject`."""
    heard = asyncio.Event()

    async def note(_: Any) -> None:
        heard.set()

    subscription = await link.client.subscribe(listener, cb=note)
    await link.client.flush()
    await speaker.publish(subject, b"secret")
    await speaker.client.flush()
    try:
        async with asyncio.timeout(wait_s):
            await heard.wait()
    except TimeoutError:
        return False
    finally:
        await subscription.unsubscribe()
    return True


@pytest.mark.parametrize("user", [*SERVICES, "operator", "tenant-default"])
async def test_nobody_changes_streams(user: str, connect: Connect) -> None:
    link, admin = await connect(user), await connect("admin")
    before = {stream: await admin.api(f"STREAM.INFO.{stream}") for stream in STREAMS}
    for stream in STREAMS:
        config = json.dumps({**before[stream]["config"], "max_msgs": 3}).encode()
        for call in ("CREATE", "UPDATE", "DELETE", "PURGE", "RESTORE", "SNAPSHOT"):
            assert await refused(link, f"$JS.API.STREAM.{call}.{stream}", config), f"{call} {stream}"
        assert await refused(link, f"$JS.API.STREAM.MSG.DELETE.{stream}", b'{"seq":1}'), stream
    assert await refused(link, "$JS.API.STREAM.CREATE.MINE", b'{"name":"MINE","subjects":["mine"]}')
    for stream in STREAMS:
        after = await admin.api(f"STREAM.INFO.{stream}")
        assert after["config"] == before[stream]["config"]


@pytest.mark.parametrize("user", [*SERVICES, "operator", "tenant-default"])
async def test_only_the_relay_makes_events(user: str, connect: Connect) -> None:
    link, admin = await connect(user), await connect("admin")
    assert await refused(link, "evt.default.session-requested.ses-1")
    may_relay = user == "log-relay"
    assert await refused(link, "relay.default.session-requested.ses-1") is not may_relay
    state = (await admin.api(f"STREAM.INFO.{EVENTS}"))["state"]
    assert state["messages"] == (1 if may_relay else 0)


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("scheduler", "cmd.default.snapshot-store.free-checkpoint.ckp-1"),
        ("scheduler", "out.default.ses-1.exe-1"),
        ("scheduler", "timer.set.default.vm-host.idle.ses-1"),
        ("scheduler", "head.log"),
        ("vm-host", "cmd.default.scheduler.terminate-session.ses-1"),
        ("vm-host", "cmd.system.scheduler.drain-host.host-1"),
        ("vm-host", "cmd.default.vm-host.stop-vm.host-1.vm-1"),
        ("vm-host", "timer.set.default.scheduler.idle.ses-1"),
        ("snapshot-store", "cmd.default.scheduler.terminate-session.ses-1"),
        ("snapshot-store", "obs.system.vm-host.heartbeat.host-1"),
        ("billing", "cmd.default.scheduler.terminate-session.ses-1"),
        ("billing", "cmd.default.vm-host.stop-vm.host-1.vm-1"),
        ("billing", "obs.system.vm-host.heartbeat.host-1"),
        ("reaper", "cmd.default.scheduler.terminate-session.ses-1"),
        ("reaper", "obs.system.vm-host.heartbeat.host-1"),
        ("log-relay", "cmd.default.scheduler.terminate-session.ses-1"),
        ("log-relay", "out.default.ses-1.exe-1"),
        ("operator", "cmd.default.scheduler.terminate-session.ses-1"),
        ("billing", "$JS.API.CONSUMER.CREATE.COMMANDS.thief.cmd.*.scheduler.>"),
        ("vm-host", "$JS.API.CONSUMER.CREATE.COMMANDS.thief.cmd.*.scheduler.*.*"),
        ("scheduler", "$JS.API.CONSUMER.CREATE.COMMANDS.thief.cmd.>"),
        ("scheduler", "$JS.API.CONSUMER.CREATE.COMMANDS.thief"),
        ("scheduler", "$JS.API.CONSUMER.DURABLE.CREATE.COMMANDS.thief"),
        ("reaper", "$JS.API.CONSUMER.CREATE.TIMERS.thief.timer.due.*.scheduler.>"),
    ],
)
async def test_a_service_publishes_no_more_than_it_must(user: str, subject: str, connect: Connect) -> None:
    assert await refused(await connect(user), subject)


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("scheduler", "cmd.default.vm-host.start-vm.host-1.vm-1"),
        ("scheduler", "cmd.default.scheduler.report-vm-started.ses-1"),
        ("scheduler", "timer.set.default.scheduler.idle.ses-1"),
        ("scheduler", "hint.log"),
        ("vm-host", "cmd.default.snapshot-store.register-checkpoint.ckp-1"),
        ("vm-host", "cmd.system.scheduler.register-host.host-1"),
        ("vm-host", "obs.system.vm-host.heartbeat.host-1"),
        ("vm-host", "out.default.ses-1.exe-1"),
        ("reaper", "cmd.default.vm-host.reap-vm.host-1.vm-1"),
        ("reaper", "cmd.default.snapshot-store.free-checkpoint.ckp-1"),
        ("log-relay", "head.log"),
        ("operator", "cmd.system.scheduler.drain-host.host-1"),
        ("billing", "dead.meters"),
        ("billing", "_INBOX.default.a"),
    ],
)
async def test_and_no_less(user: str, subject: str, connect: Connect) -> None:
    assert not await refused(await connect(user), subject)


@pytest.mark.parametrize("user", ["billing", "reaper", "tenant-default"])
async def test_nobody_listens_to_what_is_not_theirs(user: str, connect: Connect) -> None:
    link, admin = await connect(user), await connect("admin")
    for listener, subject in (
        ("cmd.>", "cmd.other.scheduler.create-session.ses-1"),
        ("_INBOX.>", "_INBOX.other.a"),
        ("_INBOX.other.>", "_INBOX.other.a"),
        ("_INBOX.*.svc-scheduler.>", "_INBOX.system.svc-scheduler.a"),
        ("relay.>", "relay.other.session-requested.ses-1"),
        (">", "cmd.other.scheduler.create-session.ses-1"),
        ("$JS.EVENT.>", "$JS.EVENT.ADVISORY.x"),
    ):
        assert not await hears(link, listener, subject, admin), listener


async def test_a_tenant_hears_its_own_and_nothing_else(connect: Connect) -> None:
    link, admin, relay = await connect("tenant-default"), await connect("admin"), await connect("log-relay")
    assert await hears(link, "evt.default.>", "relay.default.session-requested.ses-1", relay, BOUND_S)
    assert await hears(link, "out.default.ses-1.*", "out.default.ses-1.exe-1", admin, BOUND_S)
    assert await hears(link, "_INBOX.default.x.*", "_INBOX.default.x.1", admin, BOUND_S)
    for listener, subject in (
        ("evt.>", "evt.other.session-requested.ses-1"),
        ("evt.other.>", "evt.other.session-requested.ses-1"),
        ("out.other.>", "out.other.ses-1.exe-1"),
        ("obs.>", "obs.system.vm-host.heartbeat.host-1"),
        ("hint.>", "hint.log"),
    ):
        assert not await hears(link, listener, subject, admin), listener


async def test_a_tenant_sends_client_commands_of_its_own_only(connect: Connect) -> None:
    link = await connect("tenant-default")
    assert not await refused(link, "cmd.default.scheduler.create-session.ses-1")
    assert not await refused(link, "cmd.default.scheduler.no-such-command.ses-1"), "refused by the service, in words"
    client = {"create-session", "exec-session", "suspend-session", "resume-session", "terminate-session"}
    client |= {"checkpoint-session", "fork-session", "rollback-session"}
    internal = {type_token(tag) for tag in COMMANDS["scheduler"]} - client
    assert "report-vm-started" in internal
    for type_ in internal:
        assert await refused(link, f"cmd.default.scheduler.{type_}.ses-1"), type_
    for subject in (
        "cmd.other.scheduler.create-session.ses-1",
        "cmd.system.scheduler.drain-host.host-1",
        "cmd.default.vm-host.stop-vm.host-1.vm-1",
        "cmd.default.snapshot-store.free-checkpoint.ckp-1",
        "out.default.ses-1.exe-1",
        "timer.set.default.scheduler.idle.ses-1",
        "timer.due.default.scheduler.idle.ses-1",
        "dead.scheduler-commands",
        "head.log",
        "obs.system.vm-host.heartbeat.host-1",
        "qry.other.scheduler.sessions.-",
        "qry.system.scheduler.hosts.-",
        "$JS.API.STREAM.INFO.EVENTS",
        "$JS.API.STREAM.MSG.GET.EVENTS",
        "$JS.API.DIRECT.GET.EVENTS",
        "$JS.API.DIRECT.GET.EVENTS.evt.other.session-requested.ses-1",
        "$JS.API.CONSUMER.LIST.EVENTS",
        "$JS.API.CONSUMER.NAMES.EVENTS",
        "$JS.API.CONSUMER.CREATE.EVENTS",
        "$JS.API.CONSUMER.CREATE.EVENTS.a",
        "$JS.API.CONSUMER.CREATE.EVENTS.a.evt.other.>",
        "$JS.API.CONSUMER.CREATE.EVENTS.a.evt.>",
        "$JS.API.CONSUMER.CREATE.COMMANDS.a.cmd.default.>",
        "$JS.API.CONSUMER.CREATE.DEAD.a.dead.>",
        "$JS.API.CONSUMER.DURABLE.CREATE.EVENTS.a",
    ):
        assert await refused(link, subject), subject


async def test_a_consumers_filter_cannot_be_smuggled_in(connect: Connect) -> None:
    link = await connect("tenant-default")
    for config in (
        {"filter_subject": "evt.other.>"},
        {"filter_subject": "evt.>"},
        {"filter_subjects": ["evt.default.>", "evt.other.>"]},
        {},
    ):
        body = json.dumps({"stream_name": "EVENTS", "config": {"name": "a", "ack_policy": "none", **config}})
        answer = await link.request("$JS.API.CONSUMER.CREATE.EVENTS.a.evt.default.>", body.encode(), SHORT_S)
        assert "error" in json.loads(answer.data), config


async def test_a_tenant_replays_its_events_with_a_plain_client(connect: Connect, nats_server: NatsServer) -> None:
    link, relay = await connect("tenant-default"), await connect("log-relay")
    for number, tenant in enumerate(["default", "other", "default"]):
        await relay.request(f"relay.{tenant}.session-requested.ses-{number}", b"{}", SHORT_S)
    pull = await link.client.jetstream().pull_subscribe(
        "evt.default.>", durable="default-1", stream=EVENTS, config=ConsumerConfig(ack_policy=AckPolicy.EXPLICIT)
    )
    messages = await pull.fetch(2, timeout=2)
    assert [message.metadata.sequence.stream for message in messages] == [1, 3]
    for message in messages:
        await message.ack_sync(timeout=2)
    with pytest.raises(nats.errors.TimeoutError):
        await pull.fetch(1, timeout=SHORT_S)
    push = await link.client.jetstream().subscribe(
        "evt.default.>", stream=EVENTS, config=ConsumerConfig(name="any-name", ack_policy=AckPolicy.NONE)
    )
    assert [(await push.next_msg(2)).metadata.sequence.stream for _ in range(2)] == [1, 3]


async def test_of_several_tenants_none_pulls_from_anothers_consumer(connect: Connect) -> None:
    mine, other = await connect("tenant-default"), await connect("tenant-other")
    durable = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT)
    await mine.client.jetstream().pull_subscribe("evt.default.>", durable="default-1", stream=EVENTS, config=durable)
    for call in ("MSG.NEXT", "INFO", "DELETE"):
        assert await refused(other, f"$JS.API.CONSUMER.{call}.EVENTS.default-1"), call


async def test_the_server_does_not_publish_for_a_tenant_where_it_may_not(connect: Connect) -> None:
    """Acknowledgements, pulled and pushed messages go where a request says: never beyond the tenant's account."""
    tenant, admin = await connect("tenant-default"), await connect("admin")
    await admin.request("out.default.ses-1.exe-1", b'{"host_id":"host-1"}', SHORT_S)
    heard: list[str] = []

    async def note(message: Any) -> None:
        heard.append(message.subject)

    # Not `evt.>`: what a tenant has delivered to its own live events deceives nobody but itself.
    for listened in (
        "cmd.>",
        "evt.other.>",
        "relay.>",
        "obs.>",
        "timer.>",
        "_INBOX.other.>",
        "_INBOX.system.>",
        "qry.>",
    ):
        await admin.client.subscribe(listened, cb=note)
    # The server only delivers where somebody listens to exactly that subject.
    await tenant.client.subscribe("evt.default.literal.subject")
    await tenant.client.flush()
    await admin.client.flush()
    heard.clear()
    before = {stream: (await admin.api(f"STREAM.INFO.{stream}"))["state"]["last_seq"] for stream in STREAMS}
    aims = [
        "relay.default.session-requested.ses-1",
        "evt.default.literal.subject",
        "cmd.other.scheduler.terminate-session.ses-2",
        "cmd.default.scheduler.report-vm-started.ses-1",
        "obs.system.vm-host.heartbeat.host-1",
        "timer.set.other.scheduler.idle.ses-2",
        "_INBOX.other.a",
        "qry.system.scheduler.hosts.-",
        "$JS.API.STREAM.DELETE.EVENTS",
    ]
    commands = 0
    for number, aim in enumerate(aims):
        for subject in (f"cmd.default.scheduler.create-session.ses-{number}", "qry.default.scheduler.sessions.-"):
            await tenant.client.publish(subject, b"{}", reply=aim)
        commands += 1
        pulled = {"name": f"default-{number + 1}", "filter_subject": "out.default.>", "ack_policy": "none"}
        pushed = {**pulled, "name": f"pushed-{number}", "deliver_subject": aim}
        for config in (pulled, pushed):
            body = json.dumps({"stream_name": "OUTPUT", "config": config}).encode()
            await tenant.request(f"$JS.API.CONSUMER.CREATE.OUTPUT.{config['name']}.out.default.>", body, SHORT_S)
        await tenant.client.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.OUTPUT.default-{number + 1}", b'{"batch":1,"expires":200000000}', reply=aim
        )
        await tenant.client.flush()
    answered = await tenant.request("cmd.default.scheduler.create-session.ses-last", b"{}", SHORT_S)
    assert json.loads(answered.data)["stream"] == "COMMANDS"
    after = {stream: (await admin.api(f"STREAM.INFO.{stream}"))["state"]["last_seq"] for stream in STREAMS}
    assert after == {**before, "COMMANDS": before["COMMANDS"] + commands + 1}
    expected = ("cmd.default.scheduler.create-session.", "qry.default.", "_INBOX.system.admin.")
    assert not [subject for subject in heard if not subject.startswith(expected)]
    assert not await refused(admin, "$JS.API.STREAM.INFO.EVENTS"), "the stream is still there"

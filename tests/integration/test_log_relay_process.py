"""The log-relay as a process: killed anywhere it goes on; it signs what has grown, and says what is wrong."""

import asyncio
import json
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.support.nats import NatsServer
from tests.support.processes import ServiceProcess
from torpor_contracts.errors import TorporError
from torpor_contracts.host import HostDraining
from torpor_contracts.ids import CommandId, HostId, TenantId
from torpor_eventlog.codec import encode_event
from torpor_eventlog.heads import HeadsFile
from torpor_eventlog.instants import from_us
from torpor_eventlog.notes import SigningKey, VerifierKey
from torpor_eventlog.opening import open_log
from torpor_eventlog.port import Commit, EventLog
from torpor_messaging.nats_events import NatsEventStream
from torpor_messaging.nats_link import Link

pytestmark = pytest.mark.anyio
BOUND_S = 30.0


class World:
    def __init__(self, server: NatsServer, directory: Path, log: EventLog, admin: Link) -> None:
        self.server = server
        self.directory = directory
        self.log = log
        self.admin = admin
        self.stream = NatsEventStream(admin)
        self.processes: list[ServiceProcess] = []
        self.appended = 0

    def relay(self) -> ServiceProcess:
        environment = {
            "TORPOR_DATA_DIR": str(self.directory),
            "TORPOR_LOG_RELAY_SIGN_EVERY_S": "0.2",
            "TORPOR_LOG_RELAY_LOG_NAME": "test-log",
        }
        process = ServiceProcess("torpor_log_relay", "log-relay", self.server, self.directory, environment)
        self.processes.append(process)
        process.start()
        return process

    async def grow(self, count: int) -> None:
        async def append(number: int) -> None:
            stream = f"host-{number}"
            event = HostDraining(host_id=HostId(stream), reason="x" * 200, requested_at=from_us(number))
            await self.log.append(
                Commit(
                    command_id=CommandId(f"system/c-{number}"),
                    tenant_id=TenantId("system"),
                    causation_id="c",
                    correlation_id="g",
                    request_digest=sha256(str(number).encode()).digest(),
                    occurred_at_us=number,
                    expected={stream: 0},
                    events=[encode_event(stream, event)],
                )
            )

        await asyncio.gather(*(append(self.appended + number) for number in range(count)))
        self.appended += count

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        give_up_at = time.monotonic() + BOUND_S
        while True:
            try:
                if await condition():
                    return
            except TorporError:
                pass
            assert time.monotonic() < give_up_at, f"{what}\n{self.processes[-1].log.read_text()[-2000:]}"
            await asyncio.sleep(0.02)  # until the condition holds, bounded above

    async def until_relayed(self, position: int) -> None:
        async def relayed() -> bool:
            return (await self.stream.last()).sequence >= position

        await self.until(relayed, f"position {position} is not relayed")

    async def same_as_log(self) -> bool:
        position = 0
        while rows := await self.log.read(position, 500):
            if await self.stream.read(position, 500) != [(row.position, row) for row in rows]:
                return False
            position = rows[-1].position
        return not await self.stream.read(position, 1)

    async def head(self) -> Any:
        return json.loads((await self.admin.request("qry.default.log-relay.head.-", b"", 5.0)).data)


@pytest.fixture
async def world(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[World]:
    log = await open_log(f"sqlite:///{tmp_path / 'log.db'}")
    made = World(nats_server, tmp_path, log, await nats_server.link("admin"))
    yield made
    for process in made.processes:
        process.kill()
    await log.close()
    await made.admin.close()


async def test_killed_anywhere_it_goes_on_where_it_was(world: World) -> None:
    await world.grow(4000)
    for share in range(1, 5):
        process = world.relay()
        await world.until_relayed(share * 900)
        process.kill()
        await world.grow(500)
    world.relay()
    await world.until_relayed(6000)
    assert await world.same_as_log()


async def test_two_relays_at_once_do_no_harm(world: World) -> None:
    world.relay()
    world.relay()
    for _ in range(10):
        await world.grow(200)
    await world.until_relayed(2000)
    assert await world.same_as_log()


async def test_a_hint_is_not_needed_but_helps(world: World) -> None:
    await world.relay().ready(world.admin)
    await world.grow(1)
    await world.until_relayed(1)  # nobody hinted: this log is ours, not a service's
    await world.admin.publish("hint.log", b"")
    await world.grow(1)
    await world.until_relayed(2)


async def test_heads_are_signed_kept_twice_and_answered(world: World) -> None:
    await world.grow(10)
    await world.relay().ready(world.admin)

    async def covers(size: int) -> bool:
        return bool((await world.head())["size"] >= size)

    await world.until(lambda: covers(10), "no head of 10 rows")
    await world.grow(5)
    await world.until(lambda: covers(15), "no head of 15 rows")
    head = await world.head()
    key = VerifierKey.parse(head["public_key"])
    signed = key.open_checkpoint(head["note"])
    assert (signed.size, signed.root) == (15, (await world.log.head()).root)
    key_file = world.directory / "keys" / "log-signing.key"
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert str(SigningKey.load(key_file).verifier) == head["public_key"]
    assert head["public_key"].startswith("test-log+")
    in_file = [
        key.open_checkpoint(note).size for note in await HeadsFile(world.directory / "heads" / "heads.jsonl").all()
    ]
    assert in_file[-1] == 15
    assert in_file == sorted(set(in_file)), "only what has grown is signed"
    state = (await world.admin.api("STREAM.INFO.HEADS"))["state"]
    assert state["messages"] == len(in_file)


async def test_what_was_signed_is_never_unsigned(world: World) -> None:
    await world.grow(10)
    process = world.relay()

    async def signed() -> bool:
        return bool((await world.head())["size"] == 10)

    await world.until(signed, "no head of 10 rows")
    process.kill()
    # Somebody loses the file and puts an older, shorter log in the place of ours.
    (world.directory / "heads" / "heads.jsonl").unlink()
    await world.log.close()
    for file in world.directory.glob("log.db*"):
        file.unlink()
    world.log = await open_log(f"sqlite:///{world.directory / 'log.db'}")
    world.appended = 0
    await world.grow(5)
    process = world.relay()
    await process.ready(world.admin)
    assert (await world.head())["size"] == 10

    async def said() -> bool:
        written = process.log.read_text()
        return "does not continue" in written and "not a copy" not in written and "audit verify" in written

    await world.until(said, "it does not say that the log was rewritten")
    assert not (world.directory / "heads" / "heads.jsonl").exists(), "nothing was signed"


async def test_a_damaged_stream_is_named_and_taken_up_again_once_rebuilt(world: World) -> None:
    await world.grow(10)
    process = world.relay()
    await world.until_relayed(10)
    await world.admin.request("relay.system.host-draining.host-1", b"rubbish", 5.0)
    await world.grow(5)

    async def said() -> bool:
        written = process.log.read_text()
        return "stream EVENTS at position 11" in written and "audit rebuild --stream" in written

    await world.until(said, "it does not say what is wrong")
    assert not await world.same_as_log()
    await world.stream.recreate()
    await world.until_relayed(15)
    assert await world.same_as_log()


async def test_a_lost_server_is_filled_again(world: World) -> None:
    await world.grow(300)
    process = world.relay()
    await world.until_relayed(300)
    await asyncio.to_thread(world.server.kill)
    world.server.wipe()
    await asyncio.to_thread(world.server.start)
    await asyncio.to_thread(world.server.make_streams)
    await world.grow(10)
    await world.until_relayed(310)
    assert await world.same_as_log()
    assert process.process is not None
    assert process.process.poll() is None


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"TORPOR_LOG_RELAY_SIGN_EVERY_S": "-1"}, "TORPOR_LOG_RELAY"),
        ({"TORPOR_LOG_RELAY_SIGNING_KEY_FILE": "/proc/no/such/key"}, "writable"),
    ],
)
async def test_wrong_settings_are_named(world: World, environment: dict[str, str], says: str) -> None:
    process = ServiceProcess(
        "torpor_log_relay",
        "log-relay",
        world.server,
        world.directory,
        {"TORPOR_DATA_DIR": str(world.directory), **environment},
    )
    process.start()
    assert await asyncio.to_thread(process.wait) != 0
    assert says in process.log.read_text()

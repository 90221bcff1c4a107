"""A real JetStream that lost, changed or forgot messages is found out by an audit, healed around, and made afresh."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support.nats import NatsServer
from torpor_contracts.host import HostDraining
from torpor_contracts.ids import CommandId, HostId, TenantId
from torpor_eventlog.audit.rebuild_stream import rebuild_stream
from torpor_eventlog.audit.verify import KeptHead, Verified, verify
from torpor_eventlog.codec import encode_event
from torpor_eventlog.healing import Damage, HealingFeed
from torpor_eventlog.instants import from_us
from torpor_eventlog.port import Commit, EventLog, Recorded
from torpor_eventlog.sqlite import SqliteLog
from torpor_messaging.nats_events import NatsEventSource, NatsEventStream
from torpor_messaging.nats_link import Link

pytestmark = pytest.mark.anyio
ROWS = 2000


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[SqliteLog]:
    log = await SqliteLog.open(tmp_path / "log.db")
    for number in range(ROWS // 100):
        stream = HostId(f"host-{number}")
        event = encode_event(stream, HostDraining(host_id=stream, reason="full", requested_at=from_us(number)))
        await log.append(
            Commit(
                command_id=CommandId(f"c-{number}"),
                tenant_id=TenantId("system"),
                causation_id="c",
                correlation_id="g",
                request_digest=sha256(stream.encode()).digest(),
                occurred_at_us=number,
                expected={stream: 0},
                events=[event] * 100,
            )
        )
    yield log
    await log.close()


@asynccontextmanager
async def linked(server: NatsServer, user: str) -> AsyncIterator[Link]:
    link = await server.link(user)
    try:
        yield link
    finally:
        await link.close()


async def filled(server: NatsServer, log: EventLog) -> None:
    async with linked(server, "log-relay") as link:
        await NatsEventStream(link).publish(await log.read(0, ROWS))


async def audited(server: NatsServer, log: EventLog) -> Verified:
    head = await log.head()
    async with linked(server, "operator") as link:
        kept = [KeptHead(size=head.position, root=head.root, kept_in="the test")]
        return await verify(log, kept, NatsEventStream(link), relay_grace_s=0)


async def followed(server: NatsServer, log: EventLog) -> tuple[list[Recorded], list[Damage]]:
    rows: list[Recorded] = []
    damages: list[Damage] = []
    async with linked(server, "billing") as link:
        feed = HealingFeed(log, NatsEventSource(link), damages.append, idle_look_s=0.2)
        async with aclosing(feed.follow(0)) as batches:
            async for batch in batches:
                rows += batch
                if len(rows) >= ROWS:
                    return rows, damages
    raise AssertionError("the feed ended")


async def check_rebuilt(server: NatsServer, log: EventLog) -> None:
    async with linked(server, "admin") as link:
        rebuilt = await rebuild_stream(log, NatsEventStream(link))
    assert rebuilt.position == ROWS
    assert (await audited(server, log)).ok


def flip_a_bit(server: NatsServer, place: bytes) -> None:
    """In the stored message that holds `place`, as a failing disk would."""
    server.stop()
    for block in sorted((server.directory / "store").rglob("EVENTS/msgs/*.blk")):
        content = bytearray(block.read_bytes())
        at = content.find(place)
        if at >= 0:
            content[at + len(place) - 1] ^= 1
            block.write_bytes(bytes(content))
            server.start()
            return
    raise AssertionError("the message is in no block")


async def test_a_sound_stream_has_no_findings(nats_server: NatsServer, log: SqliteLog) -> None:
    await filled(nats_server, log)
    verified = await audited(nats_server, log)
    assert verified.ok
    assert (verified.rows, verified.stream_messages) == (ROWS, ROWS)


async def test_a_flipped_bit_is_found_healed_around_and_mended(nats_server: NatsServer, log: SqliteLog) -> None:
    await filled(nats_server, log)
    flip_a_bit(nats_server, b"ce-position: 777\r")
    verified = await audited(nats_server, log)
    assert verified.first_bad_position == 777
    assert {finding.place for finding in verified.findings} == {"stream"}
    rows, damages = await followed(nats_server, log)
    assert rows == await log.read(0, ROWS)
    assert damages == [] or damages[0].position == 777
    await check_rebuilt(nats_server, log)


async def test_a_stream_cut_down_by_its_configuration_is_found_and_mended(
    nats_server: NatsServer, log: SqliteLog
) -> None:
    await filled(nats_server, log)
    async with linked(nats_server, "admin") as link:
        config = (await link.api("STREAM.INFO.EVENTS"))["config"]
        assert "error" not in await link.api("STREAM.UPDATE.EVENTS", {**config, "max_msgs": 3})
    verified = await audited(nats_server, log)
    (finding,) = verified.findings
    assert (finding.place, finding.position, finding.kind) == ("stream", 1, "missing")
    assert f"1 to {ROWS - 3}" in finding.detail
    rows, damages = await followed(nats_server, log)
    assert rows == await log.read(0, ROWS)
    assert [(damage.kind, damage.position) for damage in damages] == [("missing", 1)]
    await check_rebuilt(nats_server, log)


async def test_a_wiped_server_is_truncated_from_the_start(nats_server: NatsServer, log: SqliteLog) -> None:
    await filled(nats_server, log)
    async with linked(nats_server, "admin") as link:
        await NatsEventStream(link).recreate()
    verified = await audited(nats_server, log)
    assert [(finding.position, finding.kind) for finding in verified.findings] == [(1, "truncated")]
    rows, _ = await followed(nats_server, log)
    assert rows == await log.read(0, ROWS)
    await check_rebuilt(nats_server, log)

"""Measures the relay: rows of an SQLite log into the fenced stream EVENTS of a real server."""

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

from tests.bench.log_load import WRITERS, commits, drive
from tests.support.nats import NatsServer
from torpor.bench.figures import Figure, Say, figure
from torpor_eventlog.port import EventLog
from torpor_eventlog.relay import Relay
from torpor_eventlog.sqlite import SqliteLog
from torpor_messaging.envelope import encode_event
from torpor_messaging.nats_events import NatsEventStream
from torpor_messaging.nats_link import Link
from torpor_messaging.streams import recreate_events

ROUNDS: Final = 5
EVENTS: Final = 100 * WRITERS
IN_FLIGHT_MAX: Final = 1000
CAUGHT_UP_S_MAX: Final = 60.0


async def relay(say: Say) -> Figure:
    """Beside nats-py publishing the same messages, encoded before, with as many in flight and no fence."""
    ours, bare = [], []
    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as place:
        log = await SqliteLog.open(Path(place) / "log.db")
        say(f"filling a log with {EVENTS} events")
        await drive(log.append, commits(EVENTS // WRITERS))
        server = NatsServer(Path(place) / "nats")
        await asyncio.to_thread(server.start)
        try:
            await asyncio.to_thread(server.make_streams)
            link = await server.link("admin")
            for number in range(ROUNDS + 1):
                say(f"relaying {EVENTS} events: round {number} of {ROUNDS}")
                await recreate_events(link)
                bare.append(EVENTS / await _publish_bare(log, link))
                await recreate_events(link)
                ours.append(EVENTS / await _relay(log, link))
            await link.close()
        finally:
            server.kill()
            await log.close()
    return figure(
        "log.relay",
        median(ours[1:]),
        "events/s",
        ("at least", 10_000),
        floor=median(bare[1:]),
        samples=ours[1:],
        n=EVENTS * ROUNDS,
    )


async def _relay(log: EventLog, link: Link) -> float:
    relay = Relay(log, NatsEventStream(link))
    began_s = time.perf_counter()
    running = asyncio.ensure_future(relay.run())
    try:
        await relay.wait_for(EVENTS, CAUGHT_UP_S_MAX)
        return time.perf_counter() - began_s
    finally:
        running.cancel()


async def _publish_bare(log: EventLog, link: Link) -> float:
    rows = await log.read(0, EVENTS)
    messages = [encode_event(row) for row in rows]
    jetstream = link.client.jetstream(publish_async_max_pending=IN_FLIGHT_MAX)
    began_s = time.perf_counter()
    answers = [await jetstream.publish_async(subject, data, headers=headers) for subject, headers, data in messages]
    await asyncio.gather(*answers)
    return time.perf_counter() - began_s


BENCHES: Final = {"log": [relay]}

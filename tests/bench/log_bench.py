"""Measures the event log: durable appends by 256 writers, and a full replay into decoded events."""

import asyncio
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Final

import asyncpg
import msgspec

from tests.bench.log_floors import BareGroupCommit, BareTransactions
from tests.bench.log_load import WRITERS, Driven, bare_rows, commits, drive
from tests.support.postgres import NO_POSTGRES, start_postgres
from torpor.bench.figures import Figure, Say, figure
from torpor.errors import CannotStart
from torpor_contracts.registry import EVENTS
from torpor_contracts.replies import Receipt
from torpor_eventlog.codec import decode_event
from torpor_eventlog.group_commit import GroupCommit
from torpor_eventlog.planning import Prepared
from torpor_eventlog.port import EventLog
from torpor_eventlog.postgres import PostgresLog
from torpor_eventlog.sqlite import SqliteLog

ROUNDS: Final = 7
EVENTS_OF_A_ROUND: Final = 40 * WRITERS
SINGLE_EVENTS_OF_A_ROUND: Final = WRITERS
PAGE: Final = 2000
CONNECTIONS: Final = 32


class OneAtATime(GroupCommit):
    """Group commit with groups of one: the same log, with a transaction for every event."""

    def _next_batch(self) -> "list[tuple[Prepared, asyncio.Future[Receipt]]]":
        return [self._waiting.popleft()]


async def append_sqlite_256(say: Say) -> list[Figure]:
    """Beside a bare group commit of the same bytes, and beside the same log with one transaction for each event.

    p50 and p99 are one append's latency in milliseconds.
    """
    ours, bare, single = [], [], []
    with _directory() as directory:
        log = await SqliteLog.open(directory / "log.db")
        by_one = await SqliteLog.open(directory / "by_one.db")
        by_one._group = OneAtATime(by_one._write, None)
        floor = BareGroupCommit(directory / "bare.db")
        with closing(floor):
            for number in range(ROUNDS + 1):
                say(f"SQLite, {WRITERS} writers: round {number} of {ROUNDS}")
                load = commits(EVENTS_OF_A_ROUND // WRITERS)
                rows = bare_rows(load)
                async with floor.running():
                    bare.append(await drive(floor.append, rows))
                ours.append(await drive(log.append, load))
                single.append(await drive(by_one.append, commits(SINGLE_EVENTS_OF_A_ROUND // WRITERS)))
        await log.close()
        await by_one.close()
    return [
        _append_figure("log.append_sqlite_256", ours, bare, 0.5),
        _append_figure("log.append_sqlite_256_by_one", ours, single, 10),
    ]


async def append_postgres_256(say: Say) -> list[Figure]:
    """Beside the same log with one transaction for each event, and beside bare inserts over 32 connections.

    The bare ones keep no promise but durability, and leave gaps. p50 and p99 are one append's latency in milliseconds.
    """
    server = start_postgres()
    if server is None:
        raise CannotStart("no-postgres", NO_POSTGRES.partition(":")[0], NO_POSTGRES.partition(": ")[2])
    ours, bare, single = [], [], []
    with closing(server):
        administrator = await asyncpg.connect(server.dsn("postgres"))
        for database in ("ours", "by_one", "bare"):
            await administrator.execute(f"CREATE DATABASE {database}")
        await administrator.close()
        log = await PostgresLog.open(server.dsn("ours"))
        by_one = await PostgresLog.open(server.dsn("by_one"))
        by_one._group = OneAtATime(by_one._writer.write, None)
        floor = BareTransactions(CONNECTIONS)
        await floor.open(server.dsn("bare"))
        for number in range(ROUNDS + 1):
            say(f"PostgreSQL, {WRITERS} writers: round {number} of {ROUNDS}")
            load = commits(EVENTS_OF_A_ROUND // WRITERS)
            single.append(await drive(by_one.append, commits(SINGLE_EVENTS_OF_A_ROUND // WRITERS)))
            bare.append(await drive(floor.append, bare_rows(load)))
            ours.append(await drive(log.append, load))
        await floor.close()
        await by_one.close()
        await log.close()
    return [
        _append_figure("log.append_postgres_256", ours, single, 5),
        _append_figure("log.append_postgres_256_bare", ours, bare, 0.5),
    ]


async def replay(say: Say) -> Figure:
    """All rows of a log read by page and decoded, beside one bare SELECT of the same columns, decoded just so."""
    ours, bare = [], []
    with _directory() as directory:
        path = directory / "log.db"
        log = await SqliteLog.open(path)
        say("filling a log to replay")
        await drive(log.append, commits(EVENTS_OF_A_ROUND * 4 // WRITERS))
        rows = (await log.head()).position
        for number in range(ROUNDS + 1):
            say(f"replay of {rows} events: round {number} of {ROUNDS}")
            bare.append(rows / _bare_replay(path))
            ours.append(rows / await _replay(log))
        await log.close()
    return figure(
        "log.replay",
        median(ours[1:]),
        "events/s",
        ("at least", 0.4),
        of="ratio",
        floor=median(bare[1:]),
        samples=ours[1:],
        n=rows * ROUNDS,
    )


def _append_figure(name: str, ours: list[Driven], floor: list[Driven], at_least: float) -> Figure:
    """The medians of all rounds but the first, which warms up."""
    latencies_ms = [latency_ms for driven in ours[1:] for latency_ms in driven.latencies_ms]
    return figure(
        name,
        median(driven.rate for driven in ours[1:]),
        "events/s",
        ("at least", at_least),
        of="ratio",
        floor=median(driven.rate for driven in floor[1:]),
        samples=latencies_ms,
    )


async def _replay(log: EventLog) -> float:
    """Seconds for a full replay, as a rebuild of views does it."""
    began_s, position = time.perf_counter(), 0
    while page := await log.read(position, PAGE):
        for recorded in page:
            decode_event(recorded)
        position = page[-1].position
    return time.perf_counter() - began_s


def _bare_replay(path: Path) -> float:
    decoders = {tag: msgspec.json.Decoder(kind).decode for tag, kind in EVENTS.items()}
    with closing(sqlite3.connect(path)) as connection:
        began_s = time.perf_counter()
        for _, _, _, tag, data, *_ in connection.execute("SELECT * FROM events ORDER BY position"):
            decoders[tag](data)
        return time.perf_counter() - began_s


@contextmanager
def _directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="torpor-bench-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


BENCHES: Final = {"log": [append_sqlite_256, append_postgres_256, replay]}

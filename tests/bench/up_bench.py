"""The embedded whole: how soon it is ready, how much memory it takes, and what it costs while nothing happens.

Measured again with 10,000 suspended sessions, whose history is that of one real session, written for each of them
into the log itself.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import torpor
from tests.support.embedded import EmbeddedWhole
from torpor.bench.figures import Figure, Say, figure
from torpor.embedded.process_table import TICKS_PER_S
from torpor.embedded.settings import sqlite_dsn
from torpor_contracts.ids import CommandId, TenantId
from torpor_eventlog.opening import open_log
from torpor_eventlog.port import Commit, EventLog, NewEvent, Recorded

STARTS: Final = 3
SESSIONS: Final = 10_000
SETTLE_S: Final = 10.0
"""Left alone after the start, so that what a start leaves to do is done."""
IDLE_S: Final = 60.0
GROWTH_MAX: Final = 1.1
_FILE_COLUMN: Final = 5
_AT_A_TIME: Final = 256
_CAUGHT_UP_S_MAX: Final = 300.0


async def up(say: Say) -> Sequence[Figure]:
    """Start, memory and idle CPU; then memory and idle CPU with many sleepers."""
    ready_s = [await asyncio.to_thread(_start_once, say) for _ in range(STARTS)]
    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as place:
        root = Path(place) / "data"
        async with _running(root):
            async with torpor.connect(data_dir=root) as t:
                session = await t.sessions.create()
                await session.suspend()
            pattern = [event.stream async for event in _events(root)]
        async with _running(root) as whole:
            memory, cpu = await _at_rest(whole, say)
        say(f"writing {SESSIONS} suspended sessions into the log ({len(pattern)} events each)")
        await _write_sleepers(root)
        async with _running(root) as whole:
            await _caught_up(root, say)
        async with _running(root) as whole:
            crowded_memory, crowded_cpu = await _at_rest(whole, say)
    ready = sorted(ready_s)[len(ready_s) // 2]
    return [
        figure("up.ready", ready, "s", ("at most", 6.0), samples=ready_s),
        figure("up.memory", memory, "MiB", ("at most", 450.0)),
        figure("up.idle_cpu", cpu, "% of a core", ("at most", 3.0)),
        _grown("up.memory_10k_sessions", crowded_memory, "MiB", memory),
        _grown("up.idle_cpu_10k_sessions", crowded_cpu, "% of a core", cpu),
    ]


def _grown(name: str, value: float, unit: str, before: float) -> Figure:
    return figure(name, value, unit, ("at most", GROWTH_MAX), of="ratio", floor=before, n=SESSIONS)


def _start_once(say: Say) -> float:
    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as place:
        began_s = time.monotonic()
        whole = EmbeddedWhole(Path(place) / "data")
        try:
            whole.until("ready")
            took_s = time.monotonic() - began_s
        finally:
            whole.close()
    say(f"ready in {took_s:.2f} s")
    return took_s


@asynccontextmanager
async def _running(root: Path) -> AsyncIterator[EmbeddedWhole]:
    whole = EmbeddedWhole(root)
    try:
        await asyncio.to_thread(whole.until, "ready")
        yield whole
    finally:
        await asyncio.to_thread(whole.close)


async def _at_rest(whole: EmbeddedWhole, say: Say) -> tuple[float, float]:
    """Memory (MiB) and CPU (percent of a core) of all processes together, while nothing happens."""
    await asyncio.sleep(SETTLE_S)
    pids = {process.name: process.pid for process in (whole.run.supervisor, *whole.run.processes)}
    before = {name: _cpu_s(pid) for name, pid in pids.items()}
    await asyncio.sleep(IDLE_S)
    cpu = {name: (_cpu_s(pid) - before[name]) / IDLE_S * 100 for name, pid in pids.items()}
    say(", ".join(f"{name} {_memory_mib([pid]):.0f} MiB {cpu[name]:.2f} %" for name, pid in pids.items()))
    return _memory_mib(list(pids.values())), sum(cpu.values())


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _memory_mib(pids: Sequence[int]) -> float:
    """What processes take together: what each has of its own, and each file that they have mapped once.

    Not the sum of their proportional shares, which shrink while others run the same binaries.
    """
    own_kib = 0
    files_kib: dict[str, int] = {}
    for pid in pids:
        file, resident_kib = "", 0
        mapped_kib: dict[str, int] = {}
        for line in Path(f"/proc/{pid}/smaps").read_text(encoding="ascii", errors="replace").splitlines():
            words = line.split()
            if not words[0].endswith(":"):
                file = words[5] if len(words) > _FILE_COLUMN else ""
            elif words[0] == "Rss:":
                resident_kib = int(words[1])
            elif words[0] == "Anonymous:":
                own_kib += int(words[1])
                mapped_kib[file] = mapped_kib.get(file, 0) + resident_kib - int(words[1])
        for name, kib in mapped_kib.items():
            files_kib[name] = max(files_kib.get(name, 0), kib)
    return (own_kib + sum(files_kib.values())) / 1024


@asynccontextmanager
async def _log(root: Path) -> AsyncIterator[EventLog]:
    log = await open_log(sqlite_dsn(root / "log.db"))
    try:
        yield log
    finally:
        await log.close()


async def _events(root: Path) -> AsyncIterator[Recorded]:
    """Everything that belongs to the one session in the log: all but what hosts say of themselves."""
    async with _log(root) as log:
        for row in await log.read(0, 10_000):
            if not row.stream.startswith("host-"):
                yield row


async def _write_sleepers(root: Path) -> None:
    """The history of the one session once for each sleeper: every id that it has becomes one of the sleeper's own."""
    rows = [row async for row in _events(root)]
    ids = sorted({row.stream for row in rows}, key=len, reverse=True)
    ids += sorted({row.command_id.rpartition("/")[2] for row in rows} - set(ids), key=len, reverse=True)
    limit = asyncio.Semaphore(_AT_A_TIME)
    async with _log(root) as log:

        async def write(number: int) -> None:
            async with limit:
                await _write_one(log, rows, ids, f"{number:07x}")

        async with asyncio.TaskGroup() as tasks:
            for number in range(SESSIONS):
                tasks.create_task(write(number))


async def _write_one(log: EventLog, rows: Sequence[Recorded], ids: Sequence[str], mark: str) -> None:
    # The last characters of a UUIDv7 are random ones: with others it is another id of the same form.
    others = {old: f"{old[:-7]}{mark}" for old in ids}

    def own(text: str) -> str:
        for old, new in others.items():
            text = text.replace(old, new)
        return text

    versions: dict[str, int] = {}
    expected: dict[str, int] = {}
    events = []
    for row in rows:
        stream = own(row.stream)
        expected.setdefault(stream, versions.setdefault(stream, 0))
        events.append(NewEvent(stream=stream, tag=row.tag, data=own(row.data.decode()).encode()))
    await log.append(
        Commit(
            command_id=CommandId(f"default/sleeper-{mark}"),
            tenant_id=TenantId(rows[0].tenant_id),
            causation_id=f"sleeper-{mark}",
            correlation_id=f"sleeper-{mark}",
            request_digest=bytes(32),
            occurred_at_us=rows[-1].occurred_at_us,
            expected=expected,
            events=events,
        )
    )


async def _caught_up(root: Path, say: Say) -> None:
    """Wait until the relay has carried everything and every view has folded it."""
    async with _log(root) as log:
        end = (await log.head()).position
    began_s = time.monotonic()
    async with torpor.connect(data_dir=root, role="operator") as operator:
        while time.monotonic() - began_s < _CAUGHT_UP_S_MAX:
            behind = [await _position(operator, service) for service in ("scheduler", "billing", "reaper")]
            say(f"views at {min(behind)} of {end}")
            if min(behind) >= end:
                return
            await asyncio.sleep(2)
    raise AssertionError("the views never caught up")


async def _position(operator: torpor.Torpor, service: str) -> int:
    import msgspec  # noqa: PLC0415

    answer = await operator.connection.ask(f"qry.system.{service}.health.-", b"{}", 30.0, f"{service} is silent")
    health = msgspec.json.decode(answer)
    return min(health["positions"].values(), default=0)


BENCHES = {"up": [up]}

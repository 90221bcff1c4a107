import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from torpor_contracts.errors import Transient
from torpor_contracts.host import HostUndrained
from torpor_contracts.ids import CommandId, HostId, TenantId
from torpor_eventlog.codec import encode_event
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Commit
from torpor_eventlog.relay import FencedOut
from torpor_eventlog.views_memory import MemoryViewStore
from torpor_eventlog.views_port import Table
from torpor_simulation.carrying import EventsStream, RelayEnd
from torpor_simulation.faults import FaultRates, Faults
from torpor_simulation.log import SimLog
from torpor_simulation.loop import VirtualLoop
from torpor_simulation.network import LOG, Network, NetworkFaults
from torpor_simulation.process import Process, ProcessKilled
from torpor_simulation.programs import Program, Supervisor
from torpor_simulation.surroundings import Surroundings
from torpor_simulation.trace import Trace
from torpor_simulation.views import SimViews


class Note(msgspec.Struct, frozen=True, kw_only=True):
    name: str


NOTES = Table(name="notes", row=Note, key="name")


def commit(number: int) -> Commit:
    event = HostUndrained(host_id=HostId("host-a"), requested_at=datetime(2030, 1, 1, tzinfo=UTC))
    return Commit(
        command_id=CommandId(f"c-{number}"),
        tenant_id=TenantId("system"),
        causation_id="x",
        correlation_id="x",
        request_digest=bytes(32),
        occurred_at_us=1,
        expected={"host-a": number},
        events=[encode_event("host-a", event)],
    )


class Place:
    """One process on one machine, with faults and a network of its own."""

    def __init__(self, crash_at: int | None = None, rates: FaultRates | None = None, **network: float) -> None:
        self.trace = Trace()
        self.network = Network(1, NetworkFaults(**network))
        self.process = Process("one")
        faults = Faults(1, rates or FaultRates(), self.trace, crash_at)
        self.around = Surroundings(self.process, "here", self.network, faults, self.trace)


def in_world(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop = VirtualLoop(1)
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


@pytest.mark.parametrize(("crash_at", "rows"), [(1, 0), (2, 1)])
def test_a_crash_before_an_append_leaves_nothing_and_one_after_it_the_rows(crash_at: int, rows: int) -> None:
    async def main() -> None:
        durable, place = MemoryLog(), Place(crash_at)
        with pytest.raises(ProcessKilled):
            await SimLog(durable, place.around, lambda: None).append(commit(0))
        assert (await durable.head()).position == rows
        assert not place.process.alive

    in_world(main)


def test_a_commit_may_be_made_and_not_said() -> None:
    async def main() -> None:
        durable, place = MemoryLog(), Place(stored_but_unanswered=1.0)
        log = SimLog(durable, place.around, lambda: None)
        with pytest.raises(Transient):
            await log.append(commit(0))
        assert (await durable.head()).position == 1

    in_world(main)


def test_who_is_cut_off_reaches_nothing_and_a_dead_process_neither() -> None:
    async def main() -> None:
        place = Place()
        log = SimLog(MemoryLog(), place.around, lambda: None)
        for what in (LOG, "here"):
            place.network.take_down(what)
            with pytest.raises(Transient):
                await log.head()
            place.network.bring_back(what)
        await log.head()
        place.process.kill()
        with pytest.raises(ProcessKilled):
            await log.head()

    in_world(main)


@pytest.mark.parametrize(("crash_at", "position"), [(1, 0), (2, 7)])
def test_a_crash_in_a_view_transaction_keeps_all_of_it_or_nothing(crash_at: int, position: int) -> None:
    async def main() -> None:
        durable, place = MemoryViewStore(), Place(crash_at)
        views = SimViews(durable, place.around)
        await views.prepare("notes", [NOTES])

        async def put() -> None:
            async with views.writing("notes") as write:
                await write.put(NOTES, Note(name="a"))
                write.move_to(7)

        with pytest.raises(ProcessKilled):
            await put()
        assert await durable.position("notes") == position
        async with durable.reading() as rows:
            assert len(await rows.find(NOTES)) == (1 if position else 0)

    in_world(main)


def test_a_relay_that_is_behind_is_fenced_out_and_one_that_dies_leaves_a_prefix() -> None:
    async def main() -> None:
        durable, stream = MemoryLog(), EventsStream()
        for number in range(4):
            await durable.append(commit(number))
        rows = await durable.read(0, 10)
        with pytest.raises(ProcessKilled):
            await RelayEnd(stream, Place(crash_at=3).around).publish(rows)
        assert [row.position for row in stream.rows] == [1, 2]
        with pytest.raises(FencedOut):
            await RelayEnd(stream, Place().around).publish(rows)
        await RelayEnd(stream, Place().around).publish(rows[2:])
        assert stream.rows == rows

    in_world(main)


def test_a_program_is_started_again_after_each_death_and_an_unforced_one_is_told() -> None:
    async def main() -> None:
        told: list[str] = []
        lives = 0

        async def live(process: Process) -> None:
            nonlocal lives
            lives += 1
            await asyncio.sleep(5)
            process.check()
            raise ValueError("a bug")

        supervisor = Supervisor(Program("one", "here", live), Trace(), told.append, restart_s=1.0)
        keeping = asyncio.ensure_future(supervisor.run())
        await asyncio.sleep(1)
        supervisor.crash()
        await asyncio.sleep(1.5)
        assert (lives, told) == (2, [])
        await asyncio.sleep(5)
        assert told == ["one#2 died of ValueError: a bug"]
        supervisor.hold()
        before = lives
        await asyncio.sleep(60)
        assert lives == before
        supervisor.release()
        await asyncio.sleep(1)
        assert lives == before + 1
        keeping.cancel()
        await asyncio.wait([keeping])

    in_world(main)

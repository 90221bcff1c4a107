"""Refolded views are compared row by row with the live ones, which are mended; nothing unfoldable passes silently."""

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from torpor_contracts.errors import Transient
from torpor_contracts.host import HostDraining
from torpor_contracts.ids import HostId
from torpor_eventlog.audit.rebuild_views import RowDifference, ViewRebuilt, rebuild_view
from torpor_eventlog.feeds import LogFeed
from torpor_eventlog.followers import ProjectionFollower
from torpor_eventlog.memory import MemoryDatabase, MemoryLog
from torpor_eventlog.port import NewEvent, Recorded
from torpor_eventlog.views_memory import MemoryViewStore
from torpor_eventlog.views_port import Table, ViewStore, WritableRows
from torpor_eventlog.views_sqlite import SqliteViewStore

pytestmark = pytest.mark.anyio
Grow = Callable[..., Awaitable[None]]
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    position: int


DRAINS = Table(name="drains", row=Drain, key="reason", indexed=("position",))
COUNTS = Table(name="counts", row=Drain, key="reason")


class Drains:
    """One row for each reason; `broken_at` is a reason it cannot fold."""

    name = "drains"
    tables: tuple[Table, ...] = (DRAINS, COUNTS)

    def __init__(self, broken_at: str = "") -> None:
        self.broken_at = broken_at

    async def fold(self, rows: WritableRows, event: Any, recorded: Recorded) -> None:
        if event.reason == self.broken_at:
            raise ValueError(event.reason)
        await rows.put(DRAINS, Drain(reason=event.reason, position=recorded.position))
        await rows.put(COUNTS, Drain(reason="all", position=recorded.position))


def drain(reason: str) -> HostDraining:
    return HostDraining(host_id=HostId("host-a"), reason=reason, requested_at=NOON)


async def ignored(consumer: str, recorded: Recorded, error: Exception) -> None:
    """The dead letters of the live service."""


class World:
    def __init__(self, live: ViewStore, scratch: ViewStore) -> None:
        self.database = MemoryDatabase()
        self.log = MemoryLog(self.database)
        self.live = live
        self.scratch = scratch

    async def fold(self, projection: Drains | None = None) -> None:
        live = ProjectionFollower(projection or Drains(), self.live, LogFeed(self.log), dead=ignored)
        await live.fold(await self.log.read(await self.live.position("drains"), 10_000))

    async def rebuild(self, projection: Drains | None = None) -> ViewRebuilt:
        return await rebuild_view(self.log, projection or Drains(), self.live, self.scratch)

    async def rows(self, table: Table = DRAINS) -> list[tuple[str, int]]:
        async with self.live.reading() as rows:
            return [(row.reason, row.position) for row in await rows.find(table, limit=10_000)]


@pytest.fixture(params=["memory", "sqlite"])
async def world(request: pytest.FixtureRequest, tmp_path: Path, grow: Grow) -> AsyncIterator[World]:
    if request.param == "memory":
        world = World(MemoryViewStore(), MemoryViewStore())
    else:
        world = World(SqliteViewStore(tmp_path / "live.db"), SqliteViewStore(tmp_path / "scratch.db"))
    await grow(world.log, "host-a", *[drain(f"r{n:04}") for n in range(1, 8)])
    await world.live.prepare("drains", Drains.tables)
    yield world
    await world.live.close()
    await world.scratch.close()


async def test_a_right_view_has_no_differences(world: World) -> None:
    await world.fold()
    rebuilt = await world.rebuild()
    assert rebuilt.ok
    assert (rebuilt.compared_at, rebuilt.position, rebuilt.rows) == (7, 7, 8)


async def test_every_wrong_row_is_reported_and_mended(world: World) -> None:
    await world.fold()
    right = await world.rows()
    async with world.live.writing("drains") as write:
        await write.put(DRAINS, Drain(reason="r0002", position=99))
        await write.put(DRAINS, Drain(reason="a-ghost", position=1))
        await write.put(DRAINS, Drain(reason="z-ghost", position=1))
        await write.delete(DRAINS, "r0007")
        await write.delete(COUNTS, "all")
    rebuilt = await world.rebuild()
    assert not rebuilt.ok
    assert rebuilt.differences == [
        RowDifference(table="drains", key="a-ghost", live=Drain(reason="a-ghost", position=1), refolded=None),
        RowDifference(
            table="drains",
            key="r0002",
            live=Drain(reason="r0002", position=99),
            refolded=Drain(reason="r0002", position=2),
        ),
        RowDifference(table="drains", key="r0007", live=None, refolded=Drain(reason="r0007", position=7)),
        RowDifference(table="drains", key="z-ghost", live=Drain(reason="z-ghost", position=1), refolded=None),
        RowDifference(table="counts", key="all", live=None, refolded=Drain(reason="all", position=7)),
    ]
    assert await world.rows() == right
    assert (await world.rebuild()).ok


async def test_many_rows_are_compared_page_by_page(world: World, grow: Grow) -> None:
    await grow(world.log, "host-a", *[drain(f"r{n:04}") for n in range(8, 1301)])
    await world.fold()
    right = await world.rows()
    async with world.live.writing("drains") as write:
        for n in range(1, 1301, 10):
            await write.put(DRAINS, Drain(reason=f"r{n:04}", position=0))
            await write.put(DRAINS, Drain(reason=f"r{n:04}-ghost", position=0))
        for n in range(5, 1301, 100):
            await write.delete(DRAINS, f"r{n:04}")
    rebuilt = await world.rebuild()
    assert rebuilt.differences_total == 130 + 130 + 13
    assert len(rebuilt.differences) == 100
    assert rebuilt.rows == 1301
    assert await world.rows() == right


async def test_a_view_that_is_behind_is_compared_where_it_stands_and_brought_up(world: World, grow: Grow) -> None:
    await world.fold()
    await grow(world.log, "host-a", drain("r0008"), drain("r0009"))
    rebuilt = await world.rebuild()
    assert rebuilt.ok
    assert (rebuilt.compared_at, rebuilt.position) == (7, 9)
    assert len(await world.rows()) == 9


async def test_a_view_that_was_never_folded_is_folded(world: World) -> None:
    rebuilt = await world.rebuild()
    assert (rebuilt.compared_at, rebuilt.position) == (0, 7)
    assert len(await world.rows()) == 7


async def test_a_view_of_a_log_that_is_no_more_is_dropped(world: World) -> None:
    await world.fold()
    world.log = MemoryLog()
    rebuilt = await world.rebuild()
    assert not rebuilt.ok
    assert rebuilt.ahead_by == 7
    assert await world.rows() == []


async def test_an_event_that_cannot_be_folded_is_an_error_of_the_rebuild(world: World, grow: Grow) -> None:
    unknown = NewEvent(stream="host-a", tag="host-painted.v9", data=b'{"type":"host-painted.v9"}')
    await grow(world.log, "host-a", unknown)
    broken = Drains(broken_at="r0003")
    await world.fold(broken)
    rebuilt = await world.rebuild(broken)
    assert not rebuilt.ok
    assert rebuilt.differences == []
    assert [(each.position, each.tag) for each in rebuilt.unfoldable] == [
        (3, "host-draining.v1"),
        (8, "host-painted.v9"),
    ]
    assert rebuilt.unfoldable_total == 2


async def test_what_an_earlier_release_could_not_fold_is_folded_now(world: World) -> None:
    await world.fold(Drains(broken_at="r0003"))
    rebuilt = await world.rebuild()
    assert [difference.key for difference in rebuilt.differences] == ["r0003"]
    assert ("r0003", 3) in await world.rows()


async def test_a_running_service_waits_and_goes_on(world: World, grow: Grow) -> None:
    await world.fold()

    class Slow(MemoryLog):
        """Events are appended, and folded by the service, while the rebuild reads."""

        async def read(inner, after_position: int, limit: int) -> list[Recorded]:  # noqa: N805
            rows = await super().read(after_position, limit)
            if after_position == 0 and len(world.database.rows) == 7:
                await grow(world.log, "host-a", drain("r0008"))
                await world.fold()
            return rows

    rebuilt = await rebuild_view(Slow(world.database), Drains(), world.live, world.scratch)
    assert rebuilt.ok
    assert rebuilt.compared_at == 8


async def test_a_rebuild_that_fails_leaves_the_live_view_as_it_was(world: World) -> None:
    await world.fold()
    async with world.live.writing("drains") as write:
        await write.delete(DRAINS, "r0001")
    before = await world.rows()

    class Broken(MemoryViewStore):
        def reading(self) -> Any:
            raise Transient("the scratch disk is full")

    with pytest.raises(Transient):
        await rebuild_view(world.log, Drains(), world.live, Broken())
    assert await world.rows() == before
    assert await world.live.position("drains") == 7

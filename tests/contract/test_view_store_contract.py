"""What every view store promises: rows and position change together, reads are consistent, shapes are watched."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.folding import Tallies, cleanly_folded, contents, made_up, store_at
from torpor_contracts.errors import InvariantViolation, Poison, Transient
from torpor_eventlog.feeds import LogFeed
from torpor_eventlog.followers import ProjectionFollower
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.views_memory import MemoryViewStore
from torpor_eventlog.views_port import Table, ViewStore

pytestmark = pytest.mark.anyio


class Item(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str | None = None
    due_us: int | None = None
    parts: list[str] = []


class ItemToday(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str | None = None
    due_us: int | None = None
    parts: list[str] = []
    owner: str = ""


ITEMS = Table(name="items", row=Item, key="name", indexed=("kind", "due_us"))
ITEMS_TODAY = Table(name="items", row=ItemToday, key="name", indexed=("kind", "due_us"))
ITEMS_BY_KIND = Table(name="items", row=Item, key="name", indexed=("kind",))
OTHERS = Table(name="others", row=Item, key="name")

Opener = Callable[[], ViewStore]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


DURABLE = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(params=["memory", *DURABLE])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the store is: an SQLite file, a PostgreSQL database, or nowhere."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_dsn"))
    return "" if request.param == "memory" else str(tmp_path / "v.db")


@pytest.fixture
async def opener(place: str) -> AsyncIterator[Opener]:
    """Opens the same store again and again, as a restarted process would."""
    memory = MemoryViewStore()
    opened: list[ViewStore] = []

    def open_store() -> ViewStore:
        store = store_at(place) if place else memory
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        await store.close()


@pytest.fixture
def store(opener: Opener) -> ViewStore:
    return opener()


async def fill(store: ViewStore, *items: msgspec.Struct, table: Table = ITEMS, position: int = 1) -> None:
    async with store.writing("f") as write:
        for item in items:
            await write.put(table, item)
        write.move_to(position)


async def names(store: ViewStore, **asked: Any) -> list[str]:
    async with store.reading() as rows:
        return [item.name for item in await rows.find(ITEMS, **asked)]


async def test_rows_and_position_are_there_after_a_commit(opener: Opener) -> None:
    store = opener()
    item = Item(name="a", kind="é€😀", due_us=-(1 << 63), parts=["x", "\u0000", '"'])
    await fill(store, item, position=7)
    for reader in (store, opener()):
        assert await reader.position("f") == 7
        async with reader.reading() as rows:
            assert await rows.get(ITEMS, "a") == item
            assert await rows.get(ITEMS, "b") is None
            assert await rows.get(OTHERS, "a") is None
            assert await rows.find(OTHERS) == []


async def test_nothing_is_there_after_an_error(store: ViewStore) -> None:
    await fill(store, Item(name="a", kind="old"))

    async def write_and_break() -> None:
        async with store.writing("f") as write:
            await write.put(ITEMS, Item(name="a", kind="new"))
            await write.put(ITEMS, Item(name="b"))
            await write.put(OTHERS, Item(name="c"))
            assert len(await write.find(ITEMS)) == 2
            await write.delete(ITEMS, "a")
            write.move_to(9)
            raise KeyError

    with pytest.raises(KeyError):
        await write_and_break()
    async with store.reading() as rows:
        assert await rows.find(ITEMS) == [Item(name="a", kind="old")]
        assert await rows.find(OTHERS) == []
    assert await store.position("f") == 1
    await fill(store, Item(name="d"), table=OTHERS, position=2)


async def test_nothing_is_there_after_a_cancellation(store: ViewStore) -> None:
    inside = asyncio.Event()

    async def hang() -> None:
        async with store.writing("f") as write:
            await write.put(ITEMS, Item(name="a"))
            write.move_to(9)
            inside.set()
            await asyncio.Event().wait()

    hanging = asyncio.create_task(hang())
    await inside.wait()
    hanging.cancel()
    await asyncio.wait({hanging})
    assert await names(store) == []
    await fill(store, Item(name="b"))
    assert await names(store) == ["b"]


async def test_a_cancellation_at_any_moment_leaves_all_or_nothing(store: ViewStore) -> None:
    dice = random.Random(7)
    await fill(store)
    for position in range(2, 40):
        writing = asyncio.create_task(fill(store, Item(name=f"n{position:03}"), position=position))
        for _ in range(dice.randrange(8)):
            await asyncio.sleep(0)
        await asyncio.sleep(dice.random() * 0.002)
        writing.cancel()
        await asyncio.wait({writing})
        there = await names(store, where={"name": f"n{position:03}"}) != []
        assert there == (await store.position("f") == position)


async def test_a_write_sees_its_own_changes(store: ViewStore) -> None:
    await fill(store, Item(name="a", kind="x"), Item(name="b", kind="x"))
    async with store.writing("f") as write:
        assert write.position == 1
        await write.put(ITEMS, Item(name="c", kind="x"))
        await write.put(ITEMS, Item(name="b", kind="y"))
        await write.delete(ITEMS, "a")
        assert await write.get(ITEMS, "a") is None
        assert await write.get(ITEMS, "b") == Item(name="b", kind="y")
        assert [item.name for item in await write.find(ITEMS, {"kind": "x"})] == ["c"]
        await write.put(ITEMS, Item(name="a", kind="x"))
        await write.delete(ITEMS, "never")
        assert await write.get(ITEMS, "c") == Item(name="c", kind="x")
        assert [item.name for item in await write.find(ITEMS, {"kind": "x"})] == ["a", "c"]
    assert await names(store) == ["a", "b", "c"]


async def test_a_read_is_consistent_however_long_it_takes(store: ViewStore) -> None:
    await fill(store, Item(name="a", kind="1"), Item(name="b", kind="1"))
    async with store.reading() as rows:
        assert await rows.get(ITEMS, "a") == Item(name="a", kind="1")
        await fill(store, Item(name="a", kind="2"), Item(name="b", kind="2"), Item(name="c", kind="2"), position=2)
        async with store.writing("f") as write:
            await write.delete(ITEMS, "b")
            write.move_to(3)
        assert await rows.get(ITEMS, "b") == Item(name="b", kind="1")
        assert await rows.get(ITEMS, "c") is None
        assert [item.kind for item in await rows.find(ITEMS)] == ["1", "1"]
    assert await names(store) == ["a", "c"]


async def test_find_filters_bounds_orders_and_pages(store: ViewStore) -> None:
    await fill(
        store,
        Item(name="a", kind="x", due_us=30),
        Item(name="b", kind="y", due_us=10),
        Item(name="c", kind="x", due_us=None),
        Item(name="d", kind=None, due_us=20),
        Item(name="Z", kind="é", due_us=20),
    )
    assert await names(store) == ["Z", "a", "b", "c", "d"]
    assert await names(store, where={"kind": "x"}) == ["a", "c"]
    assert await names(store, where={"kind": None}) == ["d"]
    assert await names(store, where={"kind": "x", "due_us": 30}) == ["a"]
    assert await names(store, where={"name": "b"}) == ["b"]
    assert await names(store, at_most=("due_us", 20)) == ["Z", "b", "d"]
    assert await names(store, where={"kind": "x"}, at_most=("due_us", 20)) == []
    assert await names(store, order_by="due_us") == ["c", "b", "Z", "d", "a"]
    assert await names(store, order_by="kind") == ["d", "a", "c", "b", "Z"]
    assert await names(store, order_by="name") == ["Z", "a", "b", "c", "d"]
    assert await names(store, limit=2) == ["Z", "a"]
    assert await names(store, after_key="a", limit=2) == ["b", "c"]
    assert await names(store, after_key="d") == []
    assert await names(store, where={"kind": "x"}, order_by="due_us", limit=1) == ["c"]


@pytest.mark.parametrize(
    "asked",
    [
        {"where": {"parts": "x"}},
        {"where": {"kind": 1}},
        {"at_most": ("due_us", "20")},
        {"order_by": "parts"},
        {"order_by": "kind", "after_key": "a"},
        {"limit": 0},
    ],
)
async def test_a_query_that_no_index_answers_is_refused(store: ViewStore, asked: dict[str, Any]) -> None:
    await fill(store, Item(name="a"))
    with pytest.raises(InvariantViolation):
        await names(store, **asked)


@pytest.mark.parametrize("row", [Item(name="a\x00"), Item(name="a", kind="\x00"), Item(name="a", due_us=1 << 63)])
async def test_a_row_that_no_database_holds_is_poison(store: ViewStore, row: Item) -> None:
    with pytest.raises(Poison):
        await fill(store, row)


@pytest.mark.parametrize(
    "table",
    [
        Table(name="Bad name", row=Item, key="name"),
        Table(name="items", row=Item, key="missing"),
        Table(name="items", row=Item, key="due_us"),
        Table(name="items", row=Item, key="kind"),
        Table(name="items", row=Item, key="name", indexed=("parts",)),
        Table(name="items", row=Item, key="name", indexed=("missing",)),
    ],
)
async def test_a_table_that_cannot_be_stored_is_refused(store: ViewStore, table: Table) -> None:
    with pytest.raises(InvariantViolation):
        await fill(store, Item(name="a"), table=table)


async def test_a_row_of_another_type_is_refused(store: ViewStore) -> None:
    with pytest.raises(InvariantViolation, match="holds Item, not ItemToday"):
        await fill(store, ItemToday(name="a"))


async def test_a_position_never_goes_back(store: ViewStore) -> None:
    await fill(store, position=5)
    with pytest.raises(InvariantViolation, match="cannot move back to 4"):
        await fill(store, position=4)
    assert await store.position("f") == 5


async def test_dropping_forgets_one_follower_only(store: ViewStore) -> None:
    await fill(store, Item(name="a"))
    async with store.writing("other") as write:
        await write.put(OTHERS, Item(name="b"))
        write.move_to(3)
    await store.drop("f", [ITEMS])
    assert await names(store) == []
    assert await store.position("f") == 0
    assert await store.position("other") == 3
    async with store.reading() as rows:
        assert await rows.get(OTHERS, "b") == Item(name="b")
    await fill(store, Item(name="c"))
    assert await names(store) == ["c"]


async def test_preparing_keeps_what_has_the_same_shape(opener: Opener) -> None:
    store = opener()
    assert await store.prepare("f", [ITEMS]) == 0
    await fill(store, Item(name="a"), position=4)
    assert await store.prepare("f", [ITEMS]) == 4
    assert await opener().prepare("f", [ITEMS]) == 4
    assert await names(store) == ["a"]


@pytest.mark.parametrize("today", [(ITEMS_TODAY,), (ITEMS_BY_KIND,), (ITEMS, OTHERS), (OTHERS,), ()])
async def test_another_shape_drops_the_view_to_be_folded_afresh(opener: Opener, today: tuple[Table, ...]) -> None:
    store = opener()
    await store.prepare("f", [ITEMS])
    await fill(store, Item(name="a"), position=4)
    later = opener()
    assert await later.prepare("f", today) == 0
    assert await later.position("f") == 0
    async with later.reading() as rows:
        for table in (ITEMS, *today):
            assert await rows.find(table) == []
    if ITEMS_TODAY in today:
        await fill(later, ItemToday(name="b", owner="o"), table=ITEMS_TODAY)
        with pytest.raises(InvariantViolation, match="another shape"):
            await fill(store, Item(name="c"), position=2)


async def test_a_table_belongs_to_one_follower(store: ViewStore) -> None:
    await store.prepare("f", [ITEMS])
    with pytest.raises(InvariantViolation, match="belongs to f"):
        await store.prepare("g", [ITEMS])


async def test_writers_take_turns(opener: Opener) -> None:
    stores = [opener(), opener()]
    await stores[0].prepare("f", [ITEMS])

    async def count(store: ViewStore) -> None:
        for _ in range(20):
            async with store.writing("f") as write:
                before = await write.get(ITEMS, "n") or Item(name="n", due_us=0)
                await asyncio.sleep(0)
                await write.put(ITEMS, Item(name="n", due_us=(before.due_us or 0) + 1))
                write.move_to(write.position + 1)

    await asyncio.gather(*(count(store) for store in stores))
    async with stores[0].reading() as rows:
        assert await rows.get(ITEMS, "n") == Item(name="n", due_us=40)
    assert await stores[1].position("f") == 40


async def test_many_reads_at_once_wait_their_turn(store: ViewStore) -> None:
    await fill(store, *[Item(name=f"n{n}") for n in range(10)])

    async def read() -> int:
        async with store.reading() as rows:
            await asyncio.sleep(0)
            return len(await rows.find(ITEMS))

    assert await asyncio.gather(*(read() for _ in range(50))) == [10] * 50


@pytest.mark.parametrize("place", DURABLE, indirect=True)  # a memory store outlives the process that closes it
async def test_a_closed_store_says_so(store: ViewStore) -> None:
    await fill(store, Item(name="a"))
    await store.close()
    await store.close()
    with pytest.raises(Transient, match="closed"):
        await store.position("f")


async def test_a_projection_folds_the_same_rows_into_every_store(store: ViewStore) -> None:
    follower = ProjectionFollower(Tallies(), store, LogFeed(MemoryLog()), dead=_refuse, batch_max=50)
    await follower.fold(made_up(1, 700))
    async with store.reading() as rows:
        assert await contents(rows) == await cleanly_folded(700)


async def _refuse(*unfoldable: object) -> None:
    raise AssertionError(unfoldable)

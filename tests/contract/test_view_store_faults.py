"""View stores whose process is killed, whose file is damaged or locked, whose server is away."""

import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.folding import RARE, cleanly_folded, contents, store_at
from torpor_contracts.errors import Transient
from torpor_eventlog.views_port import Table, ViewStore
from torpor_eventlog.views_sqlite import SqliteViewStore

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[2]


class Item(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    parts: list[str] = []


ITEMS = Table(name="items", row=Item, key="name")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("postgres_dsn") if request.param == "postgres" else tmp_path / "v.db")


async def fill(store: ViewStore, *items: Item, position: int = 1) -> None:
    async with store.writing("f") as write:
        for item in items:
            await write.put(ITEMS, item)
        write.move_to(position)


async def names(store: ViewStore) -> list[str]:
    async with store.reading() as rows:
        return [item.name for item in await rows.find(ITEMS, limit=5000)]


def fold_and_kill(place: str, rows_in_all: int, transactions: int) -> bool:
    """Fold in another process and kill it after some transactions; whether it was killed in time."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.folding", place, str(rows_in_all)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(transactions):
        process.stdout.readline()
    process.kill()
    process.communicate(timeout=30)
    return process.returncode != 0


async def test_killed_at_any_moment_every_row_is_folded_exactly_once(place: str) -> None:
    dice, rows_in_all, kills = random.Random(11), 3000, 0
    while kills < 30 and fold_and_kill(place, rows_in_all, dice.randrange(1, 40)):
        kills += 1
    assert kills >= 3
    store = store_at(place)
    try:
        assert await store.position("tallies") == rows_in_all
        async with store.reading() as rows:
            assert await contents(rows) == await cleanly_folded(rows_in_all)
            assert await rows.find(RARE, limit=1) != []
    finally:
        await store.close()


async def test_a_damaged_sqlite_file_is_set_aside_and_folded_afresh(tmp_path: Path) -> None:
    place = tmp_path / "v.db"
    place.write_bytes(b"this is no database, " * 1000)
    store = store_at(str(place))
    try:
        await fill(store, Item(name="a"))
        assert await names(store) == ["a"]
        assert place.with_name("v.db.damaged").read_bytes().startswith(b"this is no database")
    finally:
        await store.close()


async def test_an_sqlite_file_damaged_while_in_use_is_set_aside_too(tmp_path: Path) -> None:
    place = tmp_path / "v.db"
    store = store_at(str(place))
    try:
        await fill(store, *[Item(name=f"n{n:05}", parts=["x" * 500]) for n in range(2000)], position=1)
        await store.close()
        content = bytearray(place.read_bytes())
        content[8192:-8192] = random.Random(3).randbytes(len(content) - 16384)
        place.write_bytes(bytes(content))
        store = store_at(str(place))
        with pytest.raises(Transient, match="damaged"):
            await names(store)
        assert await store.prepare("f", [ITEMS]) == 0
        await fill(store, Item(name="a"))
        assert await names(store) == ["a"]
    finally:
        await store.close()


async def test_a_locked_sqlite_file_is_transient(tmp_path: Path) -> None:
    place = tmp_path / "v.db"
    store = SqliteViewStore(place, busy_wait_s=0.01)
    await fill(store, Item(name="a"))
    other = sqlite3.connect(place, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Transient, match="locked by another process"):
        await fill(store, Item(name="b"), position=2)
    assert await names(store) == ["a"]
    other.execute("ROLLBACK")
    other.close()
    await fill(store, Item(name="b"), position=2)
    assert await names(store) == ["a", "b"]
    await store.close()


async def test_a_server_that_is_away_is_transient() -> None:
    store = store_at("postgresql://nobody@127.0.0.1:1/nowhere")
    with pytest.raises(Transient, match="see that the server runs"):
        await store.position("f")
    await store.close()

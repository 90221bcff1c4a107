"""Looking for what is due must not read the whole table: with a million sleepers that would cost seconds."""

import sqlite3

import msgspec
import pytest

from torpor_eventlog.view_tables import layout_of
from torpor_eventlog.views_port import Table
from torpor_eventlog.views_sqlite import SQLITE


class Sleeper(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str | None = None
    due_us: int | None = None


TABLE = Table(name="sleepers", row=Sleeper, key="name", indexed=("kind", "due_us"))


@pytest.mark.parametrize(("order_by", "after_key"), [(None, None), (None, "m"), ("due_us", None)])
@pytest.mark.parametrize("where", [None, {"kind": "cat"}])
def test_what_is_due_is_found_by_an_index(
    order_by: str | None, after_key: str | None, where: dict[str, str | int | None] | None
) -> None:
    layout = layout_of(TABLE)
    database = sqlite3.connect(":memory:")
    for sql, rows in [*SQLITE.schema(), *SQLITE.create(layout, "someone")]:
        for row in rows:
            database.execute(sql, row)
    sql, parameters = SQLITE.find(layout, layout.query(where, ("due_us", 7), order_by, after_key, 500))
    plan = [step[3] for step in database.execute(f"EXPLAIN QUERY PLAN {sql}", parameters)]
    database.close()
    assert not [step for step in plan if step.startswith("SCAN")], plan

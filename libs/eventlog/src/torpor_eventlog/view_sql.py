"""What the two SQL view stores share: statements, rows read through them, and writes kept back until the commit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from torpor_contracts.errors import InvariantViolation
from torpor_eventlog.view_tables import Cell, Layout, Query, layout_of, shape_of
from torpor_eventlog.views_memory import forward
from torpor_eventlog.views_port import Table

FOLLOWERS: Final = (
    "CREATE TABLE IF NOT EXISTS view_followers (name {text} PRIMARY KEY, position {integer} NOT NULL, "
    "shape {text} NOT NULL)"
)
TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS view_tables (name {text} PRIMARY KEY, follower {text} NOT NULL, "
    "fingerprint {text} NOT NULL)"
)

Statement = tuple[str, Sequence[Sequence[Cell]]]
"""A statement and the parameters of each time it is run."""


class Session(Protocol):
    """One open transaction."""

    async def fetch(
        self, sql: str, parameters: Sequence[Cell], first: Sequence[Statement] = ()
    ) -> Sequence[Sequence[Any]]:
        """The rows a query answers, after the statements `first` were run."""
        ...

    async def run(self, statements: Sequence[Statement]) -> None:
        """Run statements in order, each with all of its parameters."""
        ...


@dataclass(frozen=True)
class Dialect:
    """How a database spells what we say. Its text must sort by code point, its None first.

    `unindexed` before a column keeps a planner without statistics from reading a whole table in that column's order.
    """

    text: str
    integer: str
    numbered: bool
    index_order: str
    unindexed: str = ""

    def marks(self, count: int, first: int = 1) -> list[str]:
        """Placeholders of `count` parameters."""
        return [f"${first + at}" if self.numbered else "?" for at in range(count)]

    def schema(self) -> list[Statement]:
        """The tables every view store has."""
        return [(form.format(text=self.text, integer=self.integer), [()]) for form in (FOLLOWERS, TABLES)]

    def create(self, layout: Layout, follower: str) -> list[Statement]:
        """Make a view's table and write down whose it is."""
        columns = [f'"row_key" {self.text} PRIMARY KEY', f'"row_json" {self.text} NOT NULL']
        columns += [f'"ix_{f}" {self.integer if f in layout.integers else self.text}' for f in layout.table.indexed]
        name = _quoted(layout)
        made: list[Statement] = [(f"CREATE TABLE {name} ({', '.join(columns)})", [()])]
        for number, field in enumerate(layout.table.indexed):
            index = f'"by_{layout.table.name}_{number}"'
            made.append((f'CREATE INDEX {index} ON {name} ("ix_{field}" {self.index_order}, "row_key")', [()]))
        register = f"INSERT INTO view_tables VALUES ({', '.join(self.marks(3))})"  # noqa: S608  (placeholders)
        return [*made, (register, [(layout.table.name, follower, layout.fingerprint)])]

    def forget(self, follower: str, tables: Sequence[str]) -> list[Statement]:
        """Drop a follower's tables and its position."""
        (mark,) = self.marks(1)
        dropped: list[Statement] = [(f'DROP TABLE IF EXISTS "row_{name}"', [()]) for name in tables]
        dropped.append((f"DELETE FROM view_tables WHERE name = {mark}", [(name,) for name in tables]))  # noqa: S608
        dropped.append((f"DELETE FROM view_followers WHERE name = {mark}", [(follower,)]))  # noqa: S608
        return dropped

    def upsert(self, layout: Layout) -> str:
        """Insert or replace a row: key, JSON, indexed cells."""
        columns = ['"row_key"', '"row_json"', *(f'"ix_{field}"' for field in layout.table.indexed)]
        kept = ", ".join(f"{column} = excluded.{column}" for column in columns[1:])
        marks = ", ".join(self.marks(len(columns)))
        return (
            f"INSERT INTO {_quoted(layout)} ({', '.join(columns)}) VALUES ({marks}) "  # noqa: S608  (checked names)
            f'ON CONFLICT ("row_key") DO UPDATE SET {kept}'
        )

    def delete(self, layout: Layout) -> str:
        """Remove a row by its key."""
        return f'DELETE FROM {_quoted(layout)} WHERE "row_key" = {self.marks(1)[0]}'  # noqa: S608  (checked names)

    def get(self, layout: Layout) -> str:
        """One row by its key."""
        return f'SELECT "row_json" FROM {_quoted(layout)} WHERE "row_key" = {self.marks(1)[0]}'  # noqa: S608

    def find(self, layout: Layout, query: Query) -> tuple[str, list[Cell]]:
        """The rows of a query."""
        terms: list[str] = []
        parameters: list[Cell] = []

        def term(column: str, operator: str, value: Cell) -> None:
            terms.append(f"{column} {operator} {self.marks(1, len(parameters) + 1)[0]}")
            parameters.append(value)

        for field, wanted in query.where:
            if wanted is None:
                terms.append(f"{_column(layout, field)} IS NULL")
            else:
                term(_column(layout, field), "=", wanted)
        if query.at_most is not None:
            term(_column(layout, query.at_most[0]), "<=", query.at_most[1])
        # What is due is little, and an index finds it; in key order all rows would have to be looked at.
        due = query.at_most is not None and query.order_by is None and not query.where
        key = f'{self.unindexed}"row_key"' if due else '"row_key"'
        if query.after_key is not None:
            term(key, ">", query.after_key)
        order = f"{_column(layout, query.order_by)} NULLS FIRST, " if query.order_by else ""
        where = f" WHERE {' AND '.join(terms)}" if terms else ""
        limit = self.marks(1, len(parameters) + 1)[0]
        sql = f'SELECT "row_json" FROM {_quoted(layout)}{where} ORDER BY {order}{key} LIMIT {limit}'  # noqa: S608
        return sql, [*parameters, query.limit]

    def move(self, follower: str, position: int, shape: str | None = None) -> Statement:
        """Write down a follower's position, and its shape if one is given."""
        shape_kept = "" if shape is None else ", shape = excluded.shape"
        sql = (
            f"INSERT INTO view_followers VALUES ({', '.join(self.marks(3))}) "  # noqa: S608  (placeholders)
            f"ON CONFLICT (name) DO UPDATE SET position = excluded.position{shape_kept}"
        )
        return sql, [(follower, position, shape or "")]


class SqlRows:
    """Rows inside one transaction; `fingerprints` are those of the tables it sees."""

    def __init__(self, session: Session, dialect: Dialect, fingerprints: dict[str, str]) -> None:
        self._session = session
        self._dialect = dialect
        self._fingerprints = fingerprints

    async def get(self, table: Table, key: str) -> Any | None:
        """See `Rows.get`."""
        layout = layout_of(table)
        if self._fingerprints.get(table.name) != layout.fingerprint:
            return None
        found = await self._session.fetch(self._dialect.get(layout), (key,))
        return layout.decode(found[0][0]) if found else None

    async def find(
        self,
        table: Table,
        where: Mapping[str, Cell] | None = None,
        *,
        at_most: tuple[str, int] | None = None,
        order_by: str | None = None,
        after_key: str | None = None,
        limit: int = 1000,
    ) -> Sequence[Any]:
        """See `Rows.find`."""
        layout = layout_of(table)
        query = layout.query(where, at_most, order_by, after_key, limit)
        if self._fingerprints.get(table.name) != layout.fingerprint:
            return []
        sql, parameters = self._dialect.find(layout, query)
        found = await self._session.fetch(sql, parameters, self._sent_before(table))
        return [layout.decode(data) for (data,) in found]

    def _sent_before(self, table: Table) -> Sequence[Statement]:  # noqa: ARG002  (a write has something to send)
        """What the database must be told before it can answer for this table."""
        return ()


class SqlWrite(SqlRows):
    """An open write. Changes are kept here and sent together: at a `find`, which must see them, and at the commit."""

    def __init__(
        self, session: Session, dialect: Dialect, fingerprints: dict[str, str], follower: str, position: int
    ) -> None:
        super().__init__(session, dialect, fingerprints)
        self._follower = follower
        self.position = position
        self._moved_to = position
        self._changes: dict[Table, dict[str, tuple[Cell, ...] | None]] = {}

    async def get(self, table: Table, key: str) -> Any | None:
        """See `Rows.get`."""
        changed = self._changes.get(table)
        if changed is not None and key in changed:
            row = changed[key]
            return None if row is None else layout_of(table).decode(str(row[1]))
        return await super().get(table, key)

    async def put(self, table: Table, row: msgspec.Struct) -> None:
        """See `WritableRows.put`."""
        layout = layout_of(table)
        key, data, cells = layout.encode(row)
        await self._ready(layout)
        self._changes.setdefault(table, {})[key] = (key, data.decode(), *cells)

    async def delete(self, table: Table, key: str) -> None:
        """See `WritableRows.delete`."""
        await self._ready(layout_of(table))
        self._changes.setdefault(table, {})[key] = None

    def move_to(self, position: int) -> None:
        """See `ViewWrite.move_to`."""
        self._moved_to = forward(self._follower, self._moved_to, position)

    def rest(self) -> list[Statement]:
        """What is to be sent with the commit."""
        statements = self._sent(self._changes)
        if self._moved_to != self.position:
            statements.append(self._dialect.move(self._follower, self._moved_to))
        return statements

    def _sent_before(self, table: Table) -> Sequence[Statement]:
        return self._sent({table: self._changes.pop(table)}) if table in self._changes else ()

    def _sent(self, changes: Mapping[Table, Mapping[str, tuple[Cell, ...] | None]]) -> list[Statement]:
        statements: list[Statement] = []
        for table, rows in changes.items():
            layout = layout_of(table)
            put = [row for row in rows.values() if row is not None]
            gone = [(key,) for key, row in rows.items() if row is None]
            if put:
                statements.append((self._dialect.upsert(layout), put))
            if gone:
                statements.append((self._dialect.delete(layout), gone))
        return statements

    async def _ready(self, layout: Layout) -> None:
        known = self._fingerprints.get(layout.table.name)
        if known == layout.fingerprint:
            return
        if known is not None:
            raise InvariantViolation(f"table {layout.table.name} has another shape: prepare its follower first")
        await self._session.run(self._dialect.create(layout, self._follower))
        self._fingerprints[layout.table.name] = layout.fingerprint


def _quoted(layout: Layout) -> str:
    return f'"row_{layout.table.name}"'


def _column(layout: Layout, field: str) -> str:
    return '"row_key"' if field == layout.table.key else f'"ix_{field}"'


async def prepare(session: Session, dialect: Dialect, follower: str, tables: Sequence[Table]) -> int:
    """See `ViewStore.prepare`; inside one transaction that no other writer shares."""
    owners = {name: (owner, mark) for name, owner, mark in await session.fetch("SELECT * FROM view_tables", ())}
    for table in tables:
        owner, _ = owners.get(table.name, (follower, ""))
        if owner != follower:
            raise InvariantViolation(f"table {table.name} belongs to {owner}, not to {follower}")
    mark = dialect.marks(1)[0]
    sql = f"SELECT position, shape FROM view_followers WHERE name = {mark}"  # noqa: S608  (a placeholder)
    found = await session.fetch(sql, (follower,))
    position, shape = found[0] if found else (0, "")
    if shape != shape_of(tables):
        mine = [name for name, (owner, _) in owners.items() if owner == follower]
        made = [statement for table in tables for statement in dialect.create(layout_of(table), follower)]
        position = 0
        await session.run([*dialect.forget(follower, mine), *made, dialect.move(follower, 0, shape_of(tables))])
    return int(position)

"""Views in memory, for the simulation and for scratch folds: the same promises, without a disk."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import msgspec

from torpor_contracts.errors import InvariantViolation
from torpor_eventlog.view_tables import Cell, Layout, Query, layout_of, shape_of
from torpor_eventlog.views_port import Rows, Table, ViewWrite


class _Stored(NamedTuple):
    data: bytes
    cells: tuple[Cell, ...]


_Overlay = dict[str, dict[str, _Stored | None]]
"""Table -> key -> what stands there instead of the live row (None: no row)."""

_NO_ROWS: Final[dict[str, _Stored]] = {}


class MemoryViewStore:
    """A view store that lives as long as the process; rows are kept as JSON, as on a disk."""

    def __init__(self) -> None:
        self._live: dict[str, dict[str, _Stored]] = {}
        self._owners: dict[str, tuple[str, str]] = {}
        self._positions: dict[str, int] = {}
        self._shapes: dict[str, str] = {}
        self._writer = asyncio.Lock()
        self._readers: list[_Overlay] = []

    async def prepare(self, follower: str, tables: Sequence[Table]) -> int:
        """See `ViewStore.prepare`."""
        async with self._writer:
            shape = shape_of(tables)
            for table in tables:
                owner, _ = self._owners.get(table.name, (follower, ""))
                if owner != follower:
                    raise InvariantViolation(f"table {table.name} belongs to {owner}, not to {follower}")
            if self._shapes.get(follower) != shape:
                self._forget(follower, [name for name, (owner, _) in self._owners.items() if owner == follower])
            self._shapes[follower] = shape
            for table in tables:
                self._owners[table.name] = (follower, layout_of(table).fingerprint)
            return self._positions.get(follower, 0)

    @asynccontextmanager
    async def writing(self, follower: str) -> AsyncIterator[ViewWrite]:
        """See `ViewStore.writing`."""
        async with self._writer:
            write = _MemoryWrite(self, follower, self._positions.get(follower, 0))
            yield write
            self._commit(follower, write)

    async def position(self, follower: str) -> int:
        """See `ViewStore.position`."""
        return self._positions.get(follower, 0)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Rows]:
        """See `ViewStore.reading`: what is committed meanwhile is kept out by remembering what it replaced."""
        replaced: _Overlay = {}
        self._readers.append(replaced)
        try:
            yield _MemoryRows(self, replaced)
        finally:
            self._readers = [reader for reader in self._readers if reader is not replaced]

    async def drop(self, follower: str, tables: Sequence[Table]) -> None:
        """See `ViewStore.drop`."""
        async with self._writer:
            self._forget(follower, [table.name for table in tables])

    async def close(self) -> None:
        """Nothing to let go of; the rows stay, so that a simulated restart finds them."""

    def live(self, layout: Layout, *, claim_for: str | None = None) -> dict[str, _Stored]:
        """The committed rows of a table; with `claim_for`, the table comes to be that follower's if it is nobody's."""
        name = layout.table.name
        _, fingerprint = self._owners.get(name, ("", None))
        if fingerprint is None and claim_for is not None:
            self._owners[name] = (claim_for, layout.fingerprint)
        elif fingerprint != layout.fingerprint:
            if claim_for is not None:
                raise InvariantViolation(f"table {name} has another shape: prepare its follower first")
            return _NO_ROWS
        return self._live.setdefault(name, {})

    def _commit(self, follower: str, write: "_MemoryWrite") -> None:
        for name, changes in write.overlay.items():
            live = self._live.setdefault(name, {})
            for key, stored in changes.items():
                self._remember(name, key, live.get(key))
                if stored is None:
                    live.pop(key, None)
                else:
                    live[key] = stored
        self._positions[follower] = write.moved_to

    def _forget(self, follower: str, names: Sequence[str]) -> None:
        for name in names:
            for key, stored in self._live.pop(name, {}).items():
                self._remember(name, key, stored)
            self._owners.pop(name, None)
        self._positions.pop(follower, None)
        self._shapes.pop(follower, None)

    def _remember(self, name: str, key: str, stored: _Stored | None) -> None:
        for reader in self._readers:
            reader.setdefault(name, {}).setdefault(key, stored)


class _MemoryRows:
    """Committed rows, seen through an overlay: of changes not yet committed, or of what later commits replaced."""

    def __init__(self, store: MemoryViewStore, overlay: _Overlay) -> None:
        self._store = store
        self.overlay = overlay

    def _rows(self, layout: Layout) -> dict[str, _Stored]:
        return self._store.live(layout)

    async def get(self, table: Table, key: str) -> Any | None:
        """See `Rows.get`."""
        layout = layout_of(table)
        live = self._rows(layout)
        over = self.overlay.get(table.name, {})
        stored = over[key] if key in over else live.get(key)
        return None if stored is None else layout.decode(stored.data)

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
        live, over = self._rows(layout), self.overlay.get(table.name, {})
        merged = ((key, over.get(key, stored)) for key, stored in live.items())
        added = ((key, stored) for key, stored in over.items() if key not in live)
        found = sorted(
            (*_matching(layout, query, merged), *_matching(layout, query, added)), key=lambda match: match[0]
        )
        return [layout.decode(data) for _, data in found[: query.limit]]


class _MemoryWrite(_MemoryRows):
    """An open transaction."""

    def __init__(self, store: MemoryViewStore, follower: str, position: int) -> None:
        super().__init__(store, {})
        self._follower = follower
        self.position = position
        self.moved_to = position

    def _rows(self, layout: Layout) -> dict[str, _Stored]:
        return self._store.live(layout, claim_for=self._follower)

    async def put(self, table: Table, row: msgspec.Struct) -> None:
        """See `WritableRows.put`."""
        layout = layout_of(table)
        self._rows(layout)
        key, data, cells = layout.encode(row)
        self.overlay.setdefault(table.name, {})[key] = _Stored(data, cells)

    async def delete(self, table: Table, key: str) -> None:
        """See `WritableRows.delete`."""
        self._rows(layout_of(table))
        self.overlay.setdefault(table.name, {})[key] = None

    def move_to(self, position: int) -> None:
        """See `ViewWrite.move_to`."""
        self.moved_to = forward(self._follower, self.moved_to, position)


def forward(follower: str, moved_to: int, position: int) -> int:
    """The new position of a follower; it never goes back but by `drop`."""
    if position < moved_to:
        raise InvariantViolation(f"follower {follower} is at position {moved_to} and cannot move back to {position}")
    return position


def _matching(layout: Layout, query: Query, rows: Iterator[tuple[str, _Stored | None]]) -> Iterator[tuple[Any, bytes]]:
    columns = {field: index for index, field in enumerate((*layout.table.indexed, layout.table.key))}
    where = [(columns[field], wanted) for field, wanted in query.where]
    for key, stored in rows:
        if stored is None or (query.after_key is not None and key <= query.after_key):
            continue
        cells = (*stored.cells, key)
        if any(cells[column] != wanted for column, wanted in where):
            continue
        if query.at_most is not None:
            bounded = cells[columns[query.at_most[0]]]
            if not isinstance(bounded, int) or bounded > query.at_most[1]:
                continue
        by = cells[columns[query.order_by]] if query.order_by else None
        yield (by is not None, by, key), stored.data

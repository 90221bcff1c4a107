"""Views: rows derived from the log, committed together with the position they are derived from.

A view holds nothing that refolding the log would not give again.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

import msgspec

from torpor_eventlog.port import Recorded

Row = TypeVar("Row", bound=msgspec.Struct)


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table of a view: rows of type `row`, keyed by the field `key`, and fields that can be filtered and sorted by.

    Indexed fields hold text, integers or None; times are indexed as integers of microseconds (`…_us`).
    """

    name: str
    row: type[msgspec.Struct]
    key: str
    indexed: tuple[str, ...] = ()


class Rows(Protocol):
    """The rows of a view store, inside one transaction or one consistent read."""

    async def get(self, table: Table, key: str) -> Any | None:
        """The row under `key`, of type `table.row`, or None."""
        ...

    async def find(
        self,
        table: Table,
        where: Mapping[str, str | int | None] | None = None,
        *,
        at_most: tuple[str, int] | None = None,
        order_by: str | None = None,
        after_key: str | None = None,
        limit: int = 1000,
    ) -> Sequence[Any]:
        """Rows whose indexed fields equal `where`, and whose field `at_most[0]` is <= `at_most[1]` (None never is).

        Ordered by `order_by` (an indexed field; None first, text by code point) and then by key; `after_key` pages
        through key order, so not together with `order_by`. A table nobody has folded yet has no rows.
        """
        ...


class WritableRows(Rows, Protocol):
    """Rows that a projection may change."""

    async def put(self, table: Table, row: msgspec.Struct) -> None:
        """Insert or replace the row under its key."""
        ...

    async def delete(self, table: Table, key: str) -> None:
        """Remove the row under `key`, if there is one."""
        ...


class Projection(Protocol):
    """Folds events into rows; never rejects a fact, never reads anything but the event and its own rows."""

    @property
    def name(self) -> str:
        """The name of its follower in the view store; unique within a service."""
        ...

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables it puts rows into; no other projection does."""
        ...

    async def fold(self, rows: WritableRows, event: Any, recorded: Recorded) -> None:
        """Apply one decoded event (an instance of a type in `torpor_contracts.registry.EVENTS`)."""
        ...


class ViewStore(Protocol):
    """Where one service keeps its views and the cursors of its followers (an SQLite file, a schema, or memory)."""

    async def prepare(self, follower: str, tables: Sequence[Table]) -> int:
        """Make the follower's tables ready and answer its position.

        Where the shape of its tables is not the one it was folded with, its rows and position are dropped first:
        the answer is 0 and the view is folded from the start. A table belongs to one follower.
        """
        ...

    def writing(self, follower: str) -> AbstractAsyncContextManager["ViewWrite"]:
        """A transaction in which rows and the follower's position change together, or not at all.

        Writers wait for each other, across processes too. Raises `Transient` when the database is locked, full or away.
        """
        ...

    async def position(self, follower: str) -> int:
        """The last position the follower has committed; 0 when it never has."""
        ...

    def reading(self) -> AbstractAsyncContextManager[Rows]:
        """A consistent read of all rows."""
        ...

    async def drop(self, follower: str, tables: Sequence[Table]) -> None:
        """Forget the follower's position and all rows of these tables."""
        ...

    async def close(self) -> None:
        """Let go of the database."""
        ...


class ViewWrite(WritableRows, Protocol):
    """An open view transaction; committed on a clean exit of `ViewStore.writing`, else rolled back."""

    @property
    def position(self) -> int:
        """What the follower had committed when the transaction began: rows up to here are folded already."""
        ...

    def move_to(self, position: int) -> None:
        """Record that the follower has folded everything up to `position`."""
        ...


class Feed(Protocol):
    """A live source of the log's rows in order and without gaps."""

    def follow(self, after_position: int) -> AsyncGenerator[list[Recorded], None]:
        """Batches of rows above `after_position`, for ever; waits when there is none. Close it (`aclosing`)."""
        ...

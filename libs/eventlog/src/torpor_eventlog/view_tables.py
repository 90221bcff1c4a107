"""The layout of a view's table: which columns it has, how a row becomes one, and the fingerprint of its shape."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeGuard

import msgspec
from msgspec import inspect

from torpor_contracts.errors import InvariantViolation, Poison
from torpor_eventlog.views_port import Table

Cell = str | int | None
"""What an indexed column holds."""

_INT_END: Final = 1 << 63
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,47}")


@dataclass(frozen=True)
class Query:
    """A checked `find`: equalities in field order, an upper bound, an order and a page."""

    where: tuple[tuple[str, Cell], ...]
    at_most: tuple[str, int] | None
    order_by: str | None
    after_key: str | None
    limit: int


class Layout:
    """A table, compiled: columns, encoding and fingerprint. Made by `layout_of`, which checks the table first."""

    def __init__(self, table: Table, integers: frozenset[str]) -> None:
        self.table = table
        self.integers = integers
        """The indexed fields that hold integers; the others hold text."""
        self.fingerprint = _fingerprint(table)
        self._decoder = msgspec.json.Decoder(table.row)

    def encode(self, row: msgspec.Struct) -> tuple[str, bytes, tuple[Cell, ...]]:
        """The row's key, its JSON and its indexed cells; raises `Poison` for a row that no database could hold."""
        if type(row) is not self.table.row:
            raise InvariantViolation(
                f"table {self.table.name} holds {self.table.row.__name__}, not {type(row).__name__}"
            )
        key = getattr(row, self.table.key)
        cells = tuple(getattr(row, field) for field in self.table.indexed)
        for cell in (key, *cells):
            if isinstance(cell, str) and "\x00" in cell:
                raise Poison(f"table {self.table.name} cannot be keyed by or indexed on {cell!r}: it holds a NUL")
            if isinstance(cell, int) and not -_INT_END <= cell < _INT_END:
                raise Poison(f"table {self.table.name} cannot be indexed on {cell}: it needs more than 64 bits")
        return key, msgspec.json.encode(row), cells

    def decode(self, data: bytes | str) -> Any:
        """The row behind its JSON."""
        return self._decoder.decode(data)

    def query(
        self,
        where: Mapping[str, Cell] | None,
        at_most: tuple[str, int] | None,
        order_by: str | None,
        after_key: str | None,
        limit: int,
    ) -> Query:
        """Check a `find`: it may only name the key and indexed fields, and pages only through key order."""
        known = {self.table.key, *self.table.indexed}
        asked = {*(where or {}), *((at_most[0],) if at_most else ()), *((order_by,) if order_by else ())}
        if asked - known:
            raise InvariantViolation(f"table {self.table.name} has no index on {', '.join(sorted(asked - known))}")
        if order_by == self.table.key:
            order_by = None
        if after_key is not None and order_by is not None:
            raise InvariantViolation(f"table {self.table.name}: after_key pages through key order, not by {order_by}")
        for field, value in [*(where or {}).items(), *((at_most,) if at_most else ())]:
            if value is not None and type(value) is not (int if field in self.integers else str):
                raise InvariantViolation(f"table {self.table.name}: {field} is never {value!r}")
        if limit < 1:
            raise InvariantViolation(f"table {self.table.name}: limit {limit} is not positive")
        return Query(tuple((where or {}).items()), at_most, order_by, after_key, limit)


@lru_cache(maxsize=512)
def layout_of(table: Table) -> Layout:
    """The table's layout; raises `InvariantViolation` for a table that cannot be stored as declared."""
    if not _NAME.fullmatch(table.name):
        raise InvariantViolation(f"table name {table.name!r} is not {_NAME.pattern}")
    fields = {field.name: field.type for field in _struct_fields(table)}
    missing = [name for name in (table.key, *table.indexed) if name not in fields]
    if missing:
        raise InvariantViolation(f"table {table.name}: {table.row.__name__} has no field {', '.join(missing)}")
    if _kind(fields[table.key]) is not str or _optional(fields[table.key]):
        raise InvariantViolation(f"table {table.name}: the key {table.key} must be text")
    kinds = {name: _kind(fields[name]) for name in table.indexed}
    unfit = [name for name, kind in kinds.items() if kind is None]
    if unfit:
        raise InvariantViolation(f"table {table.name}: {', '.join(unfit)} must hold text, integers or None, all of one")
    return Layout(table, frozenset(name for name, kind in kinds.items() if kind is int))


def shape_of(tables: Sequence[Table]) -> str:
    """The fingerprint of all tables of one follower: another shape is another view, folded from the start."""
    joined = "\n".join(sorted(layout_of(table).fingerprint for table in tables))
    return hashlib.sha256(joined.encode()).hexdigest()


def _struct_fields(table: Table) -> Sequence[inspect.Field]:
    info = inspect.type_info(table.row)
    if not isinstance(info, inspect.StructType):
        raise InvariantViolation(f"table {table.name}: {table.row!r} is no msgspec Struct")
    return info.fields


def _members(kind: inspect.Type) -> Sequence[inspect.Type]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _optional(kind: inspect.Type) -> bool:
    return any(isinstance(member, inspect.NoneType) for member in _members(kind))


def _kind(kind: inspect.Type) -> type | None:
    found: set[type | None] = set()
    for member in _members(kind):
        if isinstance(member, inspect.StrType):
            found.add(str)
        elif isinstance(member, inspect.IntType):
            found.add(int)
        elif isinstance(member, inspect.LiteralType):
            found.update(type(value) for value in member.values)
        elif not isinstance(member, inspect.NoneType):
            found.add(None)
    return found.pop() if found in ({str}, {int}) else None


def _fingerprint(table: Table) -> str:
    schema = _without_prose(msgspec.json.schema(table.row))
    shape = {"name": table.name, "key": table.key, "indexed": table.indexed, "row": schema}
    return hashlib.sha256(msgspec.json.encode(shape, order="sorted")).hexdigest()


def _without_prose(schema: Any) -> Any:
    # A docstring is not a shape: editing one must not refold a view.
    if isinstance(schema, dict):
        return {key: _without_prose(value) for key, value in schema.items() if not _is_prose(key, value)}
    if isinstance(schema, list):
        return [_without_prose(item) for item in schema]
    return schema


def _is_prose(key: str, value: object) -> TypeGuard[str]:
    return key == "description" and isinstance(value, str)

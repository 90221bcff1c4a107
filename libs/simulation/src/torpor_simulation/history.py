"""The log of a finished world, decoded once for all checkers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torpor_eventlog.codec import decode_event
from torpor_eventlog.port import EventLog, Recorded

E = TypeVar("E")


@dataclass(frozen=True)
class Violation:
    """A law that did not hold: which checker found it, and what exactly it saw."""

    checker: str
    detail: str

    def __str__(self) -> str:
        return f"{self.checker}: {self.detail}"


@dataclass(frozen=True)
class Entry:
    """A row and its event."""

    row: Recorded
    event: Any


class History:
    """All entries, by stream and by type."""

    def __init__(self, rows: Sequence[Recorded]) -> None:
        self.entries = [Entry(row, decode_event(row)) for row in rows]
        self.streams: dict[str, list[Entry]] = {}
        self._by_type: dict[type, list[Entry]] = {}
        for entry in self.entries:
            self.streams.setdefault(entry.row.stream, []).append(entry)
            self._by_type.setdefault(type(entry.event), []).append(entry)

    def of(self, *kinds: type[E]) -> Iterator[tuple[Recorded, E]]:
        """Entries of these types, each type's in the order of the log."""
        for kind in kinds:
            for entry in self._by_type.get(kind, ()):
                yield entry.row, entry.event


async def read_all(log: EventLog) -> list[Recorded]:
    """Every row of the log."""
    rows: list[Recorded] = []
    while page := await log.read(len(rows), 10_000):
        rows.extend(page)
    return rows

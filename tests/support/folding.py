"""A made-up log of any length and a projection of it; run as a program, it folds into a store until it is killed.

`python -m tests.support.folding <sqlite path or postgresql URL> <rows>` prints the position after each transaction.
"""

import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from torpor_contracts.host import HostDraining
from torpor_contracts.ids import HostId
from torpor_eventlog.feeds import LogFeed
from torpor_eventlog.followers import ProjectionFollower
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Recorded
from torpor_eventlog.views_memory import MemoryViewStore
from torpor_eventlog.views_port import Rows, Table, ViewStore, WritableRows

NOON: Final = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """What would differ if any row were folded twice, not at all, or out of order."""

    host: str
    events: int
    positions_sum: int
    last: str | None
    note: str = "é€\u0000"


class Rare(msgspec.Struct, frozen=True, kw_only=True):
    """A row that comes and goes."""

    name: str
    due: int | None


TALLIES: Final = Table(name="tallies", row=Tally, key="host", indexed=("events", "last"))
RARE: Final = Table(name="rare", row=Rare, key="name", indexed=("due",))


class Tallies:
    """Reads what it wrote, searches, deletes: everything a projection does."""

    name = "tallies"
    tables: tuple[Table, ...] = (TALLIES, RARE)

    async def fold(self, rows: WritableRows, event: Any, recorded: Recorded) -> None:
        """Count the event."""
        before = await rows.get(TALLIES, event.host_id)
        events, total = (before.events, before.positions_sum) if before else (0, 0)
        tally = Tally(
            host=event.host_id, events=events + 1, positions_sum=total + recorded.position, last=event.reason or None
        )
        await rows.put(TALLIES, tally)
        if recorded.position % 5 == 0:
            await rows.put(RARE, Rare(name=f"rare-{recorded.position}", due=recorded.position + 13))
        if recorded.position % 4 == 0:
            for rare in await rows.find(RARE, at_most=("due", recorded.position), order_by="due"):
                await rows.delete(RARE, rare.name)


def made_up(first: int, count: int) -> list[Recorded]:
    """The rows from `first` on, the same each time."""
    return [_row(position) for position in range(first, first + count)]


def _row(position: int) -> Recorded:
    host = f"host-{position * 7919 % 11}"
    event = HostDraining(host_id=HostId(host), reason=f"r{position % 3}" if position % 3 else "", requested_at=NOON)
    return Recorded(
        position=position,
        stream=host,
        version=position,
        tag="host-draining.v1",
        data=msgspec.json.encode(event),
        occurred_at_us=position,
        command_id=f"c-{position}",
        causation_id="x",
        correlation_id="x",
        tenant_id="system",
        digest=bytes(32),
    )


async def contents(rows: Rows) -> list[Any]:
    """Everything the projection has folded."""
    return [*await rows.find(TALLIES), *await rows.find(RARE, limit=100_000)]


async def cleanly_folded(count: int) -> list[Any]:
    """What the store must hold after `count` rows."""
    store = MemoryViewStore()
    follower = ProjectionFollower(Tallies(), store, LogFeed(MemoryLog()), dead=_refuse)
    await follower.fold(made_up(1, count))
    async with store.reading() as rows:
        return await contents(rows)


async def _refuse(consumer: str, recorded: Recorded, error: Exception) -> None:
    raise AssertionError(f"{consumer} could not fold position {recorded.position}") from error


def store_at(place: str) -> ViewStore:
    """The store in an SQLite file, or in a PostgreSQL database."""
    if place.startswith("postgresql:"):
        from torpor_eventlog.views_postgres import PostgresViewStore  # noqa: PLC0415

        return PostgresViewStore(place, "folding")
    from torpor_eventlog.views_sqlite import SqliteViewStore  # noqa: PLC0415

    return SqliteViewStore(Path(place))


async def _fold_until_killed(arguments: Sequence[str]) -> None:
    place, count = arguments[0], int(arguments[1])
    store, projection = store_at(place), Tallies()
    follower = ProjectionFollower(projection, store, LogFeed(MemoryLog()), dead=_refuse, batch_max=17)
    position = await store.prepare(projection.name, projection.tables)
    while position < count:
        await follower.fold(made_up(position + 1, min(17, count - position)))
        position = follower.position
        sys.stdout.write(f"{position}\n")
        sys.stdout.flush()
    await store.close()


if __name__ == "__main__":
    asyncio.run(_fold_until_killed(sys.argv[1:]))

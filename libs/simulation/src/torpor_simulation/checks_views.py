"""The law of views: refolding the log gives every live row again, and no other."""

from collections.abc import Sequence
from typing import Any

from torpor_eventlog.feeds import LogFeed
from torpor_eventlog.followers import ProjectionFollower
from torpor_eventlog.port import EventLog, Recorded
from torpor_eventlog.views_memory import MemoryViewStore
from torpor_eventlog.views_port import Projection, Table, ViewStore
from torpor_simulation.history import Violation

PAGE = 1000


async def views_refold(
    log: EventLog, rows: Sequence[Recorded], kind: str, live: ViewStore, projections: Sequence[Projection]
) -> list[Violation]:
    """Refold each projection into a fresh store and compare row by row."""
    found: list[Violation] = []

    async def never(_follower: str, recorded: Recorded, error: Exception) -> None:
        found.append(Violation("views", f"{kind} cannot fold {recorded.tag} at {recorded.position}: {error}"))

    for projection in projections:
        fresh = MemoryViewStore()
        follower = ProjectionFollower(projection, fresh, LogFeed(log), dead=never)
        await follower.fold(rows)
        for table in projection.tables:
            now, again = await rows_of(live, table), await rows_of(fresh, table)
            for key in sorted(now.keys() | again.keys()):
                if now.get(key) != again.get(key):
                    detail = f"{kind} has {now.get(key)!r}, the log gives {again.get(key)!r}"
                    found.append(Violation("views", f"{table.name}/{key}: {detail}"))
    return found


async def rows_of(store: ViewStore, table: Table) -> dict[str, Any]:
    """Every row of a table, by key."""
    found: dict[str, Any] = {}
    async with store.reading() as rows:
        after: str | None = None
        while page := await rows.find(table, after_key=after, limit=PAGE):
            for row in page:
                after = getattr(row, table.key)
                found[str(after)] = row
    return found

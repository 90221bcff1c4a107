"""Refolds views from the log, compares them row by row with the live ones, and puts right what differs."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from torpor_contracts.errors import InvariantViolation
from torpor_eventlog.audit.findings import FINDINGS_MAX, READ_MAX, OnProgress, silent
from torpor_eventlog.codec import PUBLISHED, EventCodec
from torpor_eventlog.feeds import LogFeed
from torpor_eventlog.followers import ProjectionFollower
from torpor_eventlog.port import EventLog, Recorded
from torpor_eventlog.views_port import Projection, Rows, Table, ViewStore, ViewWrite

_PAGE: Final = 500


class RowDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A row that the live view had otherwise than the log says; None: it had no such row, or must not have it."""

    table: str
    key: str
    live: Any
    refolded: Any


class Unfoldable(msgspec.Struct, frozen=True, kw_only=True):
    """An event that the projection could not fold: its consequences are in no view."""

    position: int
    tag: str
    error: str


class ViewRebuilt(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one view. `differences` and `unfoldable` hold the first of so many in all."""

    projection: str
    compared_at: int
    """The position up to which both were folded when they were compared; 0: there was no live view to compare."""
    position: int
    """The position the live view has now."""
    ahead_by: int
    """By how much the live view was ahead of the log: it came from a log that is no more, and was dropped."""
    rows: int
    differences: list[RowDifference]
    differences_total: int
    unfoldable: list[Unfoldable]
    unfoldable_total: int

    @property
    def ok(self) -> bool:
        """Whether the live view was right, as far as there was one, and every event could be folded."""
        return not (self.differences_total or self.unfoldable_total or self.ahead_by)


async def rebuild_view(
    log: EventLog,
    projection: Projection,
    live: ViewStore,
    scratch: ViewStore,
    *,
    on_progress: OnProgress = silent,
    codec: EventCodec = PUBLISHED,
) -> ViewRebuilt:
    """Fold the log into `scratch` from the start, compare with `live` at the same position, and mend `live`.

    The service may be running: its follower waits while rows are compared and mended, all in one transaction.
    """
    rebuild = _Rebuild(log, projection, scratch, on_progress, codec)
    standing = await live.prepare(projection.name, projection.tables)
    ahead_by = max(0, standing - (await log.head()).position)
    if ahead_by:
        await live.drop(projection.name, projection.tables)
        standing = await live.prepare(projection.name, projection.tables)
    await scratch.drop(projection.name, projection.tables)
    await scratch.prepare(projection.name, projection.tables)
    await rebuild.fold_scratch_to(standing)
    compared_at = 0
    if standing:
        async with live.writing(projection.name) as write:
            compared_at = write.position
            await rebuild.fold_scratch_to(compared_at)
            async with scratch.reading() as refolded:
                for table in projection.tables:
                    await rebuild.mend(table, write, refolded)
    position = await rebuild.catch_up(live)
    return rebuild.report(compared_at, position, ahead_by)


class _Rebuild:
    """The rebuild of one view."""

    def __init__(
        self, log: EventLog, projection: Projection, scratch: ViewStore, on_progress: OnProgress, codec: EventCodec
    ) -> None:
        self._log = log
        self._projection = projection
        self._on_progress = on_progress
        self._codec = codec
        self._scratch = self._follower(scratch)
        self._rows = 0
        self._differences: list[RowDifference] = []
        self._differences_total = 0
        self._unfoldable: dict[int, Unfoldable] = {}
        self._unfoldable_total = 0

    async def fold_scratch_to(self, position: int) -> None:
        """Bring the scratch view to exactly this position."""
        await self._fold(self._scratch, self._scratch.position, position)

    async def mend(self, table: Table, live: ViewWrite, refolded: Rows) -> None:
        """Walk both tables in key order, note every difference, and leave the live one as the refolded one is."""
        right, wrong = _Walk(refolded, table), _Walk(live, table)
        await right.step()
        await wrong.step()
        while right.row is not None or wrong.row is not None:
            key = min(walk.key for walk in (right, wrong) if walk.row is not None)
            should = right.row if right.key == key else None
            stands = wrong.row if wrong.key == key else None
            if should != stands:
                self._note(table, key, stands, should)
                if should is None:
                    await live.delete(table, key)
                else:
                    await live.put(table, should)
            if should is not None:
                self._rows += 1
                await right.step()
            if stands is not None:
                await wrong.step()

    async def catch_up(self, store: ViewStore) -> int:
        """Fold what the log has beyond the live view; the answer is where that stands then."""
        end = (await self._log.head()).position
        follower = self._follower(store)
        await self._fold(follower, await store.position(follower.name), end)
        return await store.position(follower.name)

    def report(self, compared_at: int, position: int, ahead_by: int) -> ViewRebuilt:
        """What was found."""
        return ViewRebuilt(
            projection=self._projection.name,
            compared_at=compared_at,
            position=position,
            ahead_by=ahead_by,
            rows=self._rows,
            differences=self._differences,
            differences_total=self._differences_total,
            unfoldable=list(self._unfoldable.values()),
            unfoldable_total=self._unfoldable_total,
        )

    def _follower(self, store: ViewStore) -> ProjectionFollower:
        return ProjectionFollower(
            self._projection, store, LogFeed(self._log), dead=self._note_unfoldable, codec=self._codec
        )

    async def _fold(self, follower: ProjectionFollower, position: int, goal: int) -> None:
        while position < goal:
            rows = await self._log.read(position, min(READ_MAX, goal - position))
            if not rows:
                raise InvariantViolation(f"the log ends at {position}, before {goal}, which it has had")
            await follower.fold(rows)
            position = rows[-1].position
            self._on_progress(f"view {follower.name}", position, goal)

    async def _note_unfoldable(self, consumer: str, recorded: Recorded, error: Exception) -> None:
        del consumer
        if recorded.position in self._unfoldable:
            return
        self._unfoldable_total += 1
        if len(self._unfoldable) < FINDINGS_MAX:
            said = f"{type(error).__name__}: {error}"
            self._unfoldable[recorded.position] = Unfoldable(position=recorded.position, tag=recorded.tag, error=said)

    def _note(self, table: Table, key: str, live: Any, refolded: Any) -> None:
        self._differences_total += 1
        if len(self._differences) < FINDINGS_MAX:
            self._differences.append(RowDifference(table=table.name, key=key, live=live, refolded=refolded))


class _Walk:
    """A table's rows one by one in key order; `row` is None after the last."""

    def __init__(self, rows: Rows, table: Table) -> None:
        self._rows = rows
        self._table = table
        self._page: Sequence[Any] = ()
        self._at = -1
        self.row: Any = None
        self.key = ""

    async def step(self) -> None:
        """Go to the next row."""
        self._at += 1
        if self._at >= len(self._page):
            after = self.key if self.row is not None else None
            self._page = await self._rows.find(self._table, after_key=after, limit=_PAGE)
            self._at = 0
        self.row = self._page[self._at] if self._page else None
        self.key = getattr(self.row, self._table.key) if self.row is not None else ""

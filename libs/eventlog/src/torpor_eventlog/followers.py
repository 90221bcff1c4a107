"""Runs projections and reactors over a feed: rows and position change together, reactions happen at least once.

A follower never stops at an event it cannot handle, and never passes one by silently: the event goes to `dead`.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from torpor_contracts.errors import Transient
from torpor_contracts.session import RetryRule
from torpor_eventlog.codec import PUBLISHED, EventCodec
from torpor_eventlog.feeds import READ_MAX
from torpor_eventlog.following import Backoff, Dead, Progress, bury, keep_following
from torpor_eventlog.port import Recorded
from torpor_eventlog.views_port import Feed, Projection, ViewStore

REACTION_RETRY: Final = RetryRule(attempts_max=100, backoff_s=0.1, backoff_s_max=15.0, deadline_s=900.0)
"""How a reaction is tried again while what it needs is away; at the end the event goes to `dead`."""


@dataclass(frozen=True)
class _Unfoldable:
    """The row at `index` of a batch could not be folded; nothing of the batch was kept."""

    index: int
    error: Exception


class ProjectionFollower:
    """Folds the feed into one projection's rows, exactly once: rows and position are committed together.

    Replicas may fold the same view: each transaction starts from the position that the store holds.
    """

    def __init__(
        self,
        projection: Projection,
        store: ViewStore,
        feed: Feed,
        *,
        dead: Dead,
        codec: EventCodec = PUBLISHED,
        batch_max: int = READ_MAX,
    ) -> None:
        self._projection = projection
        self._store = store
        self._feed = feed
        self._dead = dead
        self._codec = codec
        self._batch_max = batch_max
        self._progress = Progress(f"projection {projection.name}")

    @property
    def name(self) -> str:
        """The projection's name."""
        return self._projection.name

    @property
    def position(self) -> int:
        """Everything up to here is folded and committed."""
        return self._progress.position

    async def wait_for(self, position: int, timeout_s: float) -> None:
        """Return once everything up to `position` is folded; raises `Transient` after `timeout_s`."""
        await self._progress.wait_for(position, timeout_s)

    async def run(self) -> None:
        """Follow until cancelled."""
        await keep_following(f"projection {self.name}", self._feed, self._start, self.fold)

    async def fold(self, rows: Sequence[Recorded]) -> None:
        """Fold these rows; those the view has already are passed over."""
        rest, size = rows, self._batch_max
        while rest:
            failed = await self._fold_together(rest[:size])
            if failed is None:
                rest, size = rest[size:], self._batch_max
            elif failed.index:
                size = failed.index  # first the sound rows before it, in a transaction of their own
            else:
                await bury(self._dead, self.name, rest[0], failed.error)
                await self._pass_by(rest[0])
                rest, size = rest[1:], self._batch_max

    async def _start(self) -> int:
        position = await self._store.prepare(self.name, self._projection.tables)
        self._progress.move_to(position)
        return position

    async def _fold_together(self, rows: Sequence[Recorded]) -> _Unfoldable | None:
        failed: _Unfoldable | None = None
        position = self.position
        try:
            async with self._store.writing(self.name) as write:
                position = write.position
                for index, recorded in _unfolded(rows, position):
                    try:
                        await self._projection.fold(write, self._codec.decode(recorded), recorded)
                    except Transient:
                        raise
                    except Exception as error:
                        failed = _Unfoldable(index, error)
                        raise
                    position = recorded.position
                write.move_to(position)
        except Exception:
            if failed is None:
                raise
            return failed
        self._progress.move_to(position)
        return None

    async def _pass_by(self, recorded: Recorded) -> None:
        async with self._store.writing(self.name) as write:
            if write.position < recorded.position:
                write.move_to(recorded.position)
        self._progress.move_to(recorded.position)


def _unfolded(rows: Sequence[Recorded], position: int) -> Iterator[tuple[int, Recorded]]:
    """The rows after `position` with their indexes; a gap means that somebody dropped the view, or the feed lies."""
    for index, recorded in enumerate(rows):
        if recorded.position <= position:
            continue
        position += 1
        if recorded.position != position:
            raise Transient(f"the view is at {position - 1}, the feed at {recorded.position}")
        yield index, recorded


@dataclass(frozen=True)
class _Reaction:
    """One event to react to, or one that could not even be read."""

    recorded: Recorded
    event: Any
    unreadable: Exception | None = None


class ReactorFollower:
    """Reacts to events in order per stream, different streams in parallel, at least once.

    The position is a low-water mark: everything up to it is settled. It is saved in the view store now and then and
    at the end, so after a crash some reactions happen again. `name` is no projection's of the same store.
    """

    def __init__(
        self,
        name: str,
        reacts_to: Sequence[type[msgspec.Struct]],
        react: Callable[[Any, Recorded], Awaitable[None]],
        store: ViewStore,
        feed: Feed,
        *,
        dead: Dead,
        codec: EventCodec = PUBLISHED,
        retry: RetryRule = REACTION_RETRY,
        parallel_max: int = 64,
        pending_max: int = 2048,
        save_every_s: float = 0.5,
    ) -> None:
        self.name = name
        self._reacts_to = tuple(reacts_to)
        self._react = react
        self._store = store
        self._feed = feed
        self._dead = dead
        self._codec = codec
        self._retry = retry
        self._slots = asyncio.Semaphore(parallel_max)
        self._pending_max = pending_max
        self._save_every_s = save_every_s
        self._progress = Progress(f"reactor {name}")
        self._passed_over: set[str] = set()
        self._seen = 0
        self._pending: dict[int, None] = {}  # positions not settled, in ascending order
        self._queues: dict[str, deque[_Reaction]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def position(self) -> int:
        """Everything up to here is settled."""
        return self._progress.position

    async def wait_for(self, position: int, timeout_s: float) -> None:
        """Return once everything up to `position` is settled; raises `Transient` after `timeout_s`."""
        await self._progress.wait_for(position, timeout_s)

    async def run(self) -> None:
        """Follow until cancelled."""
        self._seen = await self._first_position()
        self._progress.move_to(self._seen)
        self._pending.clear()
        self._queues.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._save_regularly(self._seen))
                await keep_following(f"reactor {self.name}", self._feed, self._start, self._take)
        finally:
            self._tasks = None
            await self._save()

    async def _first_position(self) -> int:
        backoff = Backoff()
        while True:
            try:
                return await self._store.position(self.name)
            except Transient:
                await asyncio.sleep(backoff.failed())

    async def _start(self) -> int:
        return self._seen

    async def _take(self, rows: Sequence[Recorded]) -> None:
        for recorded in rows:
            if recorded.position <= self._seen:
                continue
            if recorded.position != self._seen + 1:
                raise Transient(f"the reactor is at {self._seen}, the feed at {recorded.position}")
            reaction = self._reaction(recorded)
            if reaction is not None:
                while len(self._pending) >= self._pending_max:
                    await self._progress.moved.wait(self._progress.moved.ticks)
                self._queue(reaction)
            self._seen = recorded.position
        self._move()

    def _reaction(self, recorded: Recorded) -> _Reaction | None:
        if recorded.tag in self._passed_over:
            return None
        try:
            event = self._codec.decode(recorded)
        except Exception as error:  # noqa: BLE001  (an upcast may fail in any way; the event is buried in its turn)
            return _Reaction(recorded, None, error)
        if isinstance(event, self._reacts_to):
            return _Reaction(recorded, event)
        self._passed_over.add(recorded.tag)
        return None

    def _queue(self, reaction: _Reaction) -> None:
        tasks = self._tasks
        assert tasks is not None, "rows are taken only inside run()"
        stream = reaction.recorded.stream
        self._pending[reaction.recorded.position] = None
        if stream in self._queues:
            self._queues[stream].append(reaction)
        else:
            self._queues[stream] = deque([reaction])
            tasks.create_task(self._work(stream))

    async def _work(self, stream: str) -> None:
        queue = self._queues[stream]
        while queue:
            await self._settle(queue[0])
            settled = queue.popleft()
            del self._pending[settled.recorded.position]
            self._move()
        del self._queues[stream]

    async def _settle(self, reaction: _Reaction) -> None:
        error = reaction.unreadable or await self._attempt(reaction)
        if error is not None:
            await bury(self._dead, self.name, reaction.recorded, error)

    async def _attempt(self, reaction: _Reaction) -> Exception | None:
        """React, again and again as the rule allows; the error it ended with, or None."""
        clock = asyncio.get_running_loop().time
        backoff = Backoff(self._retry.backoff_s, self._retry.backoff_s_max)
        give_up_at = clock() + self._retry.deadline_s
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self._slots:
                    await self._react(reaction.event, reaction.recorded)
            except Transient as error:
                pause_s = max(backoff.failed(), min(error.retry_after_s, self._retry.backoff_s_max))
                if attempt >= self._retry.attempts_max or clock() + pause_s > give_up_at:
                    return error
                await asyncio.sleep(pause_s)
            except Exception as error:  # noqa: BLE001  (a bug must not stop the reactor: an operator gets the event)
                return error
            else:
                return None

    def _move(self) -> None:
        self._progress.move_to(next(iter(self._pending), self._seen + 1) - 1)

    async def _save_regularly(self, saved: int) -> None:
        while True:
            while self.position == saved:
                await self._progress.moved.wait(self._progress.moved.ticks)
            saved = self.position
            await self._save()
            await asyncio.sleep(self._save_every_s)

    async def _save(self) -> None:
        try:
            async with self._store.writing(self.name) as write:
                if write.position < self.position:
                    write.move_to(self.position)
        except Transient:
            return  # saved with the next move; until then a crash only means reacting again

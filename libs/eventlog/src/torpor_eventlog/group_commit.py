"""Lets waiting appends share one transaction: one batch is written while the next one gathers; both are bounded."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from torpor_contracts.errors import InvariantViolation, TorporError, Transient
from torpor_contracts.replies import Receipt
from torpor_eventlog.planning import Plan, Prepared

BATCH_MAX: Final = 512
"""The most commits of one transaction."""

BATCH_BYTES_MAX: Final = 8 << 20
"""A batch is closed once its events hold so many bytes, so that the write lock is never held for long."""

WAITING_MAX: Final = 16_384
"""The most appends that wait; more are put off at once, for they would time out anyway."""

_Waiting = tuple[Prepared, asyncio.Future[Receipt]]


class GroupCommit:
    """Collects appends and hands them to `write` in batches, one batch at a time, in the order they came.

    `write` makes a batch durable and answers its plan; when it raises, nothing of the batch was appended, or a repeat
    of the same command finds it. `on_commit` is told the new last position after each batch that added something.
    """

    def __init__(
        self, write: Callable[[list[Prepared]], Awaitable[Plan]], on_commit: Callable[[int], None] | None
    ) -> None:
        self._write = write
        self._on_commit = on_commit
        self._waiting: deque[_Waiting] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._closed = False

    def append(self, prepared: Prepared) -> asyncio.Future[Receipt]:
        """Done when the commit is durable. A caller that stops waiting leaves it to happen or not."""
        if self._closed:
            raise Transient("the log is closed")
        if len(self._waiting) >= WAITING_MAX:
            raise Transient(f"{WAITING_MAX} appends wait already; the disk cannot keep up", retry_after_s=0.5)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Receipt] = loop.create_future()
        self._waiting.append((prepared, future))
        if self._writer is None:
            self._writer = loop.create_task(self._drain(), name="event log group commit")
        return future

    async def close(self) -> None:
        """Refuse new appends and finish those that wait."""
        self._closed = True
        if self._writer is not None:
            await asyncio.wait([self._writer])

    async def _drain(self) -> None:
        try:
            while self._waiting:
                await self._write_one_batch(self._next_batch())
                await asyncio.sleep(0)  # those just answered may append again: their commits join the next batch
        finally:
            self._writer = None
            while self._waiting:  # only when this task was cancelled: the loop is ending
                _fail(self._waiting.popleft()[1], Transient("the log was stopped before it could append"))

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size_bytes = 0
        while self._waiting and len(batch) < BATCH_MAX and size_bytes < BATCH_BYTES_MAX:
            prepared, future = self._waiting.popleft()
            if future.done():  # its caller has gone before anything was begun
                continue
            batch.append((prepared, future))
            size_bytes += prepared.size_bytes
        return batch

    async def _write_one_batch(self, batch: list[_Waiting]) -> None:
        if not batch:
            return
        try:
            planned = await self._write([prepared for prepared, _ in batch])
        except asyncio.CancelledError:
            _fail_all(batch, Transient("the log was stopped while it appended; ask again with the same command id"))
            raise
        except Exception as error:  # noqa: BLE001  (whatever it was, those who wait must hear of it)
            _fail_all(batch, error)
        else:
            for (_, future), outcome in zip(batch, planned.outcomes, strict=True):
                if isinstance(outcome, TorporError):
                    _fail(future, outcome)
                elif not future.done():
                    future.set_result(outcome)
            if planned.rows and self._on_commit is not None:
                asyncio.get_running_loop().call_soon(self._on_commit, planned.end.position)


def _fail_all(batch: list[_Waiting], cause: Exception) -> None:
    """Each gets an error of its own: one raised in several tasks would mix up their tracebacks."""
    for _, future in batch:
        error: TorporError
        if isinstance(cause, Transient):
            error = Transient(str(cause), cause.retry_after_s)
        elif isinstance(cause, InvariantViolation):
            error = InvariantViolation(str(cause))
        else:
            error = InvariantViolation(f"the log could not write a batch: {cause!r}")
        error.__cause__ = cause
        _fail(future, error)


def _fail(future: asyncio.Future[Receipt], error: TorporError) -> None:
    if not future.done():
        future.set_exception(error)

"""Handles deliveries of one target in order and different targets in parallel, within bounds, and keeps them alive.

What is not handled when it stops is handed back; nothing is dropped.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from torpor_contracts.errors import Transient
from torpor_messaging.ports import Clock, Delivery

KEEP_ALIVE_PER_WAIT: Final = 3
"""How often within an acknowledgement wait a held message is reported as in progress."""

_log: Final = logging.getLogger(__name__)


class OrderedDispatch:
    """Per-target queues in front of `process`, which must end every delivery and raise nothing.

    At most `parallel_max` are processed at once and `held_max` held in all: then `submit` waits, and with it whoever
    takes messages from the server. Use as a context manager; leaving it hands back what still waits.
    """

    def __init__(
        self,
        process: Callable[[Delivery], Awaitable[Any]],
        key: Callable[[Delivery], str],
        *,
        clock: Clock,
        ack_wait_s: float,
        parallel_max: int = 256,
        held_max: int | None = None,
    ) -> None:
        self._process = process
        self._key = key
        self._clock = clock
        self._keep_alive_s = ack_wait_s / KEEP_ALIVE_PER_WAIT
        self._running = asyncio.Semaphore(parallel_max)
        self._room = asyncio.Semaphore(held_max or 2 * parallel_max)
        self._queues: dict[str, deque[Delivery]] = {}
        self._held: dict[int, tuple[Delivery, float]] = {}
        self._something_held = asyncio.Event()
        self._nothing_held = asyncio.Event()
        self._nothing_held.set()
        self._stopping = False
        self._workers: set[asyncio.Task[None]] = set()
        self._tasks = asyncio.TaskGroup()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._keeper = self._tasks.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._hand_back()
        for task in (*self._workers, self._keeper):
            if task is not None:
                task.cancel()
        await self._tasks.__aexit__(kind, error, traceback)

    @property
    def held(self) -> int:
        """Deliveries that are queued or being processed."""
        return len(self._held)

    async def submit(self, delivery: Delivery) -> None:
        """Queue a delivery behind those of its target; waits for room. While stopping, it is handed back at once."""
        await self._room.acquire()
        if self._stopping:
            self._room.release()
            await self._give_back(delivery)
            return
        self._hold(delivery)
        key = self._key(delivery)
        queue = self._queues.get(key)
        if queue is not None:
            queue.append(delivery)
            return
        self._queues[key] = deque([delivery])
        worker = self._tasks.create_task(self._work(key))
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, hand back what has not begun, wait for what has; whether all of it ended in time."""
        await self._hand_back()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._nothing_held.wait()
        return not self._held

    async def _work(self, key: str) -> None:
        queue = self._queues[key]
        try:
            while queue:
                async with self._running:
                    delivery = queue[0]
                    try:
                        if self._stopping:
                            await self._give_back(delivery)
                        else:
                            await self._process(delivery)
                    except Transient as error:
                        # The server is away: it delivers again what it does not know to have ended.
                        _log.warning("the end of %s was not told: %s", delivery.subject, error)
                    finally:
                        queue.popleft()
                        self._let_go(delivery)
        finally:
            del self._queues[key]

    async def _hand_back(self) -> None:
        self._stopping = True
        for queue in list(self._queues.values()):
            # The first of each queue may be in its handler; its worker decides.
            while len(queue) > 1:
                waiting = queue.pop()
                self._let_go(waiting)
                await self._give_back(waiting)

    async def _give_back(self, delivery: Delivery) -> None:
        with suppress(Transient):
            await delivery.nak(0.0)

    def _hold(self, delivery: Delivery) -> None:
        self._held[id(delivery)] = (delivery, self._clock.monotonic_s())
        self._something_held.set()
        self._nothing_held.clear()

    def _let_go(self, delivery: Delivery) -> None:
        if self._held.pop(id(delivery), None) is None:
            return
        self._room.release()
        if not self._held:
            self._something_held.clear()
            self._nothing_held.set()

    async def _keep_alive(self) -> None:
        while True:
            await self._something_held.wait()
            await self._clock.sleep(self._keep_alive_s)
            old_enough = self._clock.monotonic_s() - self._keep_alive_s / 2
            for key, (delivery, since) in list(self._held.items()):
                if since > old_enough or key not in self._held:
                    continue
                try:
                    await delivery.in_progress()
                except Transient as error:
                    _log.warning("%s was not kept alive: %s", delivery.subject, error)

"""Watches of directories in guests: what happens is kept for whoever asks next, within a bound, and not for ever."""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Final

from torpor_contracts.errors import Rejected
from torpor_contracts.guest import WatchDirectory, WatchEvent
from torpor_contracts.ids import VmId
from torpor_messaging.ports import Clock
from torpor_vm_host.ports import Driver, DriverError
from torpor_vm_host.workers import Workers

WATCHES_MAX: Final = 256
EVENTS_MAX: Final = 1_000
"""Events kept for one watch; what comes beyond is lost, and that is said."""

UNASKED_S: Final = 60.0
"""How long a watch is kept that nobody asks."""

WAIT_S_MAX: Final = 30.0


class _Watch:
    """One watch: the events nobody has asked for yet, and the task that takes them."""

    def __init__(self, path: bytes) -> None:
        self.path = path
        self.events: deque[WatchEvent] = deque()
        self.lost = False
        self.happened = asyncio.Event()
        self.error: DriverError | None = None
        self.asked_s = 0.0
        self.task: asyncio.Task[None] | None = None

    def take(self, event: WatchEvent) -> None:
        """Something happened."""
        if len(self.events) < EVENTS_MAX:
            self.events.append(event)
        else:
            self.lost = True
        self.happened.set()

    def taken(self) -> list[WatchEvent]:
        """All that has happened since the last time."""
        events = list(self.events)
        if self.lost:
            events.append(WatchEvent(kind="overflow", name=b""))
        self.events.clear()
        self.lost = False
        self.happened.clear()
        return events


class Watches:
    """The watches of this host's machines."""

    def __init__(self, driver: Driver, workers: Workers, clock: Clock) -> None:
        self._driver = driver
        self._workers = workers
        self._clock = clock
        self._watches: dict[tuple[VmId, str], _Watch] = {}

    async def ask(self, vm_id: VmId, request: WatchDirectory) -> list[WatchEvent]:
        """What happened since the last question, after waiting for it; raises `DriverError` when it cannot be seen."""
        self._drop_unasked()
        key = vm_id, request.watch
        watch = self._watches.get(key)
        if watch is None:
            watch = self._begin(key, request)
        elif watch.path != request.path:
            raise Rejected("watch-exists", "the watch has another directory", "give each watch an id of its own")
        watch.asked_s = self._clock.monotonic_s()
        if not watch.happened.is_set() and watch.error is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(max(request.wait_s, 0.0), WAIT_S_MAX)):
                    await watch.happened.wait()
        watch.asked_s = self._clock.monotonic_s()
        events = watch.taken()
        if not events and watch.error is not None:
            self._watches.pop(key, None)
            raise watch.error
        return events

    def _begin(self, key: tuple[VmId, str], request: WatchDirectory) -> _Watch:
        if len(self._watches) >= WATCHES_MAX:
            raise Rejected("too-many-watches", f"{WATCHES_MAX} directories are watched", "end some of them")
        watch = self._watches[key] = _Watch(request.path)
        watch.task = self._workers.spawn(f"watch {request.watch} in {key[0]}", self._follow(key[0], watch))
        return watch

    async def _follow(self, vm_id: VmId, watch: _Watch) -> None:
        try:
            await self._driver.watch_directory(vm_id, watch.path, watch.take)
        except DriverError as error:
            watch.error = error
        else:
            watch.error = DriverError("not-found", "the directory is not watched any more", retryable=False)
        watch.happened.set()

    def _drop_unasked(self) -> None:
        now_s = self._clock.monotonic_s()
        for key, watch in list(self._watches.items()):
            if now_s - watch.asked_s > UNASKED_S:
                del self._watches[key]
                if watch.task is not None:
                    watch.task.cancel()

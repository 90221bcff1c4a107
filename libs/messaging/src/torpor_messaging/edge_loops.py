"""Loops of a service's own: run for as long as it; a failure is noted and paused after, and stops no other loop."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from torpor_contracts.errors import InvariantViolation, TorporError
from torpor_messaging.ports import Bus, Clock
from torpor_messaging.service import BackgroundRoute
from torpor_messaging.subjects import HINT

_log: Final = logging.getLogger(__name__)


async def run_background(
    route: BackgroundRoute, clock: Clock, die: Callable[[InvariantViolation], None], failures: dict[str, int]
) -> None:
    """Run a loop until cancelled. Failures are counted under the route's name."""
    await clock.sleep(route.first_s)
    failed = 0
    while True:
        try:
            await route.run()
            failed = 0
        except InvariantViolation as error:
            die(error)
            return
        except TorporError as error:
            failed += 1
            _log.warning("%s: %s", route.name, error)
        except Exception:  # noqa: BLE001  (a bug in one loop must not stop the service)
            failed += 1
            _log.exception("%s failed", route.name)
        if failed:
            failures[route.name] = failures.get(route.name, 0) + 1
        grown_s = route.every_s * 2.0 ** min(failed, 10) if failed else 0.0
        await clock.sleep(max(route.every_s, min(grown_s, route.pause_s_max)))


class Hints:
    """Tells the relay that something was committed: at most one message on its way, however many commits."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._committed = asyncio.Event()

    def committed(self, _position: int) -> None:
        """Something was committed."""
        self._committed.set()

    async def run(self) -> None:
        """Publish hints until cancelled. One that gets lost only costs the relay its poll interval."""
        while True:
            await self._committed.wait()
            self._committed.clear()
            await best_effort("a hint", self._bus.publish(HINT, b""))


async def best_effort(what: str, work: Awaitable[object]) -> None:
    """Do what may as well not be done."""
    try:
        await work
    except TorporError as error:
        _log.debug("%s: %s", what, error)

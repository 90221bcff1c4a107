"""Time and identifiers of a simulated process: virtual and seeded."""

import asyncio
import random
from datetime import UTC, datetime, timedelta
from typing import Final

from torpor_simulation.process import Process

BEGINNING: Final = datetime(2030, 1, 1, tzinfo=UTC)
"""Where the virtual calendar of every world starts."""


class SimClock:
    """`torpor_messaging.ports.Clock` over the virtual loop; `skew_s` is how far this machine's calendar is off."""

    def __init__(self, process: Process, skew_s: float = 0.0) -> None:
        self._process = process
        self._beginning = BEGINNING + timedelta(seconds=skew_s)
        self._loop = asyncio.get_running_loop()

    def now(self) -> datetime:
        """The present moment as this machine's calendar has it."""
        return self._beginning + timedelta(seconds=self._loop.time())

    def monotonic_s(self) -> float:
        """Virtual seconds since the world began."""
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        """Wait in virtual time."""
        self._process.check()
        await asyncio.sleep(max(0.0, seconds))
        self._process.check()


class SimIds:
    """`torpor_messaging.ports.Ids` from a seed: UUIDv7 of the virtual time and seeded bits."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)  # noqa: S311  (identifiers that must repeat with the seed)
        self._loop = asyncio.get_running_loop()

    def new(self, prefix: str) -> str:
        """`<prefix>-<UUIDv7 as 32 hex digits>`, layout of RFC 9562 section 5.7."""
        milliseconds = int(BEGINNING.timestamp() * 1000 + self._loop.time() * 1000)
        bits = self._random.getrandbits(74)
        value = milliseconds << 80 | 0x7 << 76 | (bits >> 62) << 64 | 0b10 << 62 | bits & (1 << 62) - 1
        return f"{prefix}-{value:032x}"

    def random(self) -> float:
        """A seeded number in [0, 1)."""
        return self._random.random()

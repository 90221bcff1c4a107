"""The system's own clock and identifiers: the only place that asks the machine for the time or for randomness."""

import asyncio
import os
import secrets
import time
from datetime import UTC, datetime

_COUNTER_BITS = 12


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        """The present moment, UTC."""
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


class SystemIds:
    """UUIDv7 identifiers (RFC 9562, section 5.7): milliseconds, a counter that keeps them rising, 62 random bits."""

    def __init__(self) -> None:
        self._last = 0
        self._random = secrets.SystemRandom()

    def new(self, prefix: str) -> str:
        """`<prefix>-<32 hex digits>`; later ones of this process are greater."""
        tick = (time.time_ns() // 1_000_000) << _COUNTER_BITS
        self._last = max(tick, self._last + 1)
        milliseconds, counter = self._last >> _COUNTER_BITS, self._last & ((1 << _COUNTER_BITS) - 1)
        tail = int.from_bytes(os.urandom(8), "big") & ((1 << 62) - 1)
        number = (milliseconds << 80) | (0x7 << 76) | (counter << 64) | (0b10 << 62) | tail
        return f"{prefix}-{number:032x}"

    def random(self) -> float:
        """A number in [0, 1)."""
        return self._random.random()

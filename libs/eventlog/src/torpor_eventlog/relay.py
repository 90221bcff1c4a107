"""The fenced relay: copies the log into the stream so that sequence equals position; it never skips or rewrites one."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from torpor_contracts.errors import TorporError, Transient
from torpor_eventlog.following import Backoff, Progress, Wake
from torpor_eventlog.port import EventLog, Recorded

WINDOW_MAX: Final = 1000
"""Rows handed to the stream at a time, and so the most publishes in flight."""

POLL_S: Final = 0.25
"""How long a row waits at most when the hint that it is there was lost."""

LOOK_S: Final = 10.0
"""How often the stream is asked whether it still ends where it was left."""

_log: Final = logging.getLogger(__name__)


class StreamEnd(NamedTuple):
    """The stream's last message: its sequence (0: none), and the row digest it carries (None: none can be read)."""

    sequence: int
    digest: bytes | None


class FencedOut(Transient):
    """The stream does not end where this relay left it: another is at work, or this one missed its own success."""


class StreamMismatch(TorporError):  # noqa: N818  (a finding, as the errors of `torpor_contracts` are named)
    """The stream is not a copy of this log; an operator must say which is right. Nothing is published meanwhile."""

    def __init__(self, position: int, what: str) -> None:
        super().__init__(
            f"stream EVENTS at position {position}: {what}; if this log is the right one, "
            "run `torpor audit rebuild --stream`, which makes the stream afresh from it"
        )
        self.position = position
        self.what = what


class EventStream(Protocol):
    """The stream as the relay needs it."""

    async def last(self) -> StreamEnd:
        """The stream's end; raises `Transient` when it cannot be asked now."""
        ...

    async def publish(self, rows: Sequence[Recorded]) -> None:
        """Publish the rows, all in flight at once, each only if the stream's last sequence is its position less one.

        Returns when all are stored. Raises `FencedOut` when one was refused, `Transient` when one was not answered:
        then any number of the first ones may be stored.
        """
        ...


class Relay:
    """Runs along the log; after any failure it asks the stream where it ends, and goes on from there."""

    def __init__(
        self,
        log: EventLog,
        stream: EventStream,
        wake: Wake | None = None,
        *,
        poll_s: float = POLL_S,
        window_max: int = WINDOW_MAX,
        look_s: float = LOOK_S,
    ) -> None:
        self._log = log
        self._stream = stream
        self._wake = wake or Wake()
        self._poll_s = poll_s
        self._window_max = window_max
        self._look_s = look_s
        self._progress = Progress("relay")
        self._backoff = Backoff(first_s=0.05, max_s=5.0)

    @property
    def position(self) -> int:
        """The last position known to be in the stream."""
        return self._progress.position

    async def wait_for(self, position: int, timeout_s: float) -> None:
        """Return once the row at `position` is in the stream; raises `Transient` after `timeout_s`."""
        await self._progress.wait_for(position, timeout_s)

    async def run(self) -> None:
        """Relay until cancelled; raises `StreamMismatch` when the stream is not a copy of this log."""
        while True:
            try:
                self._progress.move_to(await self._attach())
                await self._relay()
            except StreamMismatch:
                raise
            except Exception as error:  # noqa: BLE001  (whatever failed, the stream knows where it ends)
                pause_s = self._backoff.failed()
                _log.warning(
                    "relay at %d: %s: %s; again in %.2f s", self.position, type(error).__name__, error, pause_s
                )
                await asyncio.sleep(pause_s)

    async def _attach(self) -> int:
        """Where the stream ends, once its last message is found to be the log's row of that position."""
        sequence, digest = await self._stream.last()
        if sequence == 0:
            return 0
        rows = await self._log.read(sequence - 1, 1)
        if not rows:
            end = (await self._log.head()).position
            raise StreamMismatch(sequence, f"the log ends at {end} already: the stream has more than the log")
        if digest is None:
            raise StreamMismatch(sequence, "its last message cannot be read")
        if digest != rows[0].digest:
            raise StreamMismatch(sequence, "its last message is not the log's row of that position")
        return sequence

    async def _relay(self) -> None:
        now_s = asyncio.get_running_loop().time
        look_at_s = now_s() + self._look_s
        while True:
            ticks = self._wake.ticks
            rows = await self._log.read(self.position, self._window_max)
            if rows:
                await self._stream.publish(rows)
                self._progress.move_to(rows[-1].position)
                self._backoff.worked()
            else:
                await self._wake.wait(ticks, self._poll_s)
            if now_s() >= look_at_s:
                await self._look()
                look_at_s = now_s() + self._look_s

    async def _look(self) -> None:
        """A stream that has lost its tail is silent: without a look, that would show only with the next event."""
        sequence = (await self._stream.last()).sequence
        if sequence != self.position:
            raise FencedOut(f"the stream ends at {sequence}, and was left at {self.position}")

"""Follows the log through a stream of copies of its rows; trusts none of them, and heals from the log itself."""

import asyncio
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

from torpor_contracts.errors import Poison
from torpor_eventlog.canonical import NO_DIGEST, row_digest
from torpor_eventlog.feeds import READ_MAX
from torpor_eventlog.port import EventLog, Recorded

IDLE_LOOK_S: Final = 2.0
"""After so much silence the log itself is looked at: a stream that lost its tail, or its relay, is silent too."""


class Carried(NamedTuple):
    """One message of the stream: its sequence, and the row it claims to be (None: it cannot be read as one)."""

    sequence: int
    row: Recorded | None


class StreamSource(Protocol):
    """The stream's messages as they come, nothing acknowledged, nothing remembered."""

    def follow(self, after_sequence: int) -> AsyncGenerator[list[Carried], None]:
        """Batches of messages above `after_sequence`; ends, or raises `Transient`, when the connection is lost."""
        ...


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """The stream is not what the log says, first at `position`.

    `missing`: messages were skipped. `changed`: the digest chain breaks. `misplaced`: another position's row.
    `unreadable`: no row at all. `duplicate`: a sequence came twice. `extra`: the log has no such row.
    """

    position: int
    kind: Literal["missing", "changed", "misplaced", "unreadable", "duplicate", "extra"]
    detail: str


def digest_fits(previous: bytes, row: Recorded) -> bool:
    """Whether the row's digest follows from the digest before it and from its content, whatever that is."""
    try:
        return row.digest == row_digest(previous, row)
    except (struct.error, ValueError, OverflowError, msgspec.MsgspecError):
        return False  # its numbers or texts are none that a row of the log can have


async def digest_at(log: EventLog, position: int) -> bytes:
    """The digest of the row at `position`; raises `Poison` when the log does not reach that far."""
    if position == 0:
        return NO_DIGEST
    rows = await log.read(position - 1, 1)
    if not rows:
        raise Poison(
            f"the log has no position {position}: it is older than what was derived from it; "
            "rebuild the views and the stream from it (`torpor audit rebuild`)"
        )
    return rows[0].digest


class HealingFeed:
    """Rows from the stream, each checked against the digest chain; what does not fit is read from the log instead.

    `on_damage` is told once per run of damaged messages.
    """

    def __init__(
        self,
        log: EventLog,
        source: StreamSource,
        on_damage: Callable[[Damage], None],
        *,
        idle_look_s: float = IDLE_LOOK_S,
        read_max: int = READ_MAX,
    ) -> None:
        self._log = log
        self._source = source
        self._on_damage = on_damage
        self._idle_look_s = idle_look_s
        self._read_max = read_max

    async def follow(self, after_position: int) -> AsyncGenerator[list[Recorded], None]:
        """See `Feed.follow`. Ends, or raises, when the source does."""
        reader = _Reader(self._log, self._on_damage, self._read_max)
        reader.stand_at(after_position, await digest_at(self._log, after_position))
        async with (
            aclosing(self._source.follow(after_position)) as source,
            aclosing(_or_silence(source, self._idle_look_s)) as batches,
        ):
            async for batch in batches:
                async with aclosing(reader.take(batch) if batch else reader.read_on()) as checked:
                    async for rows in checked:
                        yield rows


class _Reader:
    """The state of one walk along the stream."""

    def __init__(self, log: EventLog, on_damage: Callable[[Damage], None], read_max: int) -> None:
        self._log = log
        self._on_damage = on_damage
        self._read_max = read_max
        self._position = 0
        self._digest = NO_DIGEST
        self._sequence = 0
        self._damaged = False

    def stand_at(self, position: int, digest: bytes) -> None:
        """Begin after this row."""
        self._position, self._digest, self._sequence = position, digest, position

    async def take(self, batch: list[Carried]) -> AsyncGenerator[list[Recorded], None]:
        """The sound rows of a batch, and the log's own in place of the others."""
        sound: list[Recorded] = []
        for sequence, row in batch:
            if sequence <= self._sequence:
                self._report("duplicate", sequence, f"sequence {sequence} came again after {self._sequence}")
                continue
            self._sequence = sequence
            if sequence <= self._position:
                continue  # read from the log before the stream had it
            if row is not None and sequence == self._position + 1 and self._fits(row):
                sound.append(row)
                self._position, self._digest, self._damaged = sequence, row.digest, False
                continue
            if sound:
                yield sound
                sound = []
            damaged_at = self._position + 1
            async for rows in self.read_on(sequence):
                yield rows
            self._blame(damaged_at, sequence, row)
        if sound:
            yield sound

    async def read_on(self, up_to: int | None = None) -> AsyncGenerator[list[Recorded], None]:
        """The log's rows from here to its end, or up to a position."""
        while up_to is None or self._position < up_to:
            limit = self._read_max if up_to is None else min(self._read_max, up_to - self._position)
            rows = await self._log.read(self._position, limit)
            if not rows:
                return
            self._position, self._digest = rows[-1].position, rows[-1].digest
            yield rows

    def _fits(self, row: Recorded) -> bool:
        return row.position == self._position + 1 and digest_fits(self._digest, row)

    def _blame(self, damaged_at: int, sequence: int, row: Recorded | None) -> None:
        if self._position < sequence:
            self._report("extra", sequence, f"the log ends at {self._position}")
        elif sequence > damaged_at:
            self._report("missing", damaged_at, f"the stream went on at {sequence}")
        elif row is None:
            self._report("unreadable", sequence, "the message is no row of the log")
        elif row.position != sequence:
            self._report("misplaced", sequence, f"the message is a copy of position {row.position}")
        else:
            self._report("changed", sequence, "its digest does not follow from the row before and its content")

    def _report(
        self,
        kind: Literal["missing", "changed", "misplaced", "unreadable", "duplicate", "extra"],
        position: int,
        detail: str,
    ) -> None:
        if not self._damaged:
            self._damaged = True
            self._on_damage(Damage(position=position, kind=kind, detail=detail))


async def _or_silence(
    batches: AsyncIterator[list[Carried]], silence_s: float
) -> AsyncGenerator[list[Carried] | None, None]:
    """The batches, and None after each `silence_s` without one."""
    coming: asyncio.Future[list[Carried]] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(batches))
            await asyncio.wait({coming}, timeout=silence_s)
            if not coming.done():
                yield None
                continue
            arrived, coming = coming, None
            try:
                batch = arrived.result()
            except StopAsyncIteration:
                return
            yield batch
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait({coming})

"""A program's output, whole and in order, from the stream `OUTPUT`."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Final

from torpor.client.connection import Connection
from torpor.client.models import Chunk
from torpor.client.stored import read_stream

STREAM: Final = "OUTPUT"


class OutputOrder:
    """Where a reader of one program's output is; `offset` is the next byte it wants. Pure."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.missing_bytes = 0
        self.ended = False

    def take(self, headers: Mapping[str, str], data: bytes) -> Chunk | None:
        """What of a message is new; None for a repeat, and for the end when it brings nothing."""
        offset = int(headers.get("Torpor-Offset", "0"))
        if offset > self.offset:
            # The stream keeps output for a limited time: what is gone is counted, never made up.
            self.missing_bytes += offset - self.offset
            self.offset = offset
        self.ended = self.ended or "Torpor-End" in headers
        new = data[self.offset - offset :]
        if not new:
            return None
        start, self.offset = self.offset, self.offset + len(new)
        return Chunk("stderr" if headers.get("Torpor-Stream") == "stderr" else "stdout", start, new)


async def follow_output(connection: Connection, subject: str, from_offset: int = 0) -> AsyncGenerator[Chunk, None]:
    """A program's output from a byte on, until it ends; also after whoever started it is gone."""
    order = OutputOrder(0)
    async with aclosing(read_stream(connection, STREAM, subject, follow=True)) as messages:
        async for message in messages:
            chunk = order.take(message.headers, message.data)
            if chunk is not None and chunk.offset + len(chunk.data) > from_offset:
                cut = max(0, from_offset - chunk.offset)
                yield Chunk(chunk.stream, chunk.offset + cut, chunk.data[cut:])
            if order.ended:
                return

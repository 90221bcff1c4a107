"""A program's output, whole and in order, from the stream `OUTPUT`."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Final, NamedTuple

from torpor.client import events
from torpor.client.connection import Connection
from torpor.client.models import Chunk
from torpor.client.stored import StreamReader, merged, read_stream, waiting_queue
from torpor_contracts.session import ExecEnded
from torpor_messaging import subjects

STREAM: Final = "OUTPUT"
REST_S: Final = 2.0
"""How long, after a program's end is known from one side, the other is waited for: its record, or its last output."""


class End(NamedTuple):
    """What the last message of a program's output says of its end."""

    outcome: str
    exit_code: int | None
    output_bytes: int
    incarnation: int


class OutputOrder:
    """Where a reader of one program's output is; `offset` is the next byte it wants. Pure."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.missing_bytes = 0
        self.end: End | None = None

    @property
    def ended(self) -> bool:
        """Whether no more will come."""
        return self.end is not None

    def take(self, headers: Mapping[str, str], data: bytes) -> Chunk | None:
        """What of a message is new; None for a repeat, and for the end when it brings nothing."""
        offset = int(headers.get("Torpor-Offset", "0"))
        if offset > self.offset:
            # The stream keeps output for a limited time: what is gone is counted, never made up.
            self.missing_bytes += offset - self.offset
            self.offset = offset
        if "Torpor-End" in headers and self.end is None:
            code = headers.get("Torpor-Exit-Code")
            self.end = End(
                outcome=headers["Torpor-End"],
                exit_code=None if code is None else int(code),
                output_bytes=offset,
                incarnation=int(headers.get("Torpor-Incarnation", "0")),
            )
        new = data[self.offset - offset :]
        if not new:
            return None
        start, self.offset = self.offset, self.offset + len(new)
        return Chunk("stderr" if headers.get("Torpor-Stream") == "stderr" else "stdout", start, new)


async def follow_output(
    connection: Connection, program: tuple[str, str], from_offset: int = 0, *, follow: bool = True
) -> AsyncGenerator[Chunk, None]:
    """A program's output from a byte on, until it ends, also after whoever started it is gone.

    `program` is its session and its id. Without `follow` what is stored now. One that was lost has no last output: its
    end is read from the log.
    """
    session_id, exec_id = program
    subject = subjects.output(connection.tenant, session_id, exec_id)
    source = _live(connection, session_id, exec_id, subject) if follow else _stored(connection, subject)
    async with aclosing(source) as chunks:
        async for chunk in chunks:
            if chunk.offset + len(chunk.data) > from_offset:
                cut = max(0, from_offset - chunk.offset)
                yield Chunk(chunk.stream, chunk.offset + cut, chunk.data[cut:])


async def newest_offset(connection: Connection, subject: str) -> int:
    """How far a program's output has come, as far as it is stored."""
    newest = await connection.newest(STREAM, subject)
    if newest is None:
        return 0
    return int((newest.headers or {}).get("Torpor-Offset", "0")) + len(newest.data)


async def _stored(connection: Connection, subject: str) -> AsyncGenerator[Chunk, None]:
    order = OutputOrder()
    async with aclosing(read_stream(connection, STREAM, subject)) as messages:
        async for message in messages:
            chunk = order.take(message.headers, message.data)
            if chunk is not None:
                yield chunk


async def _live(connection: Connection, session_id: str, exec_id: str, subject: str) -> AsyncGenerator[Chunk, None]:
    order, waiting, loop = OutputOrder(), waiting_queue(), asyncio.get_running_loop()
    out = StreamReader(connection, STREAM, subject)
    ends = StreamReader(connection, events.STREAM, subjects.event(connection.tenant, "exec-ended", session_id))
    output_bytes: int | None = None
    give_up_s: float | None = None
    try:
        await out.open(waiting)
        await ends.open(waiting)
        async with aclosing(merged(waiting, [out, ends])) as stream:
            while not order.ended and (output_bytes is None or order.offset < output_bytes):
                try:
                    async with asyncio.timeout_at(give_up_s):
                        message = await anext(stream)
                except TimeoutError:
                    return  # the rest is no longer stored, or never was
                if message.source is out:
                    chunk = order.take(message.headers, message.data)
                    if chunk is not None:
                        yield chunk
                    continue
                body = events.to_event(message.headers, message.data).body
                if isinstance(body, ExecEnded) and body.exec_id == exec_id:
                    output_bytes, give_up_s = body.output_bytes, loop.time() + REST_S
    finally:
        await out.close()
        await ends.close()

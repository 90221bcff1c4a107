"""One program in a session: asked for, followed live, and its result; both awaitable and iterable."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from torpor.client import events, output
from torpor.client.connection import Connection
from torpor.client.models import Chunk, Event, ExecResult
from torpor.client.stored import StreamReader, merged, waiting_queue
from torpor.errors import NotYet
from torpor_contracts.replies import Receipt
from torpor_contracts.session import ExecEnded, ExecSession
from torpor_messaging import subjects

KEPT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Output kept for `ExecResult`; what is beyond is counted as missing there, and streamed all the same."""
GRACE_S: Final = 90.0
"""How long after a program's own time limit its end is waited for, waking the machine included."""
_LAST_OUTPUT_S: Final = 2.0
"""How long, after the program's end is known, its output may still be on its way."""


@dataclass(frozen=True)
class Order:
    """What is to be run, and how long its end is waited for."""

    connection: Connection
    session_id: str
    command: ExecSession
    command_id: str
    timeout_s: float


class Exec:
    """A program that is to run: `await` it for its `ExecResult`, or iterate over its output and read `result` after.

    It is sent when it is awaited or iterated, once; the same `command_id` runs it once however often it is sent.
    """

    def __init__(self, order: Order, on_output: Callable[[Chunk], Awaitable[None] | None] | None) -> None:
        self.exec_id = str(order.command.exec_id)
        self._order = order
        self._on_output = on_output
        self._result: ExecResult | None = None

    @property
    def result(self) -> ExecResult:
        """How it ended; only after all of its output was read."""
        if self._result is None:
            raise RuntimeError("the program has not ended: await it, or iterate to the end of its output, first")
        return self._result

    def __await__(self) -> Generator[Any, None, ExecResult]:
        return self._finish().__await__()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._run()

    async def _finish(self) -> ExecResult:
        async with aclosing(self._run()) as chunks:
            async for chunk in chunks:
                if self._on_output is not None:
                    handled = self._on_output(chunk)
                    if handled is not None:
                        await handled
        return self.result

    async def _run(self) -> AsyncGenerator[Chunk, None]:
        order = self._order
        waiting = waiting_queue()
        tenant = order.connection.tenant
        out = StreamReader(order.connection, output.STREAM, subjects.output(tenant, order.session_id, self.exec_id))
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + order.timeout_s
        opening = asyncio.create_task(out.open(waiting), name="open output")
        happenings: StreamReader | None = None
        try:
            # Together: the reader must not make the machine wait, nor the machine's first words be late.
            receipt = await order.connection.command(
                "scheduler", order.session_id, order.command, order.command_id, min(order.timeout_s, 60.0)
            )
            await opening
            happenings = StreamReader(
                order.connection,
                events.STREAM,
                events.session_subject(tenant, order.session_id),
                receipt.position + 1,
            )
            await happenings.open(waiting)
            gathering = _Gathering(self.exec_id, receipt)
            stream = merged(waiting, [out, happenings])
            async with aclosing(stream):
                while not gathering.complete:
                    limit_s = deadline_s
                    if gathering.ended is not None:
                        limit_s = min(limit_s, gathering.known_at_s + _LAST_OUTPUT_S)
                    try:
                        message = await asyncio.wait_for(anext(stream), max(0.001, limit_s - loop.time()))
                    except TimeoutError:
                        if gathering.ended is not None:
                            break  # the output is no longer stored, or never was: the result says how much
                        raise self._not_yet(receipt) from None
                    if message.source is out:
                        chunk = gathering.take_output(message.headers, message.data)
                        if chunk is not None:
                            yield chunk
                    else:
                        gathering.take_event(events.to_event(message.headers, message.data), loop.time())
            self._result = gathering.result()
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            await out.close()
            if happenings is not None:
                await happenings.close()

    def _not_yet(self, receipt: Receipt) -> NotYet:
        return NotYet(
            f"the program {self.exec_id} has not ended within {self._order.timeout_s:g} s",
            "it goes on; follow it with `session.output(exec_id)`, or wait longer with timeout_s",
            receipt,
        )


class _Gathering:
    """Puts a result together from output and events; pure."""

    def __init__(self, exec_id: str, receipt: Receipt) -> None:
        self._exec_id = exec_id
        self._receipt = receipt
        self._order = output.OutputOrder()
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._dropped = 0
        self._position = 0
        self.ended: ExecEnded | None = None
        self.known_at_s = 0.0

    @property
    def complete(self) -> bool:
        """Whether the end is known and all output is here, as far as there is any."""
        if self.ended is None:
            return False
        return self._order.ended or self._order.offset >= self.ended.output_bytes

    def take_output(self, headers: dict[str, str], data: bytes) -> Chunk | None:
        """A message of `OUTPUT`."""
        chunk = self._order.take(headers, data)
        if chunk is not None:
            room = KEPT_BYTES_MAX - len(self._kept["stdout"]) - len(self._kept["stderr"])
            self._kept[chunk.stream] += chunk.data[:room]
            self._dropped += max(0, len(chunk.data) - room)
        return chunk

    def take_event(self, event: Event, now_s: float) -> None:
        """An event of the session."""
        if isinstance(event.body, ExecEnded) and event.body.exec_id == self._exec_id:
            self.ended, self._position, self.known_at_s = event.body, event.position, now_s

    def result(self) -> ExecResult:
        """The result, once the end is known."""
        assert self.ended is not None
        unread = max(0, self.ended.output_bytes - self._order.offset)
        return ExecResult(
            exec_id=self._exec_id,
            outcome=self.ended.outcome,
            exit_code=self.ended.exit_code,
            stdout_bytes=bytes(self._kept["stdout"]),
            stderr_bytes=bytes(self._kept["stderr"]),
            detail=self.ended.detail,
            incarnation=self.ended.incarnation,
            missing_bytes=self._order.missing_bytes + self._dropped + unread,
            receipt=self._receipt,
            position=self._position,
        )

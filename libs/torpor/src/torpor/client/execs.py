"""One program in a session: asked for, followed live, and its result; both awaitable and iterable."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, cast

from torpor.client import events, output
from torpor.client.connection import Connection
from torpor.client.models import Chunk, Event, ExecResult, Outcome
from torpor.client.pieces import Content
from torpor.client.programs import Program
from torpor.client.stored import StoredMessage, StreamReader, merged, waiting_queue
from torpor.errors import NotYet, WrongState
from torpor_contracts.replies import Receipt
from torpor_contracts.session import ExecEnded, ExecSession
from torpor_messaging import subjects

KEPT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Output kept for `ExecResult`; what is beyond is counted as missing there, and streamed all the same."""
GRACE_S: Final = 90.0
"""How long after a program's own time limit its end is waited for, waking the machine included."""
LATE: Final = "the end is not on record yet; its host has told it"


@dataclass(frozen=True)
class Order:
    """What is to be run, what it is given to read, and how long its end is waited for."""

    connection: Connection
    session_id: str
    command: ExecSession
    command_id: str
    timeout_s: float
    program: Program
    stdin: Content | None = None


class Exec:
    """A program that is to run: `await` it for its `ExecResult`, or iterate over its output and read `result` after.

    It is sent when it is awaited or iterated, once; the same `command_id` runs it once however often it is sent.
    `program` gives it input and signals meanwhile.
    """

    def __init__(self, order: Order, on_output: Callable[[Chunk], Awaitable[None] | None] | None) -> None:
        self.exec_id = str(order.command.exec_id)
        self.program = order.program
        self.program.being_asked_for = True
        self._order = order
        self._on_output = on_output
        self._result: ExecResult | None = None

    @property
    def result(self) -> ExecResult:
        """How it ended; only after all of its output was read."""
        if self._result is None:
            raise RuntimeError("the program has not ended: await it, or iterate to the end of its output, first")
        return self._result

    async def start(self) -> Receipt:
        """Have it started, and do not follow it: `program` and `Session.output` do, also of another client.

        Input that is to be streamed is given by `program.write_all`.
        """
        order = self._order
        receipt = await order.connection.command(
            "scheduler", order.session_id, order.command, order.command_id, min(order.timeout_s, 60.0)
        )
        self.program.known_at = receipt.position
        return receipt

    def __await__(self) -> Generator[Any, None, ExecResult]:
        return self._finish().__await__()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._run()

    def output(self) -> AsyncGenerator[Chunk, None]:
        """What iterating over it gives, to be closed by `contextlib.aclosing`."""
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
        feeding: asyncio.Task[None] | None = None
        happenings: StreamReader | None = None
        try:
            # Together: the reader must not make the machine wait, nor the machine's first words be late.
            receipt = await self.start()
            await opening
            happenings = StreamReader(
                order.connection,
                events.STREAM,
                events.session_subject(tenant, order.session_id),
                receipt.position + 1,
            )
            await happenings.open(waiting)
            if order.stdin is not None:
                feeding = asyncio.create_task(_fed(self.program, order.stdin), name=f"feed {self.exec_id}")
            gathering = _Gathering(self.exec_id, receipt)
            messages = merged(waiting, [out, happenings])
            async with aclosing(messages if feeding is None else _attended(messages, feeding)) as stream:
                while not gathering.complete:
                    limit_s = min(deadline_s, gathering.known_at_s + output.REST_S)
                    try:
                        async with asyncio.timeout_at(limit_s):
                            message = await anext(stream)
                    except TimeoutError:
                        if gathering.end_known:
                            break  # the record is late, or output no longer stored: the result says which
                        raise self._not_yet(receipt) from None
                    if message.source is out:
                        chunk = gathering.take_output(message.headers, message.data, loop.time())
                        if chunk is not None:
                            yield chunk
                    else:
                        gathering.take_event(events.to_event(message.headers, message.data), loop.time())
            self._result = gathering.result()
        finally:
            for task in (opening, feeding):
                if task is not None:
                    task.cancel()
            await asyncio.gather(opening, *([feeding] if feeding else []), return_exceptions=True)
            await out.close()
            if happenings is not None:
                await happenings.close()

    def _not_yet(self, receipt: Receipt) -> NotYet:
        return NotYet(
            f"the program {self.exec_id} has not ended within {self._order.timeout_s:g} s",
            "it goes on; follow it with `session.output(exec_id)`, or wait longer with timeout_s",
            receipt,
        )


async def _fed(program: Program, content: Content) -> None:
    """Give a program all of its input; one that ends or closes it first has read enough."""
    try:
        await program.write_all(content)
    except WrongState as refused:
        if refused.code not in {"exec-ended", "stdin-closed"}:
            raise


async def _attended(
    messages: AsyncGenerator[StoredMessage, None], feeding: asyncio.Task[None]
) -> AsyncGenerator[StoredMessage, None]:
    """The messages; raises at once what feeding the program raises, since the program would wait for ever."""
    async with aclosing(messages):
        while True:
            coming = asyncio.ensure_future(anext(messages))
            try:
                if not feeding.done():
                    await asyncio.wait({coming, feeding}, return_when=asyncio.FIRST_COMPLETED)
                if feeding.done():
                    feeding.result()
                yield await coming
            finally:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)


class _Gathering:
    """Puts a result together from output and events; pure."""

    def __init__(self, exec_id: str, receipt: Receipt) -> None:
        self._exec_id = exec_id
        self._receipt = receipt
        self._order = output.OutputOrder()
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._dropped = 0
        self._position = receipt.position
        self._ended: ExecEnded | None = None
        self.known_at_s = math.inf
        """Since when the end is known, from its record or from the last of its output."""

    @property
    def end_known(self) -> bool:
        """Whether the end is known, on record or not yet."""
        return self._ended is not None or self._order.end is not None

    @property
    def complete(self) -> bool:
        """Whether the end is on record and all output is here, as far as there is any."""
        if self._ended is None:
            return False
        return self._order.ended or self._order.offset >= self._ended.output_bytes

    def take_output(self, headers: dict[str, str], data: bytes, now_s: float) -> Chunk | None:
        """A message of `OUTPUT`."""
        chunk = self._order.take(headers, data)
        if self._order.ended:
            self.known_at_s = min(self.known_at_s, now_s)
        if chunk is not None:
            room = KEPT_BYTES_MAX - len(self._kept["stdout"]) - len(self._kept["stderr"])
            self._kept[chunk.stream] += chunk.data[:room]
            self._dropped += max(0, len(chunk.data) - room)
        return chunk

    def take_event(self, event: Event, now_s: float) -> None:
        """An event of the session."""
        if isinstance(event.body, ExecEnded) and event.body.exec_id == self._exec_id:
            self._ended, self._position = event.body, event.position
            self.known_at_s = min(self.known_at_s, now_s)

    def result(self) -> ExecResult:
        """The result, once the end is known; from the last of the output when the record is late."""
        ended, last = self._ended, self._order.end
        if ended is None:
            assert last is not None
            outcome, exit_code, output_bytes = last.outcome, last.exit_code, last.output_bytes
            detail, incarnation = LATE, last.incarnation
        else:
            outcome, exit_code, output_bytes = ended.outcome, ended.exit_code, ended.output_bytes
            detail, incarnation = ended.detail, ended.incarnation
        return ExecResult(
            exec_id=self._exec_id,
            outcome=cast("Outcome", outcome),
            exit_code=exit_code,
            stdout_bytes=bytes(self._kept["stdout"]),
            stderr_bytes=bytes(self._kept["stderr"]),
            detail=detail,
            incarnation=incarnation,
            missing_bytes=self._order.missing_bytes + self._dropped + max(0, output_bytes - self._order.offset),
            receipt=self._receipt,
            position=self._position,
            recorded=ended is not None,
        )

"""A program of a session by its id, whoever started it: its input, its terminal, signals, its output from any byte."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

from torpor.client import output
from torpor.client.awaited import judged_so
from torpor.client.connection import Connection
from torpor.client.door import Answered, Door
from torpor.client.models import Chunk, Event
from torpor.client.pieces import Content, source_of
from torpor.errors import InvalidRequest, Refused, Unavailable, WrongState
from torpor_contracts import guest
from torpor_contracts.guest import PIECE_BYTES_MAX
from torpor_contracts.ids import ExecId, is_token
from torpor_contracts.scheduling import ExecView
from torpor_contracts.session import ExecEnded
from torpor_messaging import subjects

FEED_TIMEOUT_S: Final = 3600.0
"""How long a program may leave its input unread, unless the caller says otherwise."""
BEGIN_TIMEOUT_S: Final = 120.0
"""How long a program is waited for that was asked for and has not begun."""
_PAUSE_S_FIRST: Final = 0.01
_PAUSE_S_MAX: Final = 0.5


class Program:
    """One program. It may have been started by somebody else, and long ago.

    What is asked of one that has not begun yet waits for that; of one that has ended it is refused (`WrongState`, code
    `exec-ended`).
    """

    def __init__(self, connection: Connection, door: Door, session_id: str, exec_id: str) -> None:
        if not is_token(exec_id):
            raise InvalidRequest(
                "illegal-exec-id",
                f"{exec_id[:80]!r} cannot be an exec id",
                "see `torpor session ps` for those there are",
            )
        self.exec_id = exec_id
        self._connection = connection
        self._door = door
        self._session_id = session_id
        self.being_asked_for = False
        """Whether we are about to ask for it ourselves; input may be given before that is answered."""
        self.known_at = 0
        """A position of the log at which the program was asked for, as far as we know."""
        self._given: int | None = None
        self._giving = asyncio.Lock()

    def __repr__(self) -> str:
        return f"Program({self.exec_id!r})"

    async def show(self, *, at_least: int = 0) -> ExecView:
        """The program as the scheduler sees it."""
        view: ExecView = await self._connection.query(
            "scheduler", "exec", self._session_id, {"exec_id": self.exec_id, "at_least": max(at_least, self.known_at)}
        )
        return view

    async def output(self, *, from_offset: int = 0, follow: bool = True) -> AsyncGenerator[Chunk, None]:
        """Its output from a byte on, as long as it is stored: until it ends, or without `follow` what there is now."""
        stream = output.follow_output(self._connection, (self._session_id, self.exec_id), from_offset, follow=follow)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                yield chunk

    async def ended(self, *, timeout_s: float = FEED_TIMEOUT_S) -> ExecView:
        """How it ended, once that is on record; `Unavailable` after `timeout_s`."""
        subject = subjects.event(self._connection.tenant, "exec-ended", self._session_id)

        def judged(event: Event) -> int | None:
            mine = isinstance(event.body, ExecEnded) and event.body.exec_id == self.exec_id
            return event.position if mine else None

        what = f"{self.exec_id} has not ended"
        position = await judged_so(self._connection, subject, (None, 1), judged, (timeout_s, what))
        return await self.show(at_least=position)

    async def newest_offset(self) -> int:
        """How far its output has come, as far as it is stored; 0 when there is none."""
        subject = subjects.output(self._connection.tenant, self._session_id, self.exec_id)
        return await output.newest_offset(self._connection, subject)

    async def write(self, data: bytes, *, timeout_s: float = FEED_TIMEOUT_S) -> None:
        """Give it input; returns once it is with the program, which may take until it has read what came before.

        It must have been started with `stdin_open` or a terminal. Two who write at once write one after the other.
        """
        async with self._giving:
            for start in range(0, len(data), PIECE_BYTES_MAX):
                await self._give(data[start : start + PIECE_BYTES_MAX], timeout_s)

    async def write_all(self, content: Content) -> None:
        """Give it input from a file or a stream to its end, then end its input."""
        source = source_of(content)
        try:
            while piece := await source.piece():
                await self.write(piece)
        finally:
            source.close()
        await self.end_input()

    async def end_input(self) -> None:
        """Say that no more input will come."""
        async with self._giving:
            await self._give(b"", FEED_TIMEOUT_S, ends=True)

    async def resize(self, rows: int, columns: int) -> None:
        """Give its terminal another size; `WrongState` with code `no-terminal` when it has none."""
        request = guest.ResizeTerminal(incarnation=0, exec_id=ExecId(self.exec_id), rows=rows, columns=columns)
        await self._once_begun(lambda: self._door.ask(request))

    async def signal(self, number: int) -> None:
        """Send a signal to it and to all it has started; nothing happens to one that has just ended."""
        request = guest.SignalProgram(incarnation=0, exec_id=ExecId(self.exec_id), signal=int(number))
        await self._once_begun(lambda: self._door.ask(request))

    async def _give(self, data: bytes, timeout_s: float, *, ends: bool = False) -> None:
        loop = asyncio.get_running_loop()
        deadline_s, pause_s = loop.time() + timeout_s, _PAUSE_S_FIRST
        while loop.time() < deadline_s:
            try:
                if self._given is None:
                    # Somebody else may have given it input before: nothing at its beginning answers how much.
                    self._given = await self._fed(b"", 0, ends=False)
                begins_at = self._given
                self._given = await self._fed(data, begins_at, ends=ends)
            except Refused as refused:
                if refused.code != "stdin-full":
                    raise
            else:
                data = data[self._given - begins_at :]
                if not data:
                    return
                pause_s = _PAUSE_S_FIRST if self._given > begins_at else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _PAUSE_S_MAX)
        raise Unavailable(
            f"{self.exec_id} has not read its input for {timeout_s:g} s", "it goes on; give it the rest later"
        )

    async def _fed(self, data: bytes, offset: int, *, ends: bool) -> int:
        request = guest.FeedProgram(incarnation=0, exec_id=ExecId(self.exec_id), offset=offset, ends=ends)
        answered = await self._once_begun(lambda: self._door.ask(request, data))
        return int(answered.answer.offset)

    async def _view(self) -> ExecView | None:
        """The program as the scheduler sees it; None for one that is being asked for, and may not be on record yet."""
        try:
            return await self.show()
        except Refused as refused:
            if refused.code == "exec-not-found" and self.being_asked_for and not self.known_at:
                return None
            raise

    async def _once_begun(self, ask: Callable[[], Awaitable[Answered]]) -> Answered:
        """Ask again while the guest does not know the program and it is not known to have ended either."""
        loop = asyncio.get_running_loop()
        deadline_s, pause_s = loop.time() + BEGIN_TIMEOUT_S, _PAUSE_S_FIRST
        while loop.time() < deadline_s:
            try:
                return await ask()
            except WrongState as refused:
                if refused.code != "exec-unknown":
                    raise
            view = await self._view()
            if view is not None and view.state == "ended":
                raise WrongState("exec-ended", f"{self.exec_id} has ended: {view.outcome}", "start another program")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _PAUSE_S_MAX)
        raise Unavailable(f"{self.exec_id} does not begin", f"see `torpor session show {self._session_id}`")

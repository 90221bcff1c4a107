"""One session, as its owner holds it: what can be asked of it, and waiting until that is so."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Final

import msgspec

from torpor.client import events, execs, output
from torpor.client.connection import Connection
from torpor.client.models import Chunk, Event
from torpor.errors import InvalidRequest, NotYet, SessionEnded, SuspendFailed
from torpor_contracts import session as contract
from torpor_contracts.ids import ExecId, is_token
from torpor_contracts.replies import Receipt
from torpor_contracts.scheduling import ExecView, SessionView
from torpor_messaging import subjects
from torpor_messaging.system import SystemIds

RECEIPT_TIMEOUT_S: Final = 30.0
WAIT_TIMEOUT_S: Final = 120.0
"""How long the effect of a command is waited for, unless the caller says otherwise."""

_IDS: Final = SystemIds()


def new_id(prefix: str, command_id: str | None) -> str:
    """A fresh identifier; made from the command id when the caller chose one, so that a repeated call is the same."""
    if command_id is None:
        return _IDS.new(prefix)
    return f"{prefix}-{hashlib.sha256(command_id.encode()).hexdigest()[:32]}"


class Session:
    """A session. Every command takes `command_id` (sent again under the same id it happens once) and `timeout_s`.

    Commands answer with their `Receipt` once it is on record. With `wait` (the default) they return when the effect
    was observed, and raise `SessionEnded` when the session went elsewhere, `NotYet` when it took too long.
    """

    def __init__(self, connection: Connection, session_id: str) -> None:
        if not is_token(session_id):
            raise InvalidRequest(
                "illegal-id",
                f"{session_id[:80]!r} cannot be a session's id",
                "use 1 to 63 of a-z, 0-9 and '-', beginning with a letter or digit",
            )
        self.session_id = session_id
        self.receipt: Receipt | None = None
        """The receipt of the last command given through this object."""
        self.position = 0
        """The newest position of the log that this object has seen of the session; for `show(at_least=…)`."""
        self._connection = connection

    def __repr__(self) -> str:
        return f"Session({self.session_id!r})"

    async def show(self, *, at_least: int = 0) -> SessionView:
        """The session as the scheduler sees it; `at_least` waits for its view to have come to a position."""
        answer: SessionView = await self._connection.query(
            "scheduler", "session", self.session_id, {"at_least": at_least}
        )
        return answer

    # --- programs ---------------------------------------------------------------------------------------------

    def exec(
        self,
        *argv: str,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        program_timeout_s: float = 3600.0,
        incarnation: int | None = None,
        on_output: Callable[[Chunk], Awaitable[None] | None] | None = None,
        exec_id: str | None = None,
        command_id: str | None = None,
        timeout_s: float | None = None,
    ) -> execs.Exec:
        """Run a program; wakes the session when it sleeps. `await` it for the result, or `async for` its output.

        `program_timeout_s` ends the program in the guest; `timeout_s` is how long we wait for it.
        """
        command = contract.ExecSession(
            exec_id=ExecId(exec_id or new_id("exec", command_id)),
            program=contract.ExecSpec(
                argv=list(argv), env=dict(env or {}), cwd=cwd, user=user, stdin=stdin, timeout_s=program_timeout_s
            ),
            incarnation=incarnation,
        )
        # Its end is waited for until its own time limit is well over.
        if timeout_s is None:
            timeout_s = program_timeout_s + execs.GRACE_S
        order = execs.Order(self._connection, self.session_id, command, command_id or _IDS.new("cmd"), timeout_s)
        return execs.Exec(order, on_output)

    async def output(self, exec_id: str, *, from_offset: int = 0) -> AsyncGenerator[Chunk, None]:
        """A program's output from a byte on, until it ends; whoever started it, as long as it is stored."""
        subject = subjects.output(self._connection.tenant, self.session_id, exec_id)
        async with aclosing(output.follow_output(self._connection, subject, from_offset)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def show_exec(self, exec_id: str, *, at_least: int = 0) -> ExecView:
        """A program of this session as the scheduler sees it."""
        answer: ExecView = await self._connection.query(
            "scheduler", "exec", self.session_id, {"exec_id": exec_id, "at_least": at_least}
        )
        return answer

    async def events(self, *, from_position: int = 1, follow: bool = False) -> AsyncGenerator[Event, None]:
        """The session's own events from a position of the log on."""
        subject = events.session_subject(self._connection.tenant, self.session_id)
        stream = events.read_events(self._connection, subject, from_position, follow=follow)
        async with aclosing(stream):
            async for event in stream:
                yield event

    # --- life cycle -------------------------------------------------------------------------------------------

    async def suspend(
        self,
        *,
        incarnation: int | None = None,
        command_id: str | None = None,
        wait: bool = True,
        timeout_s: float = WAIT_TIMEOUT_S,
    ) -> Receipt:
        """Put the session to sleep: its machine is checkpointed and freed."""
        return await self._do(
            contract.SuspendSession(incarnation=incarnation),
            command_id,
            (contract.SessionSuspended,) if wait else (),
            timeout_s,
        )

    async def resume(
        self,
        *,
        incarnation: int | None = None,
        command_id: str | None = None,
        wait: bool = True,
        timeout_s: float = WAIT_TIMEOUT_S,
    ) -> Receipt:
        """Wake the session from its newest checkpoint."""
        return await self._do(
            contract.ResumeSession(incarnation=incarnation),
            command_id,
            (contract.SessionResumed, contract.SessionStarted, contract.SessionRecovered) if wait else (),
            timeout_s,
        )

    async def terminate(
        self,
        *,
        reason: str = "",
        command_id: str | None = None,
        wait: bool = True,
        timeout_s: float = WAIT_TIMEOUT_S,
    ) -> Receipt:
        """End the session for good; its history, receipts and usage stay."""
        return await self._do(
            contract.TerminateSession(reason=reason),
            command_id,
            (contract.SessionTerminated,) if wait else (),
            timeout_s,
        )

    async def create(
        self, command: contract.CreateSession, command_id: str | None, timeout_s: float, *, wait: bool
    ) -> Receipt:
        """Ask for this session to be made; `Sessions.create` is the comfortable way."""
        done = (contract.SessionStarted, contract.SessionResumed) if wait else ()
        return await self._do(command, command_id, done, timeout_s)

    async def _do(
        self,
        command: msgspec.Struct,
        command_id: str | None,
        done: tuple[type[msgspec.Struct], ...],
        timeout_s: float,
    ) -> Receipt:
        receipt = await self._connection.command(
            "scheduler",
            self.session_id,
            command,
            command_id or _IDS.new("cmd"),
            min(timeout_s, RECEIPT_TIMEOUT_S),
        )
        self.receipt, self.position = receipt, max(self.position, receipt.position)
        if done:
            seen = await self._wait(receipt, done, timeout_s)
            self.position = max(self.position, seen.position)
        return receipt

    async def _wait(self, receipt: Receipt, done: tuple[type[msgspec.Struct], ...], timeout_s: float) -> Event:
        """Until one of these events was observed after the receipt; the receipt's own event may be it already."""
        last: Event | None = None
        subject = events.session_subject(self._connection.tenant, self.session_id)
        stream = events.read_events(self._connection, subject, receipt.position, follow=True)
        try:
            async with asyncio.timeout(timeout_s), aclosing(stream):
                async for event in stream:
                    if isinstance(event.body, done):
                        return event
                    _raise_if_elsewhere(event, done)
                    last = event
        except TimeoutError:
            raise NotYet(
                f"session {self.session_id} has not come to {_names(done)} within {timeout_s:g} s"
                + (f"; its last event is {_saying(last)}" if last else ""),
                f"see `torpor session show {self.session_id}`; what was asked for is on record and goes on",
                receipt,
            ) from None
        raise AssertionError("a stream that is followed has no end")


def _raise_if_elsewhere(event: Event, done: tuple[type[msgspec.Struct], ...]) -> None:
    body = event.body
    if isinstance(body, contract.SessionFailed):
        raise SessionEnded(body.code, f"the session failed: {body.detail}", body.way_out, event.position)
    if isinstance(body, contract.SessionTerminated):
        raise SessionEnded("terminated", "the session was terminated meanwhile", "create another", event.position)
    if isinstance(body, contract.SessionLost) and contract.SessionTerminated not in done:
        raise SessionEnded(
            "lost",
            f"the session was lost: {body.cause}",
            "resume it: it goes on from its newest checkpoint, as a new incarnation",
            event.position,
        )
    if isinstance(body, contract.SuspendFailed) and contract.SessionSuspended in done:
        raise SuspendFailed(
            body.code, f"the session could not be suspended: {body.detail}", "it runs on; try again", event.position
        )


def _names(done: tuple[type[msgspec.Struct], ...]) -> str:
    return " or ".join(str(kind.__struct_config__.tag).partition(".")[0] for kind in done)


def _saying(event: Event) -> str:
    reason = event.data.get("reason") or event.data.get("detail")
    return f"{event.type} at {event.position}" + (f": {reason}" if reason else "")

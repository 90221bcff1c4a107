"""One session, as its owner holds it: what can be asked of it, and waiting until that is so."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Final, Literal

import msgspec

from torpor.client import awaited, branches, events, execs
from torpor.client.connection import Connection
from torpor.client.door import Door
from torpor.client.files import Files
from torpor.client.models import Checkpoint, Chunk, Event, ProgramInfo
from torpor.client.pieces import Content
from torpor.client.programs import Program
from torpor.errors import InvalidRequest
from torpor_contracts import guest
from torpor_contracts import session as contract
from torpor_contracts import session_branches as branch_contract
from torpor_contracts.ids import CheckpointId, ExecId, SessionId, is_token
from torpor_contracts.replies import Receipt
from torpor_contracts.scheduling import ExecInFlight, ExecView, SessionView
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
        self._door = Door(connection, session_id)
        self.files = Files(self._door)

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
        stdin: str | Content = "",
        stdin_open: bool = False,
        terminal: tuple[int, int] | None = None,
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

        `program_timeout_s` ends the program in the guest; `timeout_s` is how long we wait for it. `stdin` is text given
        at once, or bytes, a `pathlib.Path`, an open binary file or a stream of bytes, given as the program reads it.
        `stdin_open`: input will come by `Exec.program`. `terminal`: it runs in a terminal of so many rows and columns,
        takes input, and writes all it writes to stdout.
        """
        text = stdin if isinstance(stdin, str) else ""
        size = None if terminal is None else contract.TerminalSize(rows=terminal[0], columns=terminal[1])
        command = contract.ExecSession(
            exec_id=ExecId(exec_id or new_id("exec", command_id)),
            program=contract.ExecSpec(
                argv=list(argv),
                env=dict(env or {}),
                cwd=cwd,
                user=user,
                stdin=text,
                timeout_s=program_timeout_s,
                stdin_open=stdin_open or not isinstance(stdin, str),
                terminal=size,
            ),
            incarnation=incarnation,
        )
        # Its end is waited for until its own time limit is well over.
        if timeout_s is None:
            timeout_s = program_timeout_s + execs.GRACE_S
        order = execs.Order(
            self._connection,
            self.session_id,
            command,
            command_id or _IDS.new("cmd"),
            timeout_s,
            self.program(str(command.exec_id)),
            None if isinstance(stdin, str) else stdin,
        )
        return execs.Exec(order, on_output)

    def program(self, exec_id: str) -> Program:
        """A program by its id, whoever started it: its input, its terminal, signals, its output."""
        return Program(self._connection, self._door, self.session_id, exec_id)

    async def programs(self) -> list[ProgramInfo]:
        """The programs that have not ended, whoever started them. A session that sleeps is not woken."""
        view = await self.show()
        known: dict[str, guest.RunningProgram] = {}
        if view.state == "running" and view.execs:
            answered = await self._door.ask(guest.ListPrograms(incarnation=0), wakes=False)
            known = {str(one.exec_id): one for one in answered.answer.programs}
        return [_info(one, view.state, known.get(one.exec_id)) for one in view.execs]

    async def signal(self, exec_id: str, number: int) -> None:
        """Send a signal to a program and to all it has started."""
        await self.program(exec_id).signal(number)

    async def output(self, exec_id: str, *, from_offset: int = 0, follow: bool = True) -> AsyncGenerator[Chunk, None]:
        """A program's output from a byte on, until it ends; whoever started it, as long as it is stored.

        Without `follow`, what there is now.
        """
        stream = self.program(exec_id).output(from_offset=from_offset, follow=follow)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                yield chunk

    async def show_exec(self, exec_id: str, *, at_least: int = 0) -> ExecView:
        """A program of this session as the scheduler sees it."""
        return await self.program(exec_id).show(at_least=at_least)

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
            awaited.UP if wait else (),
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
        done = awaited.UP if wait else ()
        return await self._do(command, command_id, done, timeout_s)

    # --- branches ---------------------------------------------------------------------------------------------

    async def checkpoint(
        self,
        *,
        label: str = "",
        checkpoint_id: str | None = None,
        incarnation: int | None = None,
        command_id: str | None = None,
        wait: bool = True,
        timeout_s: float = WAIT_TIMEOUT_S,
    ) -> Checkpoint:
        """Checkpoint the session while it runs on; one that sleeps is answered with the checkpoint it sleeps in.

        With `wait` it is complete in the store and can be forked from or gone back to; `CheckpointFailed` when it could
        not be made. Without, it is only asked for, and has no `pause_ms`.
        """
        began_s = _now_s()
        command = branch_contract.CheckpointSession(
            checkpoint_id=None if checkpoint_id is None else CheckpointId(checkpoint_id),
            label=label,
            incarnation=incarnation,
        )
        receipt = await self._do(command, command_id, (), timeout_s)
        made = await branches.checkpoint_of(self._connection, receipt, _left_s(timeout_s, began_s), wait=wait)
        self.position = max(self.position, made.position)
        return made

    async def fork(
        self,
        count: int = 1,
        *,
        session_ids: Sequence[str] = (),
        checkpoint_id: str | None = None,
        source: Literal["auto", "newest", "fresh"] = "auto",
        metadata: Mapping[str, str] | None = None,
        incarnation: int | None = None,
        command_id: str | None = None,
        wait: bool = True,
        timeout_s: float = WAIT_TIMEOUT_S,
    ) -> list["Session"]:
        """Make new sessions that begin in a checkpoint of this one, all of them or none; this one goes on.

        They begin in `checkpoint_id`, or as `source` says: `fresh`, a checkpoint taken now of the running session;
        `newest`, the newest there is; `auto`, a fresh one of a session that runs, else the newest. `session_ids` names
        them; else `count` ids are made. With `wait` all of them run; `ForkFailed` says which do not.
        """
        began_s = _now_s()
        command = branch_contract.ForkSession(
            session_ids=[SessionId(one) for one in session_ids],
            count=len(session_ids) or count,
            checkpoint_id=None if checkpoint_id is None else CheckpointId(checkpoint_id),
            source=source,
            metadata=None if metadata is None else dict(metadata),
            incarnation=incarnation,
        )
        receipt = await self._do(command, command_id, (), timeout_s)
        made = await branches.sessions_of(self._connection, receipt, _left_s(timeout_s, began_s), wait=wait)
        self.position = max(self.position, made.position)
        forks = {one: Session(self._connection, one) for one in made.session_ids}
        for fork in forks.values():
            fork.receipt, fork.position = receipt, made.position if made.sure else 0

        def up(session_id: str, position: int) -> None:
            forks[session_id].position = position

        if wait:
            await branches.all_up(self._connection, receipt, made, _left_s(timeout_s, began_s), up)
        return list(forks.values())

    async def rollback(
        self,
        checkpoint_id: str,
        *,
        incarnation: int | None = None,
        command_id: str | None = None,
        wait: bool = True,
        timeout_s: float = WAIT_TIMEOUT_S,
    ) -> Receipt:
        """Take the session back to a checkpoint of its tree, as a new incarnation; what came after stays as a branch.

        `CheckpointNotFound` for one that is not of its tree, whoever else it may belong to.
        """
        return await self._do(
            branch_contract.RollbackSession(checkpoint_id=CheckpointId(checkpoint_id), incarnation=incarnation),
            command_id,
            awaited.UP if wait else (),
            timeout_s,
        )

    async def _do(
        self,
        command: msgspec.Struct,
        command_id: str | None,
        done: tuple[type[msgspec.Struct], ...],
        timeout_s: float,
    ) -> Receipt:
        began_s = _now_s()
        receipt = await self._connection.command(
            "scheduler",
            self.session_id,
            command,
            command_id or _IDS.new("cmd"),
            min(timeout_s, RECEIPT_TIMEOUT_S),
        )
        self.receipt, self.position = receipt, max(self.position, receipt.position)
        if done:
            left_s = _left_s(timeout_s, began_s)
            seen = await awaited.observed(self._connection, self.session_id, receipt, done, left_s)
            self.position = max(self.position, seen.position)
        return receipt


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _left_s(timeout_s: float, began_s: float) -> float:
    """What is left of a time limit; never quite nothing, so that what is there already is seen."""
    return max(0.1, timeout_s - (_now_s() - began_s))


def _info(one: ExecInFlight, session_state: str, seen: guest.RunningProgram | None) -> ProgramInfo:
    state: Literal["pending", "running", "asleep", "ending"] = "pending"
    if one.started_at is not None:
        state = "running" if session_state == "running" else "asleep"
    if seen is not None:
        # The guest sees an end first; until the log has it, the program is ending.
        state = "running" if seen.running else "ending"
    return ProgramInfo(
        exec_id=str(one.exec_id),
        state=state,
        requested_at=one.requested_at,
        started_at=one.started_at,
        remaining_s=None if seen is None else seen.remaining_s,
    )

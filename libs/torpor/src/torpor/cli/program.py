"""`torpor session exec|ps|attach|logs|output|signal`."""

import asyncio
import signal as signals
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Final

from cyclopts import Parameter

from torpor.cli import printing, terminal
from torpor.cli.options import DEFAULTS, Common
from torpor.cli.session import CommandId, SessionId, metadata_of
from torpor.client.execs import Exec
from torpor.client.models import Chunk, ExecResult
from torpor.client.programs import Program
from torpor.errors import InvalidRequest, WrongState
from torpor_contracts.replies import Receipt
from torpor_contracts.scheduling import ExecView

ENDS: Final = {"timed-out": 124, "lost": 125, "cancelled": 125, "failed": 126}
SIGNALED: Final = 137
TOLD_TO_END: Final = 143
ENDED_S: Final = 10.0
"""How long the record of an end is waited for, once the output has ended."""
SHOWN_AGAIN_BYTES: Final = 4096
"""How much of what was written before is shown when one attaches."""

ExecId = Annotated[str, Parameter(help="The program's id; see `torpor session ps`.", show_default=False)]
From = Annotated[int, Parameter(name=["--from", "--from-offset"], help="The first byte wanted.")]


def exec_(
    session_id: SessionId,
    *argv: Annotated[str, Parameter(help="The program and its arguments, after --.", allow_leading_hyphen=True)],
    stdin: Annotated[
        bool, Parameter(name=["--stdin", "-i"], negative=(), help="Give our input to the program as it reads it.")
    ] = False,
    tty: Annotated[
        bool, Parameter(name=["--tty", "-t"], negative=(), help="In a terminal; ours is given to it. Implies -i.")
    ] = False,
    detach: Annotated[
        bool, Parameter(name=["--detach", "-d"], negative=(), help="Print its id once it is asked for, and leave it.")
    ] = False,
    env: Annotated[list[str] | None, Parameter(negative=(), help="KEY=VALUE; may be repeated.")] = None,
    cwd: str | None = None,
    user: str | None = None,
    program_timeout_s: Annotated[float, Parameter(help="The program is ended after so many seconds.")] = 3600.0,
    incarnation: int | None = None,
    command_id: CommandId = None,
    timeout_s: Annotated[float | None, Parameter(help="How long to wait for its end.")] = None,
    common: Common = DEFAULTS,
) -> int:
    """Run a program in a session; its output as it comes, its exit code as ours.

    With -it in a terminal: keys go to the program, Ctrl-C too; Ctrl-P Ctrl-Q lets go of it, and it goes on.
    """
    if not argv:
        raise InvalidRequest("no-program", "no program was named", f"torpor session exec {session_id} -- echo hi")
    if tty and not detach:
        terminal.required()
        if common.json:
            raise InvalidRequest("no-terminal", "a terminal and --json were asked for", "leave one of them out")

    async def work() -> ExecResult | None:
        async with common.connect() as t:
            running = t.sessions.handle(session_id).exec(
                *argv,
                env=metadata_of(env or []),
                cwd=cwd,
                user=user,
                stdin_open=stdin,
                terminal=terminal.size() if tty else None,
                program_timeout_s=program_timeout_s,
                incarnation=incarnation,
                command_id=command_id,
                timeout_s=timeout_s,
            )
            if detach:
                _say_started(running.exec_id, await running.start(), common)
                return None
            return await _followed(running, common, stdin=stdin, tty=tty)

    try:
        result = asyncio.run(work())
    except terminal.Detached:
        printing.note(f"torpor: the program goes on; see `torpor session ps {session_id}`")
        return 0
    except KeyboardInterrupt:
        printing.note(f"torpor: the program goes on; see `torpor session show {session_id}`")
        raise
    except asyncio.CancelledError:
        return TOLD_TO_END
    return 0 if result is None else _ended(result, common)


async def _followed(running: Exec, common: Common, *, stdin: bool, tty: bool) -> ExecResult:
    output = _dropped(running.output()) if common.json else running.output()
    if stdin or tty:
        await terminal.held_together(running.program, output, terminal=tty)
    else:
        await terminal.written(output)
    return running.result


def ps_(session_id: SessionId, *, common: Common = DEFAULTS) -> int:
    """List the programs that have not ended, whoever started them; a session that sleeps is not woken."""

    async def work() -> int:
        async with common.connect() as t:
            found = await t.sessions.handle(session_id).programs()
        if common.json:
            printing.emit(found)
            return 0
        rows = [
            (one.exec_id, one.state, one.started_at or one.requested_at, _seconds(one.remaining_s)) for one in found
        ]
        printing.table(("program", "state", "since", "s left"), rows, "no programs run")
        return 0

    return asyncio.run(work())


def attach_(
    session_id: SessionId,
    exec_id: ExecId,
    *,
    stdin: Annotated[bool, Parameter(name=["--stdin", "-i"], negative=(), help="Give our input to it.")] = False,
    from_offset: Annotated[
        int | None,
        Parameter(name=["--from", "--from-offset"], help="The first byte wanted; by default 4 KiB are shown again."),
    ] = None,
    common: Common = DEFAULTS,
) -> int:
    """Go on with a program that somebody started: its output until it ends, its exit code as ours.

    If it has a terminal, and we sit at one, our keys go to it; Ctrl-P Ctrl-Q lets go of it.
    """

    async def work() -> ExecView:
        async with common.connect() as t:
            program = t.sessions.handle(session_id).program(exec_id)
            if (await program.show()).state == "ended":
                raise WrongState("exec-ended", f"{exec_id} has ended", f"torpor session logs {session_id} {exec_id}")
            begins_at = from_offset
            if begins_at is None:
                begins_at = max(0, await program.newest_offset() - SHOWN_AGAIN_BYTES)
            output = program.output(from_offset=begins_at)
            at_terminal = sys.stdin.isatty() and sys.stdout.isatty() and await _has_terminal(program)
            if at_terminal or stdin:
                await terminal.held_together(program, output, terminal=at_terminal)
            else:
                await terminal.written(output)
            return await program.ended(timeout_s=ENDED_S)

    try:
        view = asyncio.run(work())
    except terminal.Detached:
        printing.note(f"torpor: the program goes on; see `torpor session ps {session_id}`")
        return 0
    except asyncio.CancelledError:
        return TOLD_TO_END
    if view.outcome != "exited":
        printing.note(f"torpor: the program {view.outcome}" + (f": {view.detail}" if view.detail else ""))
    return _exit_code(str(view.outcome), view.exit_code)


async def _has_terminal(program: Program) -> bool:
    try:
        await program.resize(*terminal.size())
    except WrongState as refused:
        if refused.code != "no-terminal":
            raise
        return False
    return True


def logs_(
    session_id: SessionId,
    exec_id: ExecId,
    *,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative=(), help="As it is written, until the program ends.")
    ] = False,
    from_offset: From = 0,
    common: Common = DEFAULTS,
) -> int:
    """Print what a program wrote, from any byte on, also long after whoever started it is gone."""

    async def work() -> int:
        async with common.connect() as t:
            program = t.sessions.handle(session_id).program(exec_id)
            await program.show()
            async for chunk in program.output(from_offset=from_offset, follow=follow):
                if common.json:
                    printing.emit({"stream": chunk.stream, "offset": chunk.offset, "text": chunk.text})
                else:
                    terminal.write(chunk)
        return 0

    return asyncio.run(work())


def output_(session_id: SessionId, exec_id: ExecId, *, from_offset: From = 0, common: Common = DEFAULTS) -> int:
    """Follow the output of a program, from any byte on, until it ends; as `logs --follow`."""
    return logs_(session_id, exec_id, follow=True, from_offset=from_offset, common=common)


def signal_(
    session_id: SessionId,
    exec_id: ExecId,
    signal: Annotated[str, Parameter(help="Its name or number.")] = "TERM",
    *,
    common: Common = DEFAULTS,
) -> int:
    """Send a signal to a program and to all it has started."""
    number = _signal(signal)

    async def work() -> None:
        async with common.connect() as t:
            await t.sessions.handle(session_id).signal(exec_id, number)

    asyncio.run(work())
    if common.json:
        printing.emit({"exec_id": exec_id, "signal": number})
    return 0


def _signal(name: str) -> int:
    if name.isdecimal():
        return int(name)
    try:
        return signals.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise InvalidRequest("illegal-signal", f"{name!r} is no signal", "use a name as TERM, or a number") from None


def _say_started(exec_id: str, receipt: Receipt, common: Common) -> None:
    if common.json:
        printing.emit({"exec_id": exec_id, "receipt": receipt})
    else:
        printing.say(exec_id)


async def _dropped(chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
    """Nothing of it; the result has it all."""
    async with aclosing(chunks):
        async for chunk in chunks:
            if not chunk.data:
                yield chunk


def _ended(result: ExecResult, common: Common) -> int:
    if common.json:
        printing.emit(
            {
                "exec_id": result.exec_id,
                "outcome": result.outcome,
                "exit_code": result.exit_code,
                "stdout": result.stdout,
                "stderr": result.stderr,
                "detail": result.detail,
                "incarnation": result.incarnation,
                "missing_bytes": result.missing_bytes,
                "receipt": result.receipt,
                "position": result.position,
                "recorded": result.recorded,
            }
        )
    elif result.outcome != "exited":
        printing.note(f"torpor: the program {result.outcome}" + (f": {result.detail}" if result.detail else ""))
    elif result.missing_bytes:
        printing.note(f"torpor: {result.missing_bytes} bytes of output are no longer stored")
    elif not result.recorded:
        printing.note(f"torpor: {result.detail}")
    return _exit_code(result.outcome, result.exit_code)


def _exit_code(outcome: str, exit_code: int | None) -> int:
    if outcome == "exited" and exit_code is not None:
        return exit_code
    return ENDS.get(outcome, SIGNALED)


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.0f}"

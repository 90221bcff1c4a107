"""Input, signals and late records of programs through the SDK."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg

import torpor
from tests.support.nats import NatsServer
from torpor.client.execs import LATE
from torpor_contracts import guest
from torpor_contracts.ids import ExecId, SessionId
from torpor_contracts.replies import Refusal, Reply
from torpor_contracts.scheduling import ExecView
from torpor_contracts.session import ExecEnded, ExecRequested, ExecSpec

from .small_guest import NOW, SESSION, Answer, SmallGuest
from .small_scheduler import SmallScheduler

PROGRAM = "exec-1"
UNKNOWN = Refusal(code="exec-unknown", message="not known", advice="check the id")
FULL = Refusal(code="stdin-full", message="not read yet", advice="later")
CLOSED = Refusal(code="stdin-closed", message="no more", advice="open it")


class SmallProgram:
    """A program of the small guest: what it was given to read, and how it stands in the scheduler's view."""

    def __init__(self, scheduler: SmallScheduler, machine: SmallGuest) -> None:
        self.scheduler = scheduler
        self.machine = machine
        self.read = b""
        self.given = b""
        self.refusals: list[Refusal] = []
        self.state = "started"
        self.shown_after = 0
        """So many questions are answered as if it were not on record yet."""
        self.room = 1 << 30
        machine.on_request = self._take
        scheduler.on_command = self._begin
        self.rest: Callable[[], Awaitable[None]] = self._nothing

    async def listen(self) -> None:
        await self.scheduler.client.subscribe("qry.default.scheduler.exec.*", cb=self._show)
        await self.scheduler.client.flush()

    async def _nothing(self) -> None:
        return

    async def _begin(self, _message: Msg) -> Reply:
        requested = ExecRequested(exec_id=ExecId(PROGRAM), program=ExecSpec(argv=["x"]), requested_at=NOW)
        receipt = await self.scheduler.event(SESSION, requested)
        await self.rest()
        return Reply(receipt=receipt)

    def _take(self, request: Any, body: bytes) -> Answer:
        if self.refusals:
            return self.refusals.pop(0)
        if isinstance(request, guest.FeedProgram):
            new = body[len(self.given) - request.offset :][: self.room]
            self.given += new
            return guest.ProgramFed(offset=len(self.given)), b""
        return guest.Done(), b""

    async def _show(self, message: Msg) -> None:
        if self.shown_after:
            self.shown_after -= 1
            unknown = Refusal(code="exec-not-found", message="no such program", advice="check the exec id")
            await message.respond(msgspec.json.encode(Reply(refusal=unknown)))
            return
        view = ExecView(
            session_id=SessionId(SESSION),
            exec_id=ExecId(PROGRAM),
            state=self.state,  # type: ignore[arg-type]
            requested_at=NOW,
            started_at=NOW,
            ended_at=None,
            incarnation=1,
            outcome="exited" if self.state == "ended" else None,
            exit_code=0,
            detail="",
            output_bytes=0,
            position=1,
        )
        await message.respond(msgspec.json.encode(view))

    async def end(self) -> None:
        """Its last output, and its record."""
        await self.end_output()
        ended = ExecEnded(
            exec_id=ExecId(PROGRAM),
            incarnation=1,
            outcome="exited",
            exit_code=3,
            detail="",
            output_bytes=2,
            observed_at=NOW,
        )
        await self.scheduler.event(SESSION, ended)

    async def end_output(self) -> None:
        await self.scheduler.output(SESSION, PROGRAM, 0, b"ok")
        end = {"End": "exited", "Exit-Code": "3", "Incarnation": "1"}
        await self.scheduler.output(SESSION, PROGRAM, 2, b"", **end)


def scenario(
    server: NatsServer, act: Callable[[SmallProgram, torpor.Session], Awaitable[None]], timeout_s: float = 30.0
) -> None:
    async def run() -> None:
        scheduler = await SmallScheduler.connect(server)
        machine = SmallGuest(scheduler)
        await machine.listen()
        program = SmallProgram(scheduler, machine)
        await program.listen()
        seed = server.seed("tenant-default")
        async with (
            asyncio.timeout(timeout_s),
            torpor.connect(nats_url=server.url, nkey_seed_file=seed, tenant="default") as t,
        ):
            await act(program, t.sessions.handle(SESSION))
        await scheduler.close()

    asyncio.run(run())


def test_a_late_record_is_not_waited_for_longer_than_a_moment(nats_server: NatsServer) -> None:
    async def act(program: SmallProgram, session: torpor.Session) -> None:
        program.rest = program.end_output
        began_s = asyncio.get_running_loop().time()
        result = await session.exec("x", exec_id=PROGRAM)
        assert asyncio.get_running_loop().time() - began_s < 10
        assert (result.stdout, result.exit_code, result.outcome, result.missing_bytes) == ("ok", 3, "exited", 0)
        assert (result.recorded, result.detail, result.incarnation) == (False, LATE, 1)
        assert result.position == result.receipt.position

    scenario(nats_server, act)


def test_a_record_that_comes_in_time_is_the_one_that_counts(nats_server: NatsServer) -> None:
    async def act(program: SmallProgram, session: torpor.Session) -> None:
        program.rest = program.end
        result = await session.exec("x", exec_id=PROGRAM)
        assert (result.recorded, result.position) == (True, 2)

    scenario(nats_server, act)


def test_input_waits_for_the_program_to_begin_and_to_read(nats_server: NatsServer) -> None:
    content = bytes(range(256)) * 4096

    async def act(program: SmallProgram, session: torpor.Session) -> None:
        program.refusals, program.room = [UNKNOWN, FULL, FULL], 100_000

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(content), 1000):
                yield content[start : start + 1000]

        running = asyncio.ensure_future(_awaited(session.exec("x", exec_id=PROGRAM, stdin=pieces())))
        while not (program.machine.asked and program.machine.asked[-1][1].ends):
            done, _ = await asyncio.wait([running], timeout=0.05)
            assert not done, await running
        assert program.given == content
        await program.end()
        assert (await running).exit_code == 3
        command = msgspec.json.decode(program.scheduler.commands[0].data)
        assert command["program"]["stdin_open"] is True

    scenario(nats_server, act)


def test_input_may_be_given_before_the_program_is_on_record(nats_server: NatsServer) -> None:
    async def act(program: SmallProgram, session: torpor.Session) -> None:
        program.refusals, program.shown_after = [UNKNOWN, UNKNOWN], 2
        running = session.exec("x", exec_id=PROGRAM, stdin_open=True)
        await running.program.write(b"early")
        assert program.given == b"early"
        program.refusals, program.shown_after = [UNKNOWN], 1
        with pytest.raises(torpor.Refused, match="no such program"):
            await session.program(PROGRAM).write(b"of somebody else")

    scenario(nats_server, act)


async def _awaited(running: Any) -> torpor.ExecResult:
    result: torpor.ExecResult = await running
    return result


def test_a_program_that_reads_no_more_has_read_enough(nats_server: NatsServer) -> None:
    async def act(program: SmallProgram, session: torpor.Session) -> None:
        program.refusals, program.rest = [CLOSED], program.end
        assert (await session.exec("x", exec_id=PROGRAM, stdin=b"never read")).exit_code == 3

    scenario(nats_server, act)


def test_input_that_cannot_be_read_is_said_at_once(nats_server: NatsServer) -> None:
    async def act(_program: SmallProgram, session: torpor.Session) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield b"some"
            raise OSError("the disk is gone")

        with pytest.raises(OSError, match="the disk is gone"):
            await session.exec("x", exec_id=PROGRAM, stdin=broken())

    scenario(nats_server, act)


def test_who_goes_on_with_a_program_gives_input_behind_what_it_had(nats_server: NatsServer) -> None:
    async def act(program: SmallProgram, session: torpor.Session) -> None:
        program.given = b"before "
        again = session.program(PROGRAM)
        await asyncio.gather(again.write(b"and "), again.write(b"after"))
        assert program.given == b"before and after"

    scenario(nats_server, act)


def test_a_program_that_has_ended_takes_nothing(nats_server: NatsServer) -> None:
    async def act(program: SmallProgram, session: torpor.Session) -> None:
        program.state, program.refusals = "ended", [UNKNOWN] * 3
        for asked in (session.signal(PROGRAM, 15), session.program(PROGRAM).write(b"x")):
            with pytest.raises(torpor.WrongState, match="has ended") as raised:
                await asked
            assert raised.value.code == "exec-ended"
        with pytest.raises(torpor.InvalidRequest):
            session.program("Not An Id")

    scenario(nats_server, act)


def test_output_of_a_program_that_was_lost_ends_with_its_record(nats_server: NatsServer) -> None:
    async def act(program: SmallProgram, session: torpor.Session) -> None:
        await program.scheduler.output(SESSION, PROGRAM, 0, b"some")
        lost = ExecEnded(
            exec_id=ExecId(PROGRAM),
            incarnation=1,
            outcome="lost",
            exit_code=None,
            detail="its machine is gone",
            output_bytes=0,
            observed_at=NOW,
        )
        await program.scheduler.event(SESSION, lost)
        assert [chunk.data async for chunk in session.output(PROGRAM)] == [b"some"]
        assert [chunk.data async for chunk in session.output(PROGRAM, from_offset=2, follow=False)] == [b"me"]
        assert await session.program(PROGRAM).newest_offset() == 4
        assert await session.program("exec-none").newest_offset() == 0

    scenario(nats_server, act)

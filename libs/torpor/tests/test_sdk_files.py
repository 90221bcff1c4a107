"""Files through the SDK: in pieces, at constant memory, past lost answers, and past a machine that slept."""

import asyncio
import io
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

import torpor
from tests.support.nats import NatsServer
from torpor.client.door import Door
from torpor.client.files import Files
from torpor_contracts import guest
from torpor_contracts.ids import HostId, VmId
from torpor_contracts.replies import Refusal, Reply
from torpor_contracts.session import ResumeRequested, SessionResumed

from .small_guest import NOW, SESSION, Answer, SmallGuest
from .small_scheduler import SmallScheduler

MIB = 1024 * 1024
PIECE = guest.PIECE_BYTES_MAX
MISSING = Refusal(code="not-found", message="nothing there", advice="check the path")


def scenario(
    server: NatsServer, act: Callable[[SmallGuest, SmallScheduler, torpor.Torpor, Files], Awaitable[None]]
) -> None:
    async def run() -> None:
        scheduler = await SmallScheduler.connect(server)
        machine = SmallGuest(scheduler)
        await machine.listen()
        seed = server.seed("tenant-default")
        async with (
            asyncio.timeout(60),
            torpor.connect(nats_url=server.url, nkey_seed_file=seed, tenant="default") as t,
        ):
            await act(machine, scheduler, t, t.sessions.handle(SESSION).files)
        await scheduler.close()

    asyncio.run(run())


def piece_of(offset: int, length: int) -> bytes:
    return (offset // PIECE).to_bytes(8, "big") * (length // 8)


def reading(size_bytes: int, modified_ns: int = 7) -> Callable[[Any, bytes], Answer]:
    """A file whose every piece says where it stands."""

    def answer(request: guest.ReadFile, _body: bytes) -> Answer:
        length = max(0, min(request.length, size_bytes - request.offset))
        read = guest.FileRead(size_bytes=size_bytes, modified_ns=modified_ns)
        return read, piece_of(request.offset, length)

    return answer


def test_a_large_file_comes_and_goes_at_constant_memory(nats_server: NatsServer) -> None:
    size_bytes = 96 * MIB

    async def act(machine: SmallGuest, _s: SmallScheduler, _t: torpor.Torpor, files: Files) -> None:
        machine.on_request = reading(size_bytes)
        offset = 0
        tracemalloc.start()
        async for piece in files.stream("/large"):
            assert piece == piece_of(offset, len(piece))
            offset += len(piece)
            machine.asked.clear()
        assert offset == size_bytes
        received = 0

        def take(request: guest.WriteFile, body: bytes) -> Answer:
            nonlocal received
            assert (request.offset, body) == (received, piece_of(received, len(body)))
            received += len(body)
            machine.asked.clear()
            return guest.FileWritten(size_bytes=received), b""

        machine.on_request = take

        async def content() -> AsyncIterator[bytes]:
            for start in range(0, size_bytes, PIECE):
                yield piece_of(start, PIECE)

        assert await files.write("/large", content()) == received == size_bytes
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 * MIB

    scenario(nats_server, act)


def test_lost_answers_are_asked_for_again_and_nothing_is_written_twice(nats_server: NatsServer) -> None:
    async def act(machine: SmallGuest, _s: SmallScheduler, _t: torpor.Torpor, files: Files) -> None:
        seen: set[str] = set()

        def losing(request: Any, body: bytes) -> Answer:
            key = f"{request.offset}"
            if key not in seen:
                seen.add(key)
                return None
            if isinstance(request, guest.WriteFile):
                return guest.FileWritten(size_bytes=request.offset + len(body)), b""
            return reading(2 * PIECE)(request, body)

        machine.on_request = losing
        assert await files.read("/f") == piece_of(0, PIECE) + piece_of(PIECE, PIECE)
        seen.clear()
        machine.asked.clear()
        await files.write("/f", b"once")
        first, second = (request for _, request, _ in machine.asked)
        assert first == second
        assert first.request_id, "the machine can tell a repeat"

    scenario(nats_server, act)


def test_a_file_goes_on_in_a_machine_that_slept_meanwhile(nats_server: NatsServer) -> None:
    async def act(machine: SmallGuest, scheduler: SmallScheduler, _t: torpor.Torpor, files: Files) -> None:
        async def wake(_message: Msg) -> Reply:
            resume = ResumeRequested(incarnation=2, checkpoint_id=None, cause="client", requested_at=NOW)
            receipt = await scheduler.event(SESSION, resume)
            machine.state, machine.incarnation = "running", 2
            up = SessionResumed(
                vm_id=VmId("vm-2"),
                host_id=HostId("host-2"),
                incarnation=2,
                checkpoint_id=None,
                lost_since=None,
                observed_at=NOW,
            )
            machine.position = (await scheduler.event(SESSION, up)).position
            return Reply(receipt=receipt)

        scheduler.on_command = wake
        machine.on_request = reading(9 * PIECE)
        offset = 0
        async for piece in files.stream("/f"):
            assert piece == piece_of(offset, PIECE)
            offset += len(piece)
            if offset == 3 * PIECE:
                machine.state = "suspended"
        assert offset == 9 * PIECE
        woken = [message.subject for message in scheduler.commands]
        assert woken == ["cmd.default.scheduler.resume-session.ses-1"], "woken once, whoever waits for it"

    scenario(nats_server, act)


@pytest.mark.parametrize("state", ["terminated", "failed"])
def test_a_session_that_is_over_is_not_asked(nats_server: NatsServer, state: Any) -> None:
    async def act(machine: SmallGuest, _s: SmallScheduler, _t: torpor.Torpor, files: Files) -> None:
        machine.state = state
        with pytest.raises(torpor.WrongState, match=state):
            await files.read("/f")

    scenario(nats_server, act)


def test_a_machine_that_is_never_there_is_given_up(nats_server: NatsServer) -> None:
    async def act(machine: SmallGuest, _s: SmallScheduler, t: torpor.Torpor, _f: Files) -> None:
        gone = Refusal(code=guest.NOT_HERE, message="gone", advice="look")
        machine.on_request = lambda _request, _body: gone
        door = Door(t.connection, SESSION)
        with pytest.raises(torpor.Unavailable, match="did not answer stat-file within 1 s: gone"):
            await door.ask(guest.StatFile(incarnation=0, path=b"/f"), timeout_s=1)
        assert len(machine.asked) < 12

    scenario(nats_server, act)


def test_a_file_that_changes_while_it_is_read_is_no_file(nats_server: NatsServer) -> None:
    async def act(machine: SmallGuest, _s: SmallScheduler, _t: torpor.Torpor, files: Files) -> None:
        machine.on_request = reading(9 * PIECE)
        pieces = files.stream("/f")
        await anext(pieces)
        machine.on_request = reading(9 * PIECE, modified_ns=8)
        with pytest.raises(torpor.TransferBroken, match="changed") as raised:
            await anext(pieces)
        assert raised.value.offset == PIECE

    scenario(nats_server, act)


def test_what_the_kernel_makes_up_is_read_to_its_end(nats_server: NatsServer) -> None:
    async def act(machine: SmallGuest, _s: SmallScheduler, _t: torpor.Torpor, files: Files) -> None:
        def answer(request: guest.ReadFile, _body: bytes) -> Answer:
            made_up = b"Name: init\n"[request.offset :]
            return guest.FileRead(size_bytes=0, modified_ns=len(machine.asked)), made_up

        machine.on_request = answer
        assert await files.read("/proc/1/status") == b"Name: init\n"

    scenario(nats_server, act)


def forgetful(machine: SmallGuest) -> Callable[[Any, bytes], Answer]:
    """A machine that is lost, once, after the first piece; what it has in the end is in `machine.written`."""
    kept: dict[str, bytes] = {}
    forgot = False

    def answer(request: guest.WriteFile, body: bytes) -> Answer:
        nonlocal forgot
        if request.offset and not forgot:
            forgot = True
            kept.clear()
        if request.offset > len(kept.get(request.upload, b"")):
            return Refusal(code="upload-unknown", message="begin again", advice="begin again")
        kept[request.upload] = kept.get(request.upload, b"")[: request.offset] + body
        machine.written = kept[request.upload]
        return guest.FileWritten(size_bytes=len(machine.written)), b""

    return answer


@pytest.mark.parametrize("kind", ["bytes", "file", "path"])
def test_an_upload_that_was_lost_begins_again(nats_server: NatsServer, tmp_path: Path, kind: str) -> None:
    content = piece_of(0, PIECE) + b"the end"
    (tmp_path / "content").write_bytes(content)
    sources = {"bytes": content, "file": io.BytesIO(content), "path": tmp_path / "content"}

    async def act(machine: SmallGuest, _s: SmallScheduler, _t: torpor.Torpor, files: Files) -> None:
        machine.on_request = forgetful(machine)
        assert await files.write("/f", sources[kind]) == len(content)  # type: ignore[arg-type]
        assert machine.written == content

    scenario(nats_server, act)


def test_a_stream_that_was_lost_cannot_begin_again_and_says_so(nats_server: NatsServer) -> None:
    async def act(machine: SmallGuest, _s: SmallScheduler, _t: torpor.Torpor, files: Files) -> None:
        machine.on_request = forgetful(machine)
        with pytest.raises(torpor.TransferBroken, match="write it again") as raised:
            await files.write("/f", iter([bytes(PIECE), b"more"]))
        assert raised.value.code == "upload-lost"

    scenario(nats_server, act)


@pytest.mark.parametrize("length", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE])
def test_the_last_piece_says_so_whatever_the_length(nats_server: NatsServer, length: int) -> None:
    async def act(machine: SmallGuest, _s: SmallScheduler, _t: torpor.Torpor, files: Files) -> None:
        machine.on_request = lambda request, body: (guest.FileWritten(size_bytes=request.offset + len(body)), b"")
        odd = (bytes(1000) for _ in range(length // 1000))
        assert await files.write("/f", odd) == length // 1000 * 1000
        machine.asked.clear()
        assert await files.write("/f", bytes(length)) == length
        assert [request.last for _, request, _ in machine.asked] == [False] * (len(machine.asked) - 1) + [True]
        assert len(machine.asked) == max(1, -(-length // PIECE))

    scenario(nats_server, act)


def test_refusals_of_a_guest_are_typed(nats_server: NatsServer) -> None:
    async def act(machine: SmallGuest, _s: SmallScheduler, _t: torpor.Torpor, files: Files) -> None:
        machine.on_request = lambda _request, _body: MISSING
        with pytest.raises(torpor.FileNotFound, match="nothing there"):
            await files.stat("/none")
        full = Refusal(code="disk-full", message="no room", advice="make some")
        machine.on_request = lambda _request, _body: full
        with pytest.raises(torpor.FileRefused) as raised:
            await files.write("/f", b"x")
        assert (raised.value.code, raised.value.advice) == ("disk-full", "make some")
        for illegal in (files.read("/f", offset=-1), files.write("/f", "text")):  # type: ignore[arg-type]
            with pytest.raises(torpor.InvalidRequest):
                await illegal

    scenario(nats_server, act)


def test_a_watch_waits_for_a_session_that_sleeps_and_says_to_look(nats_server: NatsServer) -> None:
    async def act(machine: SmallGuest, scheduler: SmallScheduler, _t: torpor.Torpor, files: Files) -> None:
        made = guest.DirectoryWatched(events=[guest.WatchEvent(kind="made", name=b"\xff")])
        machine.on_request = lambda _request, _body: (made, b"")
        changes = files.watch("/d")
        assert (await anext(changes)).name == "\udcff"
        machine.state = "suspended"
        coming = asyncio.ensure_future(anext(changes))
        done, _ = await asyncio.wait([coming], timeout=0.3)
        assert not done
        assert not scheduler.commands, "nobody is woken to be watched"
        machine.state, machine.incarnation = "running", 2
        up = SessionResumed(
            vm_id=VmId("vm-2"),
            host_id=HostId("host-1"),
            incarnation=2,
            checkpoint_id=None,
            lost_since=None,
            observed_at=NOW,
        )
        await scheduler.event(SESSION, up)
        assert [(await coming).kind, (await anext(changes)).kind] == ["overflow", "made"]
        await changes.aclose()

    scenario(nats_server, act)

"""The door to guests: files, input and terminals; only of machines that are their session's, here, and awake."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.vm_host_world import CKP, HostWorld, S, exec_vm, in_virtual_time, stop_vm
from torpor_contracts.errors import Rejected
from torpor_contracts.guest import (
    PIECE_BYTES_MAX,
    DirectoryListed,
    FeedProgram,
    FileRead,
    ListDirectory,
    ListPrograms,
    MakeDirectory,
    MoveFile,
    ReadFile,
    RemoveFile,
    ResizeTerminal,
    SignalProgram,
    StatFile,
    WatchDirectory,
    WriteFile,
)
from torpor_contracts.ids import ExecId, SessionId, TenantId
from torpor_contracts.session import TerminalSize
from torpor_contracts.vm import VmSuspendFailed

X = ExecId("x-1")
ODD = [b"a b", b"line\nbreak", b"\xff\xfe no text", "\u4e2d\u6587".encode(), b"-rf", b"back\\slash", b"x" * 255]


async def running(root: Path, **settings: object) -> HostWorld:
    world = HostWorld(root, **settings)
    await world.boot()
    await world.command(world.start_vm())
    return world


async def write(world: HostWorld, path: bytes, content: bytes, **given: Any) -> None:
    """Write a file in pieces, as a client does."""
    offset = 0
    while True:
        piece = content[offset : offset + PIECE_BYTES_MAX]
        last = offset + len(piece) == len(content)
        request = WriteFile(incarnation=1, path=path, upload="u1", offset=offset, last=last, **given)
        written, _ = await world.ask(request, piece)
        offset += len(piece)
        assert written.size_bytes == offset
        if last:
            return


async def read(world: HostWorld, path: bytes) -> bytes:
    content = b""
    while True:
        answer, piece = await world.ask(ReadFile(incarnation=1, path=path, offset=len(content)))
        assert isinstance(answer, FileRead)
        content += piece
        if len(content) >= answer.size_bytes:
            return content


async def refused(world: HostWorld, request: Any, body: bytes = b"", **given: Any) -> str:
    with pytest.raises(Rejected) as caught:
        await world.ask(request, body, **given)
    assert caught.value.advice
    return caught.value.code


def test_a_file_of_several_pieces_comes_back_as_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        content = hashlib.sha256(b"seed").digest() * 25_000
        assert len(content) > 3 * PIECE_BYTES_MAX
        await write(world, b"/root/sub/large", content, mode=0o600)
        assert await read(world, b"/root/sub/large") == content
        entry = (await world.ask(StatFile(incarnation=1, path=b"/root/sub/large")))[0].entry
        assert (entry.kind, entry.size_bytes, entry.mode) == ("file", len(content), 0o600)

    in_virtual_time(scenario)


@pytest.mark.parametrize("name", ODD)
def test_any_name_that_linux_allows_is_one(tmp_path: Path, name: bytes) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        path = b"/root/" + name
        await write(world, path, name * 3)
        assert await read(world, path) == name * 3
        listed: DirectoryListed = (await world.ask(ListDirectory(incarnation=1, path=b"/root")))[0]
        assert name in [entry.name for entry in listed.entries]
        await world.ask(MoveFile(incarnation=1, path=path, to=path[:200] + b".moved"))
        await world.ask(RemoveFile(incarnation=1, path=path[:200] + b".moved"))
        assert (await world.ask(ListDirectory(incarnation=1, path=b"/root")))[0].entries == []

    in_virtual_time(scenario)


def test_programs_and_the_door_see_the_same_files(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await write(world, b"/root/given", b"from outside\n")
        await world.command(exec_vm("sh", "-c", "cat given; echo from inside > /root/made"))
        await world.ended()
        await world.look()
        assert world.read().output == b"from outside\n"
        assert await read(world, b"/root/made") == b"from inside\n"

    in_virtual_time(scenario)


def test_files_are_in_every_checkpoint(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await write(world, b"/root/kept", b"1")
        await world.command(world.suspend_vm())
        await world.command(world.start_vm(2, checkpoint_id=CKP), "vm-2")
        answer, body = await world.ask(ReadFile(incarnation=2, path=b"/root/kept"))
        assert (answer.size_bytes, body) == (1, b"1")

    in_virtual_time(scenario)


def test_nobody_sees_half_a_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await write(world, b"/root/f", b"old")
        half = WriteFile(incarnation=1, path=b"/root/f", upload="u2", offset=0, last=False)
        await world.ask(half, b"new, but not all of it")
        assert await read(world, b"/root/f") == b"old"
        assert [one.name for one in (await world.ask(ListDirectory(incarnation=1, path=b"/root")))[0].entries] == [b"f"]
        gap = WriteFile(incarnation=1, path=b"/root/f", upload="u2", offset=1_000, last=True)
        assert await refused(world, gap, b"x") == "upload-unknown"

    in_virtual_time(scenario)


def test_a_directory_is_listed_page_by_page_in_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.ask(MakeDirectory(incarnation=1, path=b"/root/many/deep"))
        for number in range(25):
            await write(world, b"/root/many/%02d" % number, b"")
        found: list[bytes] = []
        more = True
        while more:
            after = found[-1] if found else b""
            page = (await world.ask(ListDirectory(incarnation=1, path=b"/root/many", after=after, limit=10)))[0]
            found += [entry.name for entry in page.entries]
            more = page.more
        assert found == [*(b"%02d" % number for number in range(25)), b"deep"]

    in_virtual_time(scenario)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (ReadFile(incarnation=1, path=b"/none"), "not-found"),
        (ReadFile(incarnation=1, path=b"/root"), "not-a-file"),
        (ReadFile(incarnation=1, path=b"relative"), "illegal-path"),
        (ReadFile(incarnation=1, path=b"/a\0b"), "illegal-path"),
        (ReadFile(incarnation=1, path=b"/root/f", length=PIECE_BYTES_MAX + 1), "illegal-request"),
        (ReadFile(incarnation=1, path=b"/root/f", offset=-1), "illegal-request"),
        (ReadFile(incarnation=1, path=b"/root/" + b"x" * 256), "name-too-long"),
        (StatFile(incarnation=1, path=b"/none"), "not-found"),
        (ListDirectory(incarnation=1, path=b"/root/f"), "not-a-directory"),
        (ListDirectory(incarnation=1, path=b"/root", limit=0), "illegal-request"),
        (MakeDirectory(incarnation=1, path=b"/root/f"), "exists"),
        (MoveFile(incarnation=1, path=b"/none", to=b"/root/g"), "not-found"),
        (MoveFile(incarnation=1, path=b"/root/f", to=b"/none/g"), "not-found"),
        (RemoveFile(incarnation=1, path=b"/none"), "not-found"),
        (RemoveFile(incarnation=1, path=b"/root/d"), "not-empty"),
        (WriteFile(incarnation=1, path=b"/root/d", upload="u", offset=0, last=True), "is-a-directory"),
        (WriteFile(incarnation=1, path=b"/root/g", upload="../u", offset=0, last=True), "illegal-request"),
        (WriteFile(incarnation=1, path=b"/root/g", upload="u", offset=0, last=True, user="nobody9"), "no-such-user"),
        (FeedProgram(incarnation=1, exec_id=X, offset=0), "exec-unknown"),
        (ResizeTerminal(incarnation=1, exec_id=X, rows=0, columns=1), "illegal-request"),
        (SignalProgram(incarnation=1, exec_id=X, signal=99), "illegal-request"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(tmp_path: Path, request_: Any, code: str) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await write(world, b"/root/f", b"x")
        await write(world, b"/root/d/g", b"x")
        assert await refused(world, request_) == code

    in_virtual_time(scenario)


def test_malformed_requests_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        door = world.service.guests[0].handle
        for data in (b"", b"{}", b"[1]", b'{"incarnation":1,"path":"%%%"}', b'{"incarnation":1,"colour":1}', b"\xff"):
            with pytest.raises(Rejected, match="malformed-request"):
                await world.within(door(TenantId("acme"), "read-file", S, data))
        with pytest.raises(Rejected, match="unknown-operation"):
            await world.within(door(TenantId("acme"), "open-sesame", S, b"{}"))
        with pytest.raises(Rejected, match="payload-too-large"):
            await world.within(door(TenantId("acme"), "write-file", S, b"{}\n" + bytes(PIECE_BYTES_MAX + 1)))

    in_virtual_time(scenario)


def test_the_disk_being_full_breaks_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        piece = bytes(PIECE_BYTES_MAX)
        for number in range(4):
            request = WriteFile(incarnation=1, path=b"/root/big", upload="u", offset=number * len(piece), last=False)
            await world.ask(request, piece)
        over = WriteFile(incarnation=1, path=b"/root/big", upload="u", offset=4 * len(piece), last=True)
        assert await refused(world, over, b"one more") == "disk-full"
        assert await refused(world, StatFile(incarnation=1, path=b"/root/big")) == "not-found"
        await write(world, b"/root/small", b"fits")

    in_virtual_time(scenario)


def test_only_the_machine_of_that_session_and_incarnation_is_reached(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await write(world, b"/root/f", b"x")
        ask = ReadFile(incarnation=1, path=b"/root/f")
        assert await refused(world, ReadFile(incarnation=2, path=b"/root/f")) == "not-here"
        assert await refused(world, ask, tenant_id=TenantId("other")) == "not-here"
        assert await refused(world, ask, session_id="s-9") == "not-here"
        await world.command(world.suspend_vm())
        assert await refused(world, ask) == "not-here"
        await world.command(world.start_vm(2, checkpoint_id=CKP), "vm-2")
        assert await refused(world, ask) == "not-here", "the old incarnation is over"
        await world.ask(ReadFile(incarnation=2, path=b"/root/f"))
        await world.command(stop_vm(2), "vm-2")
        assert await refused(world, ReadFile(incarnation=2, path=b"/root/f")) == "not-here"

    in_virtual_time(scenario)


def test_a_repeat_under_the_same_id_is_answered_and_not_done_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await write(world, b"/root/a", b"x")
        move = MoveFile(incarnation=1, request_id="r-1", path=b"/root/a", to=b"/root/b")
        await world.ask(move)
        await write(world, b"/root/a", b"another")
        await world.ask(move)
        assert await read(world, b"/root/a") == b"another"
        other = MoveFile(incarnation=1, request_id="r-1", path=b"/root/a", to=b"/root/c")
        assert await refused(world, other) == "request-id-reused"
        failing = RemoveFile(incarnation=1, request_id="r-2", path=b"/root/none")
        assert await refused(world, failing) == "not-found"
        await write(world, b"/root/none", b"now it is there")
        await world.ask(failing)

    in_virtual_time(scenario)


def test_two_at_once_under_the_same_id_are_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await write(world, b"/root/a", b"x")
        move = MoveFile(incarnation=1, request_id="r-1", path=b"/root/a", to=b"/root/b")
        await asyncio.gather(*(world.ask(move) for _ in range(5)))
        assert await read(world, b"/root/b") == b"x"

    in_virtual_time(scenario)


def test_use_of_files_keeps_a_machine_awake_and_looking_on_does_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await write(world, b"/root/f", b"x")
        await world.clock.sleep(4)
        await world.ask(ListPrograms(incarnation=1))
        await world.ask(WatchDirectory(incarnation=1, path=b"/root", watch="w", wait_s=0.0))
        await world.command(world.suspend_vm(idle_s=5.0))
        failed: VmSuspendFailed = await world.last(VmSuspendFailed)
        assert (failed.code, world.state_of()) == ("in-use", "running")
        await world.clock.sleep(4)
        await world.ask(ListPrograms(incarnation=1))
        await world.command(world.suspend_vm(checkpoint_id="ckp-2", idle_s=5.0))
        assert "vm-suspended" in await world.tags()

    in_virtual_time(scenario)


def test_input_comes_in_order_once_and_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(exec_vm("cat", stdin="first ", stdin_open=True))
        feed = FeedProgram(incarnation=1, exec_id=X, offset=0)
        for _ in range(2):
            assert (await world.ask(feed, b"second "))[0].offset == 7
        assert await refused(world, FeedProgram(incarnation=1, exec_id=X, offset=9), b"x") == "stdin-gap"
        await world.ask(FeedProgram(incarnation=1, exec_id=X, offset=7, ends=True), b"third")
        end = await world.ended()
        await world.look()
        assert (end.exit_code, world.read().output) == (0, b"first second third")
        assert await refused(world, FeedProgram(incarnation=1, exec_id=ExecId("x-none"), offset=0)) == "exec-unknown"

    in_virtual_time(scenario)


def test_a_program_that_reads_nothing_holds_up_its_feeder_and_nobody_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(exec_vm("sleep", "100", stdin_open=True))
        for number in range(1024 * 1024 // PIECE_BYTES_MAX):
            request = FeedProgram(incarnation=1, exec_id=X, offset=number * PIECE_BYTES_MAX)
            await world.ask(request, bytes(PIECE_BYTES_MAX))
        assert await refused(world, FeedProgram(incarnation=1, exec_id=X, offset=1024 * 1024), b"x") == "stdin-full"
        await world.ask(StatFile(incarnation=1, path=b"/root"))

    in_virtual_time(scenario)


def test_a_shell_in_a_terminal_is_talked_to_and_resized(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(exec_vm("sh", terminal=TerminalSize(rows=10, columns=40)))
        given = 0
        for line in (b"stty size\r", b"echo hi > /root/f; cat /root/f\n"):
            given = (await world.ask(FeedProgram(incarnation=1, exec_id=X, offset=given), line))[0].offset
            await world.clock.sleep(1)
        await world.ask(ResizeTerminal(incarnation=1, exec_id=X, rows=50, columns=132))
        for line in (b"stty size\n", b"lost\x03exit 3\n"):
            given = (await world.ask(FeedProgram(incarnation=1, exec_id=X, offset=given), line))[0].offset
            await world.clock.sleep(1)
        end = await world.ended()
        await world.look()
        output = world.read().output.decode()
        assert end.exit_code == 3
        assert "10 40" in output
        assert "hi" in output
        assert "50 132" in output
        await world.command(exec_vm("sleep", "9", exec_id="x-plain"))
        plain = ResizeTerminal(incarnation=1, exec_id=ExecId("x-plain"), rows=1, columns=1)
        assert await refused(world, plain) == "no-terminal"

    in_virtual_time(scenario)


def test_programs_are_listed_and_signalled(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(exec_vm("sleep", "100", timeout_s=200))
        (one,) = (await world.ask(ListPrograms(incarnation=1)))[0].programs
        assert (one.exec_id, one.running) == ("x-1", True)
        assert 199 < one.remaining_s <= 200
        await world.ask(SignalProgram(incarnation=1, exec_id=X, signal=15))
        end = await world.ended()
        assert end.outcome == "signaled"

    in_virtual_time(scenario)


def test_a_shell_goes_on_in_a_fork_with_its_unread_input(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(exec_vm("sh", stdin_open=True))
        await world.ask(FeedProgram(incarnation=1, exec_id=X, offset=0), b"set word kept\necho ha")
        await world.command(world.checkpoint_vm())
        await world.eventually(lambda event: type(event).__name__ == "VmCheckpointed")
        fork = SessionId("s-fork")
        await world.command(world.start_vm(1, checkpoint_id=CKP, session_id=fork), "vm-fork")
        await world.ask(FeedProgram(incarnation=1, exec_id=X, offset=21, ends=True), b"lf\nget word\n", session_id=fork)
        await world.ended(stream="vm-fork")
        await world.look()
        pieces = [one.data for one in world.bus.stored if one.subject == f"out.acme.{fork}.{X}"]
        assert b"".join(pieces) == b"half\nkept\n"

    in_virtual_time(scenario)


def test_what_happens_in_a_directory_is_told_to_who_watches(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        watch = WatchDirectory(incarnation=1, path=b"/root", watch="w-1", wait_s=20.0)
        asking = asyncio.ensure_future(world.ask(watch))
        await asyncio.sleep(1)
        await write(world, b"/root/f", b"1")
        events = (await asking)[0].events
        assert [(one.kind, one.name) for one in events] == [("made", b"f")]
        await write(world, b"/root/f", b"22")
        await world.ask(RemoveFile(incarnation=1, path=b"/root/f"))
        events = (await world.ask(watch))[0].events
        assert [(one.kind, one.name) for one in events] == [("written", b"f"), ("removed", b"f")]
        began_s = world.clock.monotonic_s()
        assert (await world.ask(watch))[0].events == []
        assert 19 < world.clock.monotonic_s() - began_s < 22
        nowhere = WatchDirectory(incarnation=1, path=b"/none", watch="w-2", wait_s=5.0)
        assert await refused(world, nowhere) == "not-found"

    in_virtual_time(scenario)


def test_a_watch_that_is_not_asked_is_dropped_and_too_many_events_are_said_to_be(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        watch = WatchDirectory(incarnation=1, path=b"/root", watch="w-1", wait_s=0.0)
        await world.ask(watch)
        await asyncio.sleep(0.1)
        for number in range(1_100):
            await world.ask(MakeDirectory(incarnation=1, path=b"/root/%d" % number))
        await asyncio.sleep(0.1)
        events = (await world.ask(watch))[0].events
        assert len(events) == 1_001
        assert events[-1].kind == "overflow"
        await world.clock.sleep(100)
        other = WatchDirectory(incarnation=1, path=b"/root/0", watch="w-1", wait_s=0.0)
        assert (await world.ask(other))[0].events == [], "the id is free again"

    in_virtual_time(scenario)

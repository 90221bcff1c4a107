"""What every driver promises of a running guest's files, of the input of its programs, and of their terminals."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.driver_kits import DRIVER_KITS, using
from tests.support.drivers import (
    DriverKit,
    Taking,
    bounded,
    code_of,
    eventually,
    restored,
    run_program,
    started,
)
from torpor_contracts.guest import FileEntry, WatchEvent, WriteFile
from torpor_contracts.ids import ExecId, VmId
from torpor_contracts.session import ExecSpec, TerminalSize
from torpor_vm_host.guest_ports import STDIN_FULL
from torpor_vm_host.ports import EXEC_UNKNOWN, Driver, DriverError

X = ExecId("x-1")
ODD = [b" a b ", b"line\nbreak", b"\xff\xfe no text", "\u4e2d\u6587".encode(), b"-rf", b"b\\s", b"q'\"$`", b"x" * 255]
FED_BYTES_MAX = 64 * 1024 * 1024


@pytest.fixture(params=sorted(DRIVER_KITS))
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DriverKit]:
    yield from using(request, tmp_path)


async def write(driver: Driver, vm_id: VmId, path: bytes, *pieces: bytes, mode: int = 0o644) -> None:
    offset = 0
    for number, piece in enumerate(pieces, start=1):
        last = number == len(pieces)
        request = WriteFile(incarnation=1, path=path, upload="u1", offset=offset, last=last, mode=mode)
        offset = await driver.write_file(vm_id, request, piece)


async def names(driver: Driver, vm_id: VmId, path: bytes) -> list[bytes]:
    found: list[FileEntry] = []
    more = True
    while more:
        page = await driver.list_directory(vm_id, path, found[-1].name if found else b"", 3)
        assert len(page.entries) <= 3
        found += page.entries
        more = page.more
    return [entry.name for entry in found]


def test_a_file_takes_its_place_whole_with_its_last_piece(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        vm_id = (await started(kit, driver)).vm_id
        pieces = [bytes([number]) * 100_000 for number in range(4)]
        await write(driver, vm_id, b"/root/f", b"what was there before")
        first = WriteFile(incarnation=1, path=b"/root/f", upload="u2", offset=0, last=False)
        assert await driver.write_file(vm_id, first, pieces[0]) == 100_000
        assert (await driver.read_file(vm_id, b"/root/f", 0, 100)).data == b"what was there before"
        await write(driver, vm_id, b"/root/f", *pieces, mode=0o640)
        entry = await driver.stat_file(vm_id, b"/root/f")
        assert (entry.kind, entry.size_bytes, entry.mode & 0o777) == ("file", 400_000, 0o640)
        piece = await driver.read_file(vm_id, b"/root/f", 150_000, 100_000)
        assert piece.data == pieces[1][:50_000] + pieces[2][:50_000]
        assert piece.read.size_bytes == 400_000
        assert (await driver.read_file(vm_id, b"/root/f", 400_000, 100)).data == b""
        _, taking = await run_program(driver, vm_id, "cat", "/root/f")
        assert taking.stdout == b"".join(pieces)
        await driver.destroy(vm_id)

    bounded(scenario)


def test_a_piece_may_come_again_but_none_may_be_left_out(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        vm_id = (await started(kit, driver)).vm_id

        def piece(offset: int, *, last: bool = False) -> WriteFile:
            return WriteFile(incarnation=1, path=b"/root/f", upload="u1", offset=offset, last=last)

        assert await code_of(driver.write_file(vm_id, piece(5), b"no first")) == "upload-unknown"
        assert await driver.write_file(vm_id, piece(0), b"12345") == 5
        assert await driver.write_file(vm_id, piece(0), b"12345") == 5
        assert await code_of(driver.write_file(vm_id, piece(9), b"a gap")) == "upload-unknown"
        assert await driver.write_file(vm_id, piece(5, last=True), b"67") == 7
        assert (await driver.read_file(vm_id, b"/root/f", 0, 100)).data == b"1234567"
        await driver.destroy(vm_id)

    bounded(scenario)


def test_any_name_that_linux_allows(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        vm_id = (await started(kit, driver)).vm_id
        await driver.make_directory(vm_id, b"/root/odd", 0o755, None)
        for name in ODD:
            await write(driver, vm_id, b"/root/odd/" + name, name)
        assert await names(driver, vm_id, b"/root/odd") == sorted(ODD)
        for name in ODD:
            assert (await driver.read_file(vm_id, b"/root/odd/" + name, 0, 1000)).data == name
            assert (await driver.stat_file(vm_id, b"/root/odd/" + name)).size_bytes == len(name)
        await driver.move_file(vm_id, b"/root/odd/" + ODD[1], b"/root/odd/" + ODD[2])
        assert (await driver.read_file(vm_id, b"/root/odd/" + ODD[2], 0, 1000)).data == ODD[1]
        assert await names(driver, vm_id, b"/root/odd") == sorted({*ODD} - {ODD[1]})
        await driver.destroy(vm_id)

    bounded(scenario)


def test_directories_are_made_and_removed(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        vm_id = (await started(kit, driver)).vm_id
        for _ in range(2):
            await driver.make_directory(vm_id, b"/root/a/b/c", 0o755, None)
        assert (await driver.stat_file(vm_id, b"/root/a/b")).kind == "directory"
        await write(driver, vm_id, b"/root/a/f", b"")
        assert await code_of(driver.remove_file(vm_id, b"/root/a", recursive=False)) == "not-empty"
        await driver.remove_file(vm_id, b"/root/a/b/c", recursive=False)
        await driver.remove_file(vm_id, b"/root/a", recursive=True)
        assert await code_of(driver.stat_file(vm_id, b"/root/a")) == "not-found"
        await driver.destroy(vm_id)

    bounded(scenario)


def test_what_cannot_be_done_to_a_path_is_said(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        vm_id = (await started(kit, driver)).vm_id
        await driver.make_directory(vm_id, b"/root/d", 0o755, None)
        await write(driver, vm_id, b"/root/f", b"1")
        assert await code_of(driver.read_file(vm_id, b"/root/none", 0, 1)) == "not-found"
        assert await code_of(driver.read_file(vm_id, b"/root/d", 0, 1)) == "not-a-file"
        assert await code_of(driver.list_directory(vm_id, b"/root/f", b"", 9)) == "not-a-directory"
        assert await code_of(driver.list_directory(vm_id, b"/root/none", b"", 9)) == "not-found"
        assert await code_of(driver.make_directory(vm_id, b"/root/f", 0o755, None)) == "exists"
        assert await code_of(driver.make_directory(vm_id, b"/root/f/x", 0o755, None)) == "exists"
        assert await code_of(driver.move_file(vm_id, b"/root/none", b"/root/g")) == "not-found"
        assert await code_of(driver.remove_file(vm_id, b"/root/none", recursive=False)) == "not-found"
        assert await code_of(driver.stat_file(vm_id, b"root/f")) == "illegal-path"
        assert await code_of(driver.stat_file(vm_id, b"/root/f\0")) == "illegal-path"
        assert await code_of(driver.stat_file(vm_id, b"/root/" + b"x" * 256)) == "name-too-long"
        someone = WriteFile(incarnation=1, path=b"/root/g", upload="u", offset=0, last=True, user="nobody-here")
        assert await code_of(driver.write_file(vm_id, someone, b"1")) == "no-such-user"
        assert (await driver.read_file(vm_id, b"/root/f", 0, 9)).data == b"1"
        await driver.destroy(vm_id)

    bounded(scenario)


def test_files_go_on_across_checkpoint_and_restore(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        await write(driver, spec.vm_id, b"/root/" + ODD[2], b"kept", mode=0o600)
        spec = await restored(kit, driver, spec)
        assert (await driver.read_file(spec.vm_id, b"/root/" + ODD[2], 0, 9)).data == b"kept"
        assert (await driver.stat_file(spec.vm_id, b"/root/" + ODD[2])).mode & 0o777 == 0o600
        await driver.destroy(spec.vm_id)

    bounded(scenario)


def test_a_directory_is_watched(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        vm_id = (await started(kit, driver)).vm_id
        await driver.make_directory(vm_id, b"/root/d", 0o755, None)
        seen: list[WatchEvent] = []
        watching = asyncio.ensure_future(driver.watch_directory(vm_id, b"/root/d", seen.append))

        async def heard(name: bytes, *kinds: str) -> None:
            async def has() -> bool:
                return any(event.kind in kinds and event.name == name for event in seen)

            await eventually(has)

        await asyncio.sleep(0.3)
        await run_program(driver, vm_id, "sh", "-c", "echo 1 > /root/d/made")
        await heard(b"made", "made")
        await driver.move_file(vm_id, b"/root/d/made", b"/root/d/" + ODD[1])
        await heard(ODD[1], "moved-to", "made")
        await driver.remove_file(vm_id, b"/root/d/" + ODD[1], recursive=False)
        await heard(ODD[1], "removed")
        await driver.remove_file(vm_id, b"/root/d", recursive=True)
        async with asyncio.timeout(20):
            await watching
        assert seen[-1].kind == "gone"
        assert await code_of(driver.watch_directory(vm_id, b"/root/d", seen.append)) == "not-found"
        await driver.destroy(vm_id)

    bounded(scenario)


def following(driver: Driver, vm_id: VmId, taking: Taking, *argv: str, **spec: object) -> "asyncio.Future[object]":
    program = ExecSpec(argv=list(argv), **spec)  # type: ignore[arg-type]
    return asyncio.ensure_future(driver.exec(vm_id, X, program, taking))


async def has_begun(driver: Driver, vm_id: VmId) -> bool:
    return any(one.exec_id == X for one in await driver.execs(vm_id))


def test_input_comes_in_pieces_and_each_only_once(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        vm_id = (await started(kit, driver)).vm_id
        taking = Taking()
        running = following(driver, vm_id, taking, "cat", stdin="first ", stdin_open=True)
        await eventually(lambda: has_begun(driver, vm_id))
        assert await driver.feed(vm_id, X, b"second ", 0, ends=False) == 7
        assert await driver.feed(vm_id, X, b"second ", 0, ends=False) == 7
        assert await code_of(driver.feed(vm_id, X, b"x", 8, ends=False)) == "stdin-gap"
        assert await driver.feed(vm_id, X, b"ond third", 3, ends=True) == 12
        assert await code_of(driver.feed(vm_id, X, b"more", 12, ends=False)) in {"stdin-closed", EXEC_UNKNOWN}
        await running
        assert taking.stdout == b"first second third"
        assert await code_of(driver.feed(vm_id, ExecId("x-none"), b"x", 0, ends=False)) == EXEC_UNKNOWN
        await driver.destroy(vm_id)

    bounded(scenario)


def test_a_program_without_open_input_is_given_none(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        vm_id = (await started(kit, driver)).vm_id
        running = following(driver, vm_id, Taking(), "sleep", "60")
        await eventually(lambda: has_begun(driver, vm_id))
        assert await code_of(driver.feed(vm_id, X, b"x", 0, ends=False)) == "stdin-closed"
        assert await code_of(driver.resize(vm_id, X, TerminalSize(rows=1, columns=1))) == "no-terminal"
        await driver.kill(vm_id, X, 9)
        await running
        await driver.destroy(vm_id)

    bounded(scenario)


def test_a_program_that_reads_nothing_holds_up_who_feeds_it(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        vm_id = (await started(kit, driver)).vm_id
        running = following(driver, vm_id, Taking(), "sleep", "60", stdin_open=True)
        await eventually(lambda: has_begun(driver, vm_id))
        given = 0
        code = ""
        while not code and given < FED_BYTES_MAX:
            try:
                given = await driver.feed(vm_id, X, bytes(256 * 1024), given, ends=False)
            except DriverError as error:
                code = error.code
        assert code == STDIN_FULL
        assert (await run_program(driver, vm_id, "true"))[0].exit_code == 0
        await driver.kill(vm_id, X, 9)
        await running
        await driver.destroy(vm_id)

    bounded(scenario)


def test_open_input_goes_on_across_checkpoint_and_restore(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        taking = Taking()
        running = following(driver, spec.vm_id, taking, "cat", stdin_open=True)
        await eventually(lambda: has_begun(driver, spec.vm_id))
        assert await driver.feed(spec.vm_id, X, b"before ", 0, ends=False) == 7

        async def came_back() -> bool:
            return taking.stdout == b"before "

        await eventually(came_back)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        spec = await restored(kit, driver, spec)
        again = asyncio.ensure_future(driver.attach(spec.vm_id, X, taking))
        assert await driver.feed(spec.vm_id, X, b"before after", 0, ends=True) == 12
        assert (await again).exit_code == 0
        assert taking.stdout == b"before after"
        await driver.destroy(spec.vm_id)

    bounded(scenario)


def test_a_terminal_has_a_size_and_is_resized(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        vm_id = (await started(kit, driver)).vm_id
        taking = Taking()
        running = following(driver, vm_id, taking, "sh", terminal=TerminalSize(rows=10, columns=40))
        await eventually(lambda: has_begun(driver, vm_id))
        given = await driver.feed(vm_id, X, b"stty size\r", 0, ends=False)

        def has_said(text: bytes) -> object:
            async def said() -> bool:
                return text in taking.stdout

            return eventually(said)

        async with asyncio.timeout(20):
            await has_said(b"10 40\r\n")  # type: ignore[misc]
            await driver.resize(vm_id, X, TerminalSize(rows=50, columns=132))
            given = await driver.feed(vm_id, X, b"stty size; no-such-program\r", given, ends=False)
            await has_said(b"50 132\r\n")  # type: ignore[misc]
            await has_said(b"not found")  # type: ignore[misc]
            await driver.feed(vm_id, X, b"\x04", given, ends=False)
            await running
        assert taking.stderr == b""
        await driver.destroy(vm_id)

    bounded(scenario)

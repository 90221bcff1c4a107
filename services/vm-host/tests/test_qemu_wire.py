"""The sockets to QEMU: bytes whole and in order, and the machine protocol against a server that follows a script."""

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from torpor_vm_host.adapters.qemu.qmp import LINE_BYTES_MAX, QmpRefused, QmpSession
from torpor_vm_host.adapters.qemu.wire import CROWDED_BYTES, Wire, connected, listening_at

GREETING = b'{"QMP": {"version": {}, "capabilities": []}}\r\n'


def bounded(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(within())


async def take(end: socket.socket, count: int) -> bytes:
    end.setblocking(False)
    found = b""
    while len(found) < count:
        found += await asyncio.get_running_loop().sock_recv(end, 1 << 20)
    return found


class Ends:
    """A wire and the other end of its connection."""

    def __init__(self) -> None:
        ours, self.other = socket.socketpair()
        self.received = b""
        self.ends = 0
        self.over = asyncio.Event()
        self.wire = Wire(ours, self._data, self._end)

    def _data(self, data: bytes) -> None:
        self.received += data

    def _end(self) -> None:
        self.ends += 1
        self.over.set()


def test_much_is_sent_whole_and_in_order_and_holds_the_sender_up() -> None:
    async def scenario() -> None:
        ends = Ends()
        whole = b"".join(number.to_bytes(4, "big") for number in range(CROWDED_BYTES))
        for at in range(0, len(whole), 99_999):
            ends.wire.send(whole[at : at + 99_999])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ends.wire.drained(), 0.01)
        assert await take(ends.other, len(whole)) == whole
        await ends.wire.drained()
        ends.wire.close()
        ends.other.close()

    bounded(scenario)


def test_the_end_is_told_once_whoever_ends_it() -> None:
    async def scenario() -> None:
        theirs, ours = Ends(), Ends()
        theirs.other.sendall(b"last words")
        theirs.other.close()
        await theirs.over.wait()
        assert (theirs.received, theirs.ends, theirs.wire.is_open) == (b"last words", 1, False)
        ours.wire.close()
        ours.wire.close()
        assert ours.ends == 1
        for ends in (theirs, ours):
            with pytest.raises(ConnectionError):
                ends.wire.send(b"x")
            with pytest.raises(ConnectionError):
                await ends.wire.drained()
        ours.other.close()

    bounded(scenario)


def test_who_waits_until_it_is_drained_hears_of_the_end() -> None:
    async def scenario() -> None:
        ends = Ends()
        ends.wire.send(bytes(4 * CROWDED_BYTES))
        waiting = asyncio.ensure_future(ends.wire.drained())
        await asyncio.sleep(0)
        ends.wire.close()
        with pytest.raises(ConnectionError):
            await waiting
        ends.other.close()

    bounded(scenario)


def test_an_open_file_goes_with_its_bytes() -> None:
    async def scenario() -> None:
        ends = Ends()
        read, write = os.pipe()
        ends.wire.send(b"take it", (write,))
        os.close(write)
        data, (theirs,), _, _ = socket.recv_fds(ends.other, 100, 1)
        assert data == b"take it"
        os.write(theirs, b"through it")
        os.close(theirs)
        assert os.read(read, 100) == b"through it"
        os.close(read)
        ends.wire.send(bytes(4 * CROWDED_BYTES))
        with pytest.raises(BlockingIOError):  # what waits has no place for a file
            ends.wire.send(b"x", (0,))
        ends.wire.close()
        ends.other.close()

    bounded(scenario)


def test_sockets_may_lie_deeper_than_their_addresses_are_long(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 100) / ("e" * 100)
    folder.mkdir(parents=True)
    listening = listening_at(folder / "one.sock")
    connecting = connected(folder / "one.sock")
    accepted, _ = listening.accept()
    connecting.send(b"hello")
    assert accepted.recv(10) == b"hello"
    for one in (connecting, accepted, listening):
        one.close()
    with pytest.raises(OSError, match="refused"):
        connected(folder / "one.sock")
    listening_at(folder / "one.sock").close()  # what an earlier process left is replaced


class Scripted:
    """A QMP server of a few lines: greets, and answers each command as the script says."""

    def __init__(self, path: Path, script: Callable[[dict[str, Any]], list[bytes]]) -> None:
        self.heard: list[dict[str, Any]] = []
        self._listening = listening_at(path)
        self._script = script
        self._pending = b""
        self.connection: socket.socket | None = None

    async def serve(self, greeting: bytes = GREETING) -> None:
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        self.connection, _ = await loop.sock_accept(self._listening)
        self.connection.setblocking(False)
        await loop.sock_sendall(self.connection, greeting)
        while data := await loop.sock_recv(self.connection, 65536):
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                self.heard.append(command)
                for said in self._script(command):
                    await loop.sock_sendall(self.connection, said)

    def close(self) -> None:
        self._listening.close()
        if self.connection is not None:
            self.connection.close()


def answered(command: dict[str, Any], value: Any = None) -> bytes:
    return json.dumps({"return": value or {}, "id": command["id"]}).encode() + b"\r\n"


def with_server(
    tmp_path: Path,
    script: Callable[[dict[str, Any]], list[bytes]],
    scenario: Callable[[QmpSession, Scripted], Awaitable[None]],
) -> None:
    async def within() -> None:
        server = Scripted(tmp_path / "qmp.sock", script)
        serving = asyncio.ensure_future(server.serve())
        session = QmpSession(tmp_path / "qmp.sock")
        try:
            await session.greet()
            await scenario(session, server)
        finally:
            session.close()
            serving.cancel()
            server.close()

    bounded(within)


def test_commands_sent_together_get_each_its_own_answer(tmp_path: Path) -> None:
    held: list[bytes] = []

    def script(command: dict[str, Any]) -> list[bytes]:
        if command["execute"] == "qmp_capabilities":
            return [answered(command)]
        held.append(answered(command, command["arguments"]))
        return held[::-1] if len(held) == 3 else []  # the last first

    async def scenario(session: QmpSession, server: Scripted) -> None:
        sent = [session.send("say", {"number": number}) for number in range(3)]
        assert [await one for one in sent] == [{"number": number} for number in range(3)]
        assert [one["execute"] for one in server.heard] == ["qmp_capabilities", "say", "say", "say"]

    with_server(tmp_path, script, scenario)


def test_what_qemu_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    def script(command: dict[str, Any]) -> list[bytes]:
        if command["execute"] == "qmp_capabilities":
            return [answered(command)]
        error = {"error": {"class": "GenericError", "desc": "no such node"}, "id": command["id"]}
        return [json.dumps(error).encode() + b"\n"]

    async def scenario(session: QmpSession, _server: Scripted) -> None:
        with pytest.raises(QmpRefused, match="no such node"):
            await session.send("blockdev-del")
        assert session.is_open

    with_server(tmp_path, script, scenario)


def test_events_are_heard_between_answers_however_they_are_cut(tmp_path: Path) -> None:
    def script(command: dict[str, Any]) -> list[bytes]:
        stop = b'{"event": "STOP", "timestamp": {}}\n{"event": "JOB_STATUS_CHANGE", "data": {"id": "a"}}\n'
        whole = stop + answered(command)
        return [whole[at : at + 7] for at in range(0, len(whole), 7)]

    async def scenario(session: QmpSession, _server: Scripted) -> None:
        heard: list[tuple[str, dict[str, Any]]] = []
        session.on_event = lambda name, data: heard.append((name, data))
        await session.send("stop")
        assert heard == [("STOP", {}), ("JOB_STATUS_CHANGE", {"id": "a"})]

    with_server(tmp_path, script, scenario)


@pytest.mark.parametrize("nonsense", [b"QEMU 7.2 monitor\n", b"[]\n", b'"QMP"\n', b"{" * LINE_BYTES_MAX + b"{{"])
def test_who_speaks_another_language_is_hung_up_on(tmp_path: Path, nonsense: bytes) -> None:
    def script(command: dict[str, Any]) -> list[bytes]:
        return [answered(command) if command["execute"] == "qmp_capabilities" else nonsense]

    async def scenario(session: QmpSession, _server: Scripted) -> None:
        with pytest.raises(ConnectionError):
            await session.send("query-status")
        assert not session.is_open
        with pytest.raises(ConnectionError):
            session.send("query-status")

    with_server(tmp_path, script, scenario)


def test_a_qemu_that_ends_leaves_nobody_waiting(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = Scripted(tmp_path / "qmp.sock", lambda _: [])
        serving = asyncio.ensure_future(server.serve())
        session = QmpSession(tmp_path / "qmp.sock")
        greeting = asyncio.ensure_future(session.greet())
        sent = session.send("query-status")
        while not server.heard:  # noqa: ASYNC110  (the server's task hears it)
            await asyncio.sleep(0)
        serving.cancel()
        server.close()
        for one in (greeting, sent):
            with pytest.raises(ConnectionError):
                await one

    bounded(scenario)

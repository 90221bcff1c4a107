"""Following a guest's programs over its channel: every byte once and in order, whatever else the guest says."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.drivers import Taking, code_of
from torpor_contracts.ids import ExecId
from torpor_guest_agent.frames import Frame, Frames, encode
from torpor_vm_host.adapters.qemu.following import Followers
from torpor_vm_host.adapters.qemu.guest import NONSENSE, GuestChannel, Identity
from torpor_vm_host.ports import VM_GONE

X = ExecId("x-1")
IDENTITY = Identity(session_id="s-1", incarnation=1, epoch="e-1", hostname="s-1", machine_id="0" * 32)

Said = list[Frame]


class Guest:
    """The guest's end of a channel: answers each request with what `answers` says, after `before` of it."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self.answers: dict[str, dict[str, Any]] = {"hello": {"programs": []}}
        self.before: dict[str, Said] = {}
        self.heard: list[dict[str, Any]] = []

    async def serve(self) -> None:
        loop, frames = asyncio.get_running_loop(), Frames()
        while data := await loop.sock_recv(self._end, 65536):
            for frame in frames.feed(data):
                self.heard.append(frame.header)
                op = frame.header["op"]
                for said in self.before.get(op, ()):
                    await self.say(said)
                if "id" in frame.header:
                    await self.say(Frame({"re": frame.header["id"], "ok": True, **self.answers.get(op, {})}))

    async def say(self, frame: Frame) -> None:
        await asyncio.get_running_loop().sock_sendall(self._end, encode(frame))

    def hang_up(self) -> None:
        self._end.close()


def output(offset: int, data: bytes, stream: str = "stdout") -> Frame:
    return Frame({"event": "output", "exec_id": X, "stream": stream, "offset": offset}, data)


def end(offset: int) -> Frame:
    return Frame({"event": "end", "exec_id": X, "outcome": "exited", "exit_code": 0, "offset": offset})


def with_guest(scenario: Callable[[GuestChannel, Guest], Awaitable[None]]) -> None:
    async def within() -> None:
        ours, theirs = socket.socketpair()
        channel, guest = GuestChannel(ours), Guest(theirs)
        serving = asyncio.ensure_future(guest.serve())
        try:
            async with asyncio.timeout(20):
                await channel.hello(IDENTITY, lambda: 0, 5.0)
                await scenario(channel, guest)
        finally:
            serving.cancel()
            channel.close()
            guest.hang_up()

    asyncio.run(within())


def attaching(channel: GuestChannel) -> Callable[[], Awaitable[Frame]]:
    return lambda: channel.request("attach", {"exec_id": X})


@pytest.mark.parametrize(
    "before",
    [
        [output(0, b"one "), output(4, b"two"), end(7)],
        # It was writing when we came: what it says before it hears us comes once more, from the beginning.
        [output(4, b"two"), output(0, b"one "), output(4, b"two"), end(7)],
        # It ended when we came.
        [end(7), output(0, b"one "), output(4, b"two"), end(7)],
        [output(0, b"one "), output(0, b"one "), output(4, b"two"), end(7), end(7)],
    ],
)
def test_who_attaches_gets_each_byte_once_and_in_order(before: Said) -> None:
    async def scenario(channel: GuestChannel, guest: Guest) -> None:
        guest.before["attach"], guest.answers["attach"] = before, {"first_offset": 0}
        taking = Taking()
        outcome = await Followers(channel).follow(X, attaching(channel), taking)
        assert (taking.stdout, outcome.output_bytes, outcome.exit_code) == (b"one two", 7, 0)

    with_guest(scenario)


def test_who_attaches_later_begins_where_the_guest_has_something_left() -> None:
    async def scenario(channel: GuestChannel, guest: Guest) -> None:
        guest.before["attach"], guest.answers["attach"] = [output(100, b"rest"), end(104)], {"first_offset": 100}
        taken: list[tuple[int, bytes]] = []

        async def take(one: Any) -> None:
            taken.append((one.offset, one.data))

        await Followers(channel).follow(X, attaching(channel), take)
        assert taken == [(100, b"rest")]
        confirmed = [one["offset"] for one in guest.heard if one["op"] == "confirm"]
        assert confirmed in ([104], [])  # it may be on its way still

    with_guest(scenario)


@pytest.mark.parametrize("said", [{"event": "end", "exec_id": X}, {"event": "output", "exec_id": X, "offset": "one"}])
def test_a_guest_that_talks_nonsense_is_an_error(said: dict[str, Any]) -> None:
    async def scenario(channel: GuestChannel, guest: Guest) -> None:
        guest.before["attach"] = [Frame(said)]
        assert await code_of(Followers(channel).follow(X, attaching(channel), Taking())) == NONSENSE
        guest.before["attach"], guest.answers["attach"] = [], {"first_offset": "nowhere"}
        assert await code_of(Followers(channel).follow(X, attaching(channel), Taking())) == NONSENSE

    with_guest(scenario)


def test_a_channel_that_breaks_ends_the_following() -> None:
    async def scenario(channel: GuestChannel, guest: Guest) -> None:
        following = asyncio.ensure_future(Followers(channel).follow(X, attaching(channel), Taking()))
        await guest.say(output(0, b"something"))
        channel.close()
        assert await code_of(following) == VM_GONE

    with_guest(scenario)

"""The host's end of the channel to a guest's agent: requests with answers, events, and the hello of each epoch."""

import asyncio
import itertools
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from torpor_guest_agent.frames import Frame, Frames, encode
from torpor_vm_host.adapters.qemu.wire import Wire, connected
from torpor_vm_host.ports import VM_GONE, DriverError

NONSENSE: Final = "guest-nonsense"
ENTROPY_BYTES: Final = 64
REQUEST_S: Final = 30.0
HELLO_TRIES_S: Final = 2.0
"""A hello that is not answered for so long is sent again: a guest that boots drops what came before its agent."""

WallClock = Callable[[], int]
"""Nanoseconds since the Unix epoch, UTC."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a guest is to be from now on. `epoch` is new with every start, restore and fork."""

    session_id: str
    incarnation: int
    epoch: str
    hostname: str
    machine_id: str


class GuestChannel:
    """One connection to one guest's agent. What the guest said to an earlier host is not heard."""

    def __init__(self, connection: socket.socket) -> None:
        # Answers to another host's requests may still be on their way out of the guest: no number is used twice.
        self._ids = itertools.count(secrets.randbits(48))
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._frames = Frames()
        self._greeted = False
        self.on_event: Callable[[Frame], None] = lambda _: None
        self._wire = Wire(connection, self._arrived, self._over)
        self._wire.send(b"\x00")

    @classmethod
    def connect(cls, socket_path: Path) -> "GuestChannel":
        """Connect to the socket the engine listens on; raises `DriverError("vm-gone")`."""
        try:
            return cls(connected(socket_path))
        except OSError as error:
            raise _closed(f"the guest's channel is closed: {error}") from error

    @property
    def is_open(self) -> bool:
        """Whether the guest can still be told anything."""
        return self._wire.is_open

    async def hello(self, identity: Identity, wall_ns: WallClock, timeout_s: float) -> list["KnownProgram"]:
        """Give the guest its identity, time and randomness; answers the programs it knows.

        Raises `DriverError("guest-silent")` when the agent does not answer in time.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while (left := deadline - clock()) > 0:
            header = {**msgspec.to_builtins(identity), "clock_ns": wall_ns()}
            try:
                answer = await self._ask("hello", header, os.urandom(ENTROPY_BYTES), min(left, HELLO_TRIES_S))
            except TimeoutError:
                continue
            self._greeted = True
            # A cold clock is set late by the time the guest took to get there; the second setting comes at once.
            self.tell("clock", {"clock_ns": wall_ns()})
            return programs_of(answer)
        raise DriverError("guest-silent", f"the guest's agent did not answer for {timeout_s} s", retryable=True)

    async def request(
        self, op: str, header: dict[str, Any] | None = None, body: bytes = b"", *, timeout_s: float = REQUEST_S
    ) -> Frame:
        """Ask the agent and wait for its answer; `DriverError` when it refuses, is silent, or is gone."""
        try:
            return await self._ask(op, header or {}, body, timeout_s)
        except TimeoutError as error:
            detail = f"the guest's agent did not answer {op!r} for {timeout_s} s"
            raise DriverError("guest-silent", detail, retryable=True) from error

    def tell(self, op: str, header: dict[str, Any]) -> None:
        """Ask the agent for something that it does not answer."""
        self._send(Frame({"op": op, **header}))

    def close(self) -> None:
        """Let go of the guest; it goes on."""
        self._wire.close()

    async def _ask(self, op: str, header: dict[str, Any], body: bytes, timeout_s: float) -> Frame:
        number = next(self._ids)
        waiting: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._answers[number] = waiting
        try:
            self._send(Frame({"op": op, "id": number, **header}, body))
            async with asyncio.timeout(timeout_s):
                await self._wire.drained()
                answer = await waiting
        except ConnectionError as error:
            raise _closed(f"the guest's channel broke: {error}") from error
        finally:
            self._answers.pop(number, None)
        if answer.header.get("ok") is not True:
            code, message = answer.header.get("code", NONSENSE), answer.header.get("message", "")
            raise DriverError(str(code), str(message), retryable=False)
        return answer

    def _send(self, frame: Frame) -> None:
        try:
            self._wire.send(encode(frame))
        except OSError as error:
            raise _closed(f"the guest's channel broke: {error}") from error

    def _arrived(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            if "re" in frame.header:
                number = frame.header["re"]
                waiting = self._answers.get(number) if isinstance(number, int) else None
                if waiting is not None and not waiting.done():
                    waiting.set_result(frame)
            elif self._greeted and "event" in frame.header:
                self.on_event(frame)

    def _over(self) -> None:
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(_closed("the guest's channel was closed"))
        self.on_event(Frame({"event": "closed"}))


class KnownProgram(msgspec.Struct, frozen=True):
    """What an agent says of a program it knows."""

    exec_id: str
    running: bool
    remaining_s: float | None = None


def programs_of(answer: Frame) -> list[KnownProgram]:
    """The programs an answer lists; `DriverError("guest-nonsense")` when it is not understood: guests may lie."""
    try:
        return msgspec.convert(answer.header.get("programs"), list[KnownProgram])
    except msgspec.ValidationError as error:
        detail = f"the guest's agent says what no agent of ours does: {error}"
        raise DriverError(NONSENSE, detail, retryable=False) from error


def _closed(detail: str) -> DriverError:
    return DriverError(VM_GONE, detail, retryable=False)

"""The host's end of the channel to a guest's agent: requests with answers, events, and the hello of each epoch."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from torpor_guest_agent.frames import Frame, Frames, encode
from torpor_vm_host.adapters.qemu.process import connected
from torpor_vm_host.ports import DriverError

READ_BYTES: Final = 256 * 1024
ENTROPY_BYTES: Final = 64
HELLO_TRIES_S: Final = 2.0
"""A hello that is not answered for so long is sent again: a guest that boots drops what came before its agent."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a guest is to be from now on. `epoch` is new with every start, restore and fork."""

    session_id: str
    incarnation: int
    epoch: str
    hostname: str
    machine_id: str


class GuestChannel:
    """One connection to one guest's agent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._epoch: str | None = None
        self.on_event: Callable[[Frame], None] = lambda _: None
        self._reading = asyncio.get_running_loop().create_task(self._read())
        self._writer.write(b"\x00")

    @classmethod
    async def connect(cls, socket_path: Path) -> "GuestChannel":
        """Connect to the socket QEMU listens on."""
        try:
            reader, writer = await asyncio.open_unix_connection(sock=connected(socket_path), limit=READ_BYTES)
        except OSError as error:
            raise DriverError("vm-gone", f"the guest's channel is closed: {error}", retryable=False) from error
        return cls(reader, writer)

    async def hello(self, identity: Identity, timeout_s: float) -> list[dict[str, Any]]:
        """Give the guest its identity, time and randomness; answers the programs it knows.

        Raises `DriverError("guest-silent")` when the agent does not answer in time.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while True:
            left = deadline - clock()
            if left <= 0:
                raise DriverError("guest-silent", f"the guest's agent did not answer for {timeout_s} s", retryable=True)
            header = {**msgspec.to_builtins(identity), "clock_ns": time.time_ns()}
            try:
                answer = await self.request(
                    "hello", header, os.urandom(ENTROPY_BYTES), timeout_s=min(left, HELLO_TRIES_S)
                )
            except TimeoutError:
                continue
            break
        # The first setting of a cold clock comes out late by the time the guest took to get there; the second does not.
        await self.request("clock", {"clock_ns": time.time_ns()}, timeout_s=timeout_s)
        programs: list[dict[str, Any]] = answer.header["programs"]
        return programs

    async def request(
        self, op: str, header: dict[str, Any] | None = None, body: bytes = b"", *, timeout_s: float = 30.0
    ) -> Frame:
        """Ask the agent and wait for its answer: `DriverError` when it refuses, `TimeoutError` when it is silent."""
        number = next(self._ids)
        waiting: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._answers[number] = waiting
        try:
            self._writer.write(encode(Frame({"op": op, "id": number, **(header or {})}, body)))
            await self._writer.drain()
            async with asyncio.timeout(timeout_s):
                answer = await waiting
        except ConnectionError as error:
            raise DriverError("vm-gone", f"the guest's channel broke: {error}", retryable=False) from error
        finally:
            self._answers.pop(number, None)
        if not answer.header["ok"]:
            raise DriverError(answer.header["code"], answer.header["message"], retryable=False)
        return answer

    async def tell(self, op: str, header: dict[str, Any]) -> None:
        """Ask the agent for something whose answer nobody waits for."""
        self._writer.write(encode(Frame({"op": op, "id": 0, **header})))
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise DriverError("vm-gone", f"the guest's channel broke: {error}", retryable=False) from error

    def abort(self) -> None:
        """Cut the connection without a word."""
        self._reading.cancel()
        self._writer.transport.abort()

    async def close(self) -> None:
        """Let go of the guest; it goes on."""
        self._reading.cancel()
        self._writer.close()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        frames = Frames()
        try:
            while data := await self._reader.read(READ_BYTES):
                for frame in frames.feed(data):
                    self._take(frame)
        except ConnectionError:
            pass
        finally:
            gone = DriverError("vm-gone", "the guest's channel was closed", retryable=False)
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(gone)
            self.on_event(Frame({"event": "closed"}))

    def _take(self, frame: Frame) -> None:
        if "re" in frame.header:
            waiting = self._answers.get(frame.header["re"])
            if waiting is not None and not waiting.done():
                waiting.set_result(frame)
        elif "event" in frame.header:
            self.on_event(frame)

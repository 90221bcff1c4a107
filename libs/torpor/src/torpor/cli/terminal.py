"""Our own terminal or input, given to a program: every key as it is typed, the size as it changes, and all put back."""

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Final

from torpor.client.models import Chunk
from torpor.client.programs import Program
from torpor.errors import InvalidRequest, Unavailable, WrongState

DETACH: Final = b"\x10\x11"
"""Ctrl-P Ctrl-Q: let go of the program, which goes on."""
KEYS_MAX: Final = 256 * 1024
"""Bytes of input that wait for the program, before we read no more."""
READ_BYTES: Final = 64 * 1024
FALLBACK_SIZE: Final = (24, 80)


class Detached(Exception):  # noqa: N818  (nothing is wrong)
    """Whoever sits at the terminal has let go of the program."""


def required() -> None:
    """Refuse unless our input and output are a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequest(
            "no-terminal", "our own input and output are no terminal", "leave -t out: -i gives a pipe to the program"
        )


def size() -> tuple[int, int]:
    """Rows and columns of our terminal."""
    try:
        found = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return FALLBACK_SIZE
    return (found.lines, found.columns) if found.lines and found.columns else FALLBACK_SIZE


@contextmanager
def raw(descriptor: int) -> Iterator[None]:
    """Every key is given on, Ctrl-C too; the terminal is what it was afterwards, however that comes about."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class _Input:
    """What has come from a descriptor and nobody has taken yet; when that is much, no more is read."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._kept = bytearray()
        self._changed = asyncio.Event()
        self._reading = False
        self._ended = False

    async def take(self) -> bytes:
        """All that has come, after waiting for some of it; nothing at the end."""
        if not self._kept and not self._ended:
            self._read_on()
            self._changed.clear()
            if not self._kept and not self._ended:
                await self._changed.wait()
        data = bytes(self._kept)
        self._kept.clear()
        return data

    def close(self) -> None:
        """Read no more."""
        if self._reading:
            self._loop.remove_reader(self._descriptor)
            self._reading = False

    def _read_on(self) -> None:
        if self._reading:
            return
        try:
            self._loop.add_reader(self._descriptor, self._read)
            self._reading = True
        except PermissionError:  # a plain file, which never keeps anybody waiting
            self._read()

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # a terminal that was hung up
            data = b""
        self._kept += data
        self._ended = not data
        if self._ended or len(self._kept) >= KEYS_MAX:
            self.close()
        self._changed.set()


async def typed(descriptor: int) -> AsyncGenerator[bytes, None]:
    """What comes from a terminal, a pipe or a file, as it comes; nobody is kept waiting by a read."""
    source = _Input(descriptor)
    try:
        while data := await source.take():
            yield data
    finally:
        source.close()


async def until_detached(keys: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The keys; raises `Detached` at Ctrl-P Ctrl-Q. A Ctrl-P waits for the key after it."""
    held = b""
    async for typed_now in keys:
        data = held + typed_now
        before, detach, _ = data.partition(DETACH)
        if detach:
            if before:
                yield before
            raise Detached
        held = DETACH[:1] if data.endswith(DETACH[:1]) else b""
        data = data.removesuffix(held) if held else data
        if data:
            yield data


async def give(program: Program, keys: AsyncIterator[bytes]) -> None:
    """Give all that is typed to a program, and its end; a program that ends first has read enough."""
    with suppress(WrongState):
        async for data in keys:
            await program.write(data)
        await program.end_input()


@asynccontextmanager
async def sized(program: Program) -> AsyncIterator[None]:
    """Give our terminal's size to the program's whenever it changes."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    async def follow() -> None:
        while True:
            await changed.wait()
            changed.clear()
            with suppress(WrongState, Unavailable):
                await program.resize(*size())

    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    following = asyncio.create_task(follow(), name="resize")
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def held_together(program: Program, output: AsyncGenerator[Chunk, None], *, terminal: bool) -> None:
    """Our terminal, or with `terminal` False our input, and a program's output, until that ends.

    Raises `Detached`. The terminal is put back whatever happens, also when we are told to end.
    """
    main, loop, descriptor = asyncio.current_task(), asyncio.get_running_loop(), sys.stdin.fileno()
    assert main is not None
    if not terminal:
        await _pumped(program, output, typed(descriptor))
        return
    with raw(descriptor):
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, main.cancel)
        async with sized(program):
            await _pumped(program, output, until_detached(typed(descriptor)))


async def _pumped(program: Program, output: AsyncGenerator[Chunk, None], keys: AsyncGenerator[bytes, None]) -> None:
    giving = asyncio.create_task(_given(program, keys), name="give input")
    writing = asyncio.create_task(written(output), name="write output")
    try:
        await asyncio.wait({giving, writing}, return_when=asyncio.FIRST_COMPLETED)
        if giving.done():
            giving.result()
        await writing
    finally:
        for task in (giving, writing):
            task.cancel()
        await asyncio.gather(giving, writing, return_exceptions=True)


async def _given(program: Program, keys: AsyncGenerator[bytes, None]) -> None:
    async with aclosing(keys):
        await give(program, keys)


async def written(output: AsyncGenerator[Chunk, None]) -> None:
    """Write output as it comes, to its end."""
    async with aclosing(output) as chunks:
        async for chunk in chunks:
            write(chunk)


def write(chunk: Chunk) -> None:
    """Write output where it belongs, at once."""
    stream = sys.stdout if chunk.stream == "stdout" else sys.stderr
    stream.buffer.write(chunk.data)
    stream.flush()

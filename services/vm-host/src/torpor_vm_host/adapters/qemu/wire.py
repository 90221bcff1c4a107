"""A connected socket in the event loop, without a task: what arrives is handed on, what is sent is queued."""

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

READ_BYTES: Final = 256 * 1024
CROWDED_BYTES: Final = 1024 * 1024
"""What may wait to be sent before `drained` holds the sender up."""


class Wire:
    """Calls `on_data` with what arrives, and `on_end` once when the connection is over, whoever ended it."""

    def __init__(self, connection: socket.socket, on_data: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._connection: socket.socket | None = connection
        self._on_data = on_data
        self._on_end = on_end
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self._loop.add_reader(connection, self._readable)

    @property
    def is_open(self) -> bool:
        """Whether the connection is not over."""
        return self._connection is not None

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send, in order; descriptors go with the first byte. Raises `ConnectionError` when the connection is over."""
        if self._connection is None:
            raise ConnectionResetError("the connection is closed")
        sent = 0
        if not self._waiting:
            try:
                sent = (
                    socket.send_fds(self._connection, [data], descriptors)
                    if descriptors
                    else self._connection.send(data)
                )
            except BlockingIOError:
                sent = 0
            except OSError:
                self.close()
                raise
        if descriptors and not sent:
            raise BlockingIOError("the connection is busy, and a descriptor cannot wait")
        if sent < len(data):
            self._queue(memoryview(data)[sent:])

    async def drained(self) -> None:
        """Wait until not much waits to be sent; `ConnectionError` when the connection is over."""
        await self._drained.wait()
        if self._connection is None:
            raise ConnectionResetError("the connection is closed")

    def close(self) -> None:
        """End the connection; idempotent, and allowed when the event loop is no more."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._loop.remove_reader(connection)
        self._loop.remove_writer(connection)
        connection.close()
        self._waiting.clear()
        if not self._loop.is_closed():
            self._drained.set()
            self._on_end()

    def _queue(self, rest: memoryview) -> None:
        assert self._connection is not None
        if not self._waiting:
            self._loop.add_writer(self._connection, self._writable)
        self._waiting.append(rest)
        self._waiting_bytes += len(rest)
        if self._waiting_bytes > CROWDED_BYTES:
            self._drained.clear()

    def _writable(self) -> None:
        assert self._connection is not None
        while self._waiting:
            try:
                sent = self._connection.send(self._waiting[0])
            except BlockingIOError:
                break
            except OSError:
                self.close()
                return
            self._waiting_bytes -= sent
            if sent < len(self._waiting[0]):
                self._waiting[0] = self._waiting[0][sent:]
            else:
                self._waiting.popleft()
        if not self._waiting:
            self._loop.remove_writer(self._connection)
        if self._waiting_bytes <= CROWDED_BYTES:
            self._drained.set()

    def _readable(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._on_data(data)
        else:
            self.close()


def listening_at(path: Path) -> socket.socket:
    """A Unix socket that listens at `path`."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(path) as name:
        listening.bind(name)
    listening.listen(4)
    return listening


def connected(path: Path) -> socket.socket:
    """A socket connected to the one that listens at `path`; raises `OSError` when nobody does."""
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # A listener whose queue is full, as nobody takes what waits in it, holds nobody up.
    connecting.setblocking(False)
    try:
        with _short(path) as name:
            connecting.connect(name)
    except OSError:
        connecting.close()
        raise
    return connecting


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """The path by its folder's descriptor: a Unix socket's own may not be longer than 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)

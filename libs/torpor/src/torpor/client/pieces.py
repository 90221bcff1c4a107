"""What is to be written into a guest, in pieces of one size; some sources can be read again from their beginning."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from torpor.errors import InvalidRequest
from torpor_contracts.guest import PIECE_BYTES_MAX

Content = bytes | bytearray | memoryview | Path | BinaryIO | Iterable[bytes] | AsyncIterable[bytes]
"""What can be written: bytes, a local file, an open binary file or a stream of bytes."""


class Source(Protocol):
    """Gives pieces in order."""

    async def piece(self) -> bytes:
        """The next piece: `PIECE_BYTES_MAX` bytes, fewer only at the end, then none."""
        ...

    async def rewind(self) -> bool:
        """Begin again; whether that can be done."""
        ...

    def close(self) -> None:
        """Let go of what we opened ourselves."""
        ...


def source_of(content: Content) -> Source:
    """The source that reads `content`; raises `OSError` for a local file that cannot be opened."""
    if isinstance(content, str):
        raise InvalidRequest(
            "illegal-content", "files are bytes, and this is text", "encode it, or give a pathlib.Path"
        )
    if isinstance(content, bytes | bytearray | memoryview):
        return _Bytes(memoryview(content).cast("B"))
    if isinstance(content, Path):
        return _File(content.open("rb"), ours=True)
    if hasattr(content, "read"):
        return _File(cast("BinaryIO", content), ours=False)
    if isinstance(content, AsyncIterable):
        return _Stream(aiter(content))
    return _Stream(_asynchronous(iter(content)))


class _Bytes:
    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._offset = 0

    async def piece(self) -> bytes:
        piece = bytes(self._content[self._offset : self._offset + PIECE_BYTES_MAX])
        self._offset += len(piece)
        return piece

    async def rewind(self) -> bool:
        self._offset = 0
        return True

    def close(self) -> None:
        return


class _File:
    """Read in a thread: a pipe may keep us waiting."""

    def __init__(self, file: BinaryIO, *, ours: bool) -> None:
        self._file = file
        self._ours = ours
        self._begins_at = file.tell() if file.seekable() else None

    async def piece(self) -> bytes:
        return await asyncio.to_thread(self._read)

    def _read(self) -> bytes:
        found = bytearray()
        while len(found) < PIECE_BYTES_MAX:
            read = self._file.read(PIECE_BYTES_MAX - len(found))
            if not read:
                break
            found += read
        return bytes(found)

    async def rewind(self) -> bool:
        if self._begins_at is None:
            return False
        self._file.seek(self._begins_at)
        return True

    def close(self) -> None:
        if self._ours:
            self._file.close()


class _Stream:
    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self._over = bytearray()

    async def piece(self) -> bytes:
        while len(self._over) < PIECE_BYTES_MAX:
            try:
                self._over += await anext(self._stream)
            except StopAsyncIteration:
                break
        piece = bytes(self._over[:PIECE_BYTES_MAX])
        del self._over[:PIECE_BYTES_MAX]
        return piece

    async def rewind(self) -> bool:
        return False

    def close(self) -> None:
        return


async def _asynchronous(stream: Iterator[bytes]) -> AsyncIterator[bytes]:
    for piece in stream:
        yield piece

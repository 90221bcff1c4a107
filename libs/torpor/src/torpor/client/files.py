"""Files of a session: read, written, listed, moved and watched; however large, a few pieces at a time."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from torpor.client.door import ASK_TIMEOUT_S, Door, encoded_path, shown
from torpor.client.models import FileChange, FileInfo
from torpor.client.pieces import Content, Source, source_of
from torpor.errors import FileRefused, InvalidRequest, TransferBroken
from torpor_contracts import guest
from torpor_contracts.guest import PIECE_BYTES_MAX
from torpor_messaging.system import SystemIds

AHEAD_MAX: Final = 4
"""Pieces of one file that are asked for at once."""
READ_BYTES_MAX: Final = 256 * 1024 * 1024
"""The largest file that `read` keeps in memory."""
RESTARTS_MAX: Final = 3
WATCH_S: Final = 4.0
"""How long one question of a watch waits. A host that stops waits for it, too."""
WATCHED_S_MAX: Final = 24 * 3600.0
"""How long a watch waits for a session that sleeps."""

_IDS: Final = SystemIds()
GuestPath = str | bytes


class Files:
    """The files of a session. Paths are absolute; what is no UTF-8 in them stands as with `os.fsdecode`, or is bytes.

    Every method wakes the session when it sleeps. `FileNotFound` and other kinds of `FileRefused` say what the guest
    would not do.
    """

    def __init__(self, door: Door) -> None:
        self._door = door

    async def read(self, path: GuestPath, *, offset: int = 0, length: int | None = None) -> bytes:
        """A file, or a part of it, in memory; `InvalidRequest` for more than 256 MiB: use `stream` for that."""
        content = bytearray()
        async with aclosing(self.stream(path, offset=offset, length=length)) as pieces:
            async for piece in pieces:
                content += piece
                if len(content) > READ_BYTES_MAX:
                    raise InvalidRequest(
                        "file-too-large",
                        f"{shown(encoded_path(path))!r} is larger than {READ_BYTES_MAX} bytes",
                        "read it with `files.stream`, piece by piece",
                    )
        return bytes(content)

    async def stream(
        self, path: GuestPath, *, offset: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """A file's bytes from `offset` on, in pieces of at most 256 KiB, a few of them read ahead.

        A piece that is lost is asked for again, also from a machine that was put to sleep and woken in between.
        `TransferBroken` when the file changes meanwhile.
        """
        if offset < 0 or (length is not None and length < 0):
            raise InvalidRequest("illegal-range", f"offset {offset}, length {length}", "give numbers from 0 on")
        name = encoded_path(path)
        end = None if length is None else offset + length
        if length == 0:
            await self.stat(path)
            return
        state, data = await self._piece(name, offset, PIECE_BYTES_MAX if length is None else length)
        if data:
            yield data
        offset += len(data)
        if state.size_bytes == 0:
            # A file that the kernel makes up as it is read has no size, and another time at each look.
            while data and offset != end:
                _, data = await self._piece(name, offset, PIECE_BYTES_MAX if end is None else end - offset)
                if data:
                    yield data
                offset += len(data)
            return
        end = state.size_bytes if end is None else min(end, state.size_bytes)
        async with aclosing(self._ahead(name, offset, end, state)) as pieces:
            async for data in pieces:
                yield data

    async def _ahead(self, path: bytes, offset: int, end: int, state: guest.FileRead) -> AsyncGenerator[bytes, None]:
        asked: deque[asyncio.Task[tuple[guest.FileRead, bytes]]] = deque()
        asked_to = offset
        try:
            while offset < end:
                while len(asked) < AHEAD_MAX and asked_to < end:
                    length = min(PIECE_BYTES_MAX, end - asked_to)
                    asked.append(asyncio.create_task(self._piece(path, asked_to, length), name=f"read at {asked_to}"))
                    asked_to += length
                now, data = await asked[0]
                asked.popleft()
                if now != state or len(data) != min(PIECE_BYTES_MAX, end - offset):
                    raise TransferBroken(
                        "file-changed",
                        f"{shown(path)!r} changed while it was read",
                        "read it again, once nobody writes to it",
                        offset,
                    )
                yield data
                offset += len(data)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _piece(self, path: bytes, offset: int, length: int) -> tuple[guest.FileRead, bytes]:
        request = guest.ReadFile(incarnation=0, path=path, offset=offset, length=min(length, PIECE_BYTES_MAX))
        answered = await self._door.ask(request)
        return answered.answer, answered.body

    async def write(self, path: GuestPath, content: Content, *, mode: int = 0o644, user: str | None = None) -> int:
        """Write a file, whole; how many bytes it has. Nobody sees half of it, and what was there before is replaced.

        `content` is bytes, a local `pathlib.Path`, an open binary file, or a stream of bytes. Directories above it are
        made. If the machine is lost on the way, what can be read again is written again; else `TransferBroken`.
        """
        source = source_of(content)
        try:
            for _ in range(RESTARTS_MAX):
                written = await self._upload(encoded_path(path), source, mode, user)
                if written is not None:
                    return written
        finally:
            source.close()
        raise TransferBroken("upload-lost", "the machine was lost again and again", "see `torpor session show`", 0)

    async def _upload(self, path: bytes, source: Source, mode: int, user: str | None) -> int | None:
        """Write it, from its beginning; None when that is to be begun again."""
        upload = _IDS.new("up").replace("-", "")
        piece, offset = await source.piece(), 0
        while True:
            following = await source.piece()
            request = guest.WriteFile(
                incarnation=0, path=path, upload=upload, offset=offset, last=not following, mode=mode, user=user
            )
            try:
                await self._door.ask(request, piece)
            except FileRefused as refused:
                if refused.code != "upload-unknown":
                    raise
                if await source.rewind():
                    return None
                raise TransferBroken(
                    "upload-lost",
                    "the machine lost what was written of the file",
                    "write it again; from a local file that is done by itself",
                    offset,
                ) from refused
            offset += len(piece)
            if not following:
                return offset
            piece = following

    async def stat(self, path: GuestPath) -> FileInfo:
        """What there is under the path; a link is not followed."""
        answered = await self._door.ask(guest.StatFile(incarnation=0, path=encoded_path(path)))
        return _info(answered.answer.entry)

    async def list(self, path: GuestPath) -> AsyncGenerator[FileInfo, None]:
        """The entries of a directory in the order of their names' bytes, page by page."""
        after = b""
        while True:
            request = guest.ListDirectory(incarnation=0, path=encoded_path(path), after=after)
            answer = (await self._door.ask(request)).answer
            for entry in answer.entries:
                yield _info(entry)
            if not answer.more or not answer.entries:
                return
            after = answer.entries[-1].name

    async def make(self, path: GuestPath, *, mode: int = 0o755, user: str | None = None) -> None:
        """Make a directory and those above it; one that is there is fine."""
        await self._door.ask(guest.MakeDirectory(incarnation=0, path=encoded_path(path), mode=mode, user=user))

    async def move(self, path: GuestPath, to: GuestPath) -> None:
        """Rename; a file that is there is replaced."""
        await self._door.ask(guest.MoveFile(incarnation=0, path=encoded_path(path), to=encoded_path(to)))

    async def remove(self, path: GuestPath, *, recursive: bool = False) -> None:
        """Remove a file, a link, an empty directory, or with `recursive` a directory and all below it."""
        await self._door.ask(guest.RemoveFile(incarnation=0, path=encoded_path(path), recursive=recursive))

    async def watch(self, path: GuestPath) -> AsyncGenerator[FileChange, None]:
        """What happens in a directory, from now on; ends with `gone` when the directory goes.

        To watch does not keep the session awake. When it has slept, or events are lost, `overflow` says: look yourself.
        """
        # A door of its own: it waits for a session that sleeps, while others wake it.
        door, watch, name = self._door.another(), _IDS.new("watch"), encoded_path(path)
        incarnation = 0
        while True:
            begun = incarnation != 0
            request = guest.WatchDirectory(incarnation=0, path=name, watch=watch, wait_s=WATCH_S if begun else 0.0)
            answered = await door.ask(
                request, wakes=not begun, patience_s=WATCH_S + 5.0, timeout_s=WATCHED_S_MAX if begun else ASK_TIMEOUT_S
            )
            if begun and answered.place.incarnation != incarnation:
                yield FileChange(kind="overflow", name="")
            incarnation = answered.place.incarnation
            for event in answered.answer.events:
                yield FileChange(kind=event.kind, name=shown(event.name))
                if event.kind == "gone":
                    return


def _info(entry: guest.FileEntry) -> FileInfo:
    return FileInfo(
        name=shown(entry.name),
        kind=entry.kind,
        size_bytes=entry.size_bytes,
        mode=entry.mode,
        user_id=entry.user_id,
        group_id=entry.group_id,
        modified_ns=entry.modified_ns,
        link_to=None if entry.link_to is None else shown(entry.link_to),
    )

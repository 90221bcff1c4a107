"""Files, input and terminals of guests that run our agent, the same for every engine: requests to the agent."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, Literal, cast

from torpor_contracts.guest import (
    DirectoryListed,
    FileEntry,
    FileRead,
    WatchEvent,
    WriteFile,
)
from torpor_contracts.ids import ExecId, VmId
from torpor_contracts.session import TerminalSize
from torpor_guest_agent.frames import Frame
from torpor_vm_host.adapters.qemu.following import Followers, unknown_program
from torpor_vm_host.adapters.qemu.guest import GuestChannel
from torpor_vm_host.guest_ports import FilePiece, OnWatchEvent
from torpor_vm_host.ports import DriverError

FILE_TIMEOUT_S: Final = 60.0
"""How long the agent may take over one request; removing a large tree takes a while."""


class GuestFiles(ABC):
    """See `torpor_vm_host.guest_ports.Guest`."""

    @abstractmethod
    async def _talk(self, vm_id: VmId) -> tuple[GuestChannel, Followers]:
        """The open channel to the machine's guest; `DriverError` when there is no such machine."""

    @abstractmethod
    def _reach(self, vm_id: VmId) -> AbstractAsyncContextManager[tuple[GuestChannel, Followers]]:
        """The open channel to the machine's guest, for as long as a request and its answer take."""

    async def read_file(self, vm_id: VmId, path: bytes, offset: int, length: int) -> FilePiece:
        """See `Guest`."""
        answer = await self._request(vm_id, "read", {"path": _text(path), "offset": offset, "length": length})
        read = FileRead(size_bytes=int(answer.header["size"]), modified_ns=int(answer.header["modified_ns"]))
        return FilePiece(read=read, data=answer.body)

    async def write_file(self, vm_id: VmId, piece: WriteFile, data: bytes) -> int:
        """See `Guest`."""
        header = {
            "path": _text(piece.path),
            "upload": piece.upload,
            "offset": piece.offset,
            "last": piece.last,
            "mode": piece.mode,
            "user": piece.user,
        }
        return int((await self._request(vm_id, "write", header, data)).header["size"])

    async def stat_file(self, vm_id: VmId, path: bytes) -> FileEntry:
        """See `Guest`."""
        return _entry((await self._request(vm_id, "stat", {"path": _text(path)})).header)

    async def list_directory(self, vm_id: VmId, path: bytes, after: bytes, limit: int) -> DirectoryListed:
        """See `Guest`."""
        header: dict[str, Any] = {"path": _text(path)}
        if after:
            header["after"] = _text(after)
        answer = (await self._request(vm_id, "list", header)).header
        entries = [_entry(found) for found in answer["entries"]]
        return DirectoryListed(entries=entries[:limit], more=bool(answer["more"]) or len(entries) > limit)

    async def make_directory(self, vm_id: VmId, path: bytes, mode: int, user: str | None) -> None:
        """See `Guest`."""
        await self._request(vm_id, "make-directory", {"path": _text(path), "mode": mode, "user": user})

    async def move_file(self, vm_id: VmId, path: bytes, to: bytes) -> None:
        """See `Guest`."""
        await self._request(vm_id, "move", {"path": _text(path), "to": _text(to)})

    async def remove_file(self, vm_id: VmId, path: bytes, *, recursive: bool) -> None:
        """See `Guest`."""
        await self._request(vm_id, "remove", {"path": _text(path), "recursive": recursive})

    async def watch_directory(self, vm_id: VmId, path: bytes, on_event: OnWatchEvent) -> None:
        """See `Guest`."""
        _, followers = await self._talk(vm_id)
        ended = asyncio.Event()

        def take(frame: Frame) -> None:
            kind = frame.header.get("kind", "")
            if frame.header["event"] == "watch":
                on_event(WatchEvent(kind=kind, name=_bytes(frame.header.get("name", ""))))
            if frame.header["event"] == "closed" or kind == "gone":
                ended.set()

        with followers.watching(take) as watch:
            await self._request(vm_id, "watch", {"path": _text(path), "watch": watch})
            try:
                await ended.wait()
            finally:
                with suppress(DriverError):
                    await self._request(vm_id, "unwatch", {"watch": watch})

    async def feed(self, vm_id: VmId, exec_id: ExecId, data: bytes, offset: int, *, ends: bool) -> int:
        """See `Guest`."""
        header = {"exec_id": exec_id, "offset": offset, "ends": ends}
        try:
            answer = await self._request(vm_id, "stdin", header, data)
        except DriverError as error:
            raise unknown_program(error) from error
        return int(answer.header["offset"])

    async def resize(self, vm_id: VmId, exec_id: ExecId, size: TerminalSize) -> None:
        """See `Guest`."""
        header = {"exec_id": exec_id, "rows": size.rows, "columns": size.columns}
        try:
            await self._request(vm_id, "resize", header)
        except DriverError as error:
            raise unknown_program(error) from error

    async def _request(self, vm_id: VmId, op: str, header: dict[str, Any], body: bytes = b"") -> Frame:
        try:
            async with self._reach(vm_id) as (guest, _):
                return await guest.request(op, header, body, timeout_s=FILE_TIMEOUT_S)
        except TimeoutError as error:
            raise DriverError("guest-silent", f"the guest has not answered {op}", retryable=True) from error


def _text(path: bytes) -> str:
    return path.decode(errors="surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _entry(found: Mapping[str, Any]) -> FileEntry:
    kind = cast("Literal['file', 'directory', 'link', 'other']", found["kind"])
    return FileEntry(
        name=_bytes(found["name"]),
        kind=kind,
        size_bytes=found["size"],
        mode=found["mode"],
        user_id=found["user"],
        group_id=found["group"],
        modified_ns=found["modified_ns"],
        link_to=_bytes(found["to"]) if "to" in found else None,
    )

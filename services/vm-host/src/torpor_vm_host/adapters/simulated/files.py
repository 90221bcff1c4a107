"""What is done to the files and inputs of simulated machines: see `torpor_vm_host.guest_ports.Guest`."""

import asyncio
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from torpor_contracts.guest import DirectoryListed, FileEntry, FileRead, WatchEvent, WriteFile
from torpor_contracts.ids import ExecId, VmId
from torpor_contracts.session import TerminalSize
from torpor_vm_host.adapters.simulated import guest, tree
from torpor_vm_host.adapters.simulated.machine import Machine, Meta, Process
from torpor_vm_host.guest_ports import FilePiece, OnWatchEvent
from torpor_vm_host.ports import VM_GONE, DriverError


class Live(Protocol):
    """A machine in hand."""

    machine: Machine
    changed: asyncio.Event

    def notify(self) -> None:
        """Wake everybody who waits for a change."""
        ...


class SimulatedFiles(ABC):
    """The part of the simulated driver that is about files and inputs; a paused machine does nothing of it."""

    @abstractmethod
    def _awake(self, vm_id: VmId) -> AbstractAsyncContextManager[Live]:
        """The machine, running, with nobody else changing it; waits for one that is paused."""

    @abstractmethod
    def _changing_it(self, live: Live) -> AbstractAsyncContextManager[None]:
        """Keep what is done inside before anybody sees it."""

    @abstractmethod
    def _now_us(self) -> int:
        """Now."""

    async def read_file(self, vm_id: VmId, path: bytes, offset: int, length: int) -> FilePiece:
        """See `Guest`."""
        async with self._awake(vm_id) as live:
            key = tree.checked(path)
            content, found = tree.read(live.machine, key), tree.entry(live.machine, key)
            read = FileRead(size_bytes=found.size_bytes, modified_ns=found.modified_ns)
            return FilePiece(read=read, data=content[offset : offset + length])

    async def write_file(self, vm_id: VmId, piece: WriteFile, data: bytes) -> int:
        """See `Guest`."""
        async with self._awake(vm_id) as live, self._changing_it(live):
            machine, key, user = live.machine, tree.checked(piece.path), _user(piece.user)
            place = f"{key}.torpor-{piece.upload}"
            before = b"" if piece.offset == 0 else machine.uploads.get(place)
            if before is None or piece.offset > len(before):
                raise DriverError("upload-unknown", f"the pieces before {piece.offset} are not here", retryable=False)
            content = before[: piece.offset] + data + before[piece.offset + len(data) :]
            tree.check_room(machine, content, place)
            machine.uploads[place] = content
            if piece.last:
                del machine.uploads[place]
                tree.put(machine, key, content, Meta(mode=piece.mode, user=user, modified_us=self._now_us()))
            return piece.offset + len(data)

    async def stat_file(self, vm_id: VmId, path: bytes) -> FileEntry:
        """See `Guest`."""
        async with self._awake(vm_id) as live:
            return tree.entry(live.machine, tree.checked(path))

    async def list_directory(self, vm_id: VmId, path: bytes, after: bytes, limit: int) -> DirectoryListed:
        """See `Guest`."""
        async with self._awake(vm_id) as live:
            key = tree.checked(path)
            names = [name for name in tree.names_in(live.machine, key) if name > after]
            prefix = key.rstrip("/") + "/"
            entries = [tree.entry(live.machine, prefix + tree.key_of(name)) for name in names[:limit]]
            return DirectoryListed(entries=entries, more=len(names) > limit)

    async def make_directory(self, vm_id: VmId, path: bytes, mode: int, user: str | None) -> None:
        """See `Guest`."""
        async with self._awake(vm_id) as live, self._changing_it(live):
            meta = Meta(mode=mode, user=_user(user), modified_us=self._now_us())
            tree.make_folders(live.machine, tree.checked(path), meta)

    async def move_file(self, vm_id: VmId, path: bytes, to: bytes) -> None:
        """See `Guest`."""
        async with self._awake(vm_id) as live, self._changing_it(live):
            tree.move(live.machine, tree.checked(path), tree.checked(to))

    async def remove_file(self, vm_id: VmId, path: bytes, *, recursive: bool) -> None:
        """See `Guest`."""
        async with self._awake(vm_id) as live, self._changing_it(live):
            tree.remove(live.machine, tree.checked(path), recursive=recursive)

    async def watch_directory(self, vm_id: VmId, path: bytes, on_event: OnWatchEvent) -> None:
        """See `Guest`: what is there is compared with what was, at each change of the machine."""
        key = tree.checked(path)
        async with self._awake(vm_id) as live:
            before, changed = _seen(live.machine, key), live.changed
        while True:
            await changed.wait()
            try:
                async with self._awake(vm_id) as live:
                    now, changed = _seen(live.machine, key), live.changed
            except DriverError as error:
                if error.code == VM_GONE:
                    raise
                on_event(WatchEvent(kind="gone", name=b""))
                return
            for event in _differences(before, now):
                on_event(event)
            before = now

    async def feed(self, vm_id: VmId, exec_id: ExecId, data: bytes, offset: int, *, ends: bool) -> int:
        """See `Guest`."""
        async with self._awake(vm_id) as live, self._changing_it(live):
            return guest.feed(self._process(live, exec_id), data, offset, ends=ends, now_us=self._now_us())

    async def resize(self, vm_id: VmId, exec_id: ExecId, size: TerminalSize) -> None:
        """See `Guest`."""
        async with self._awake(vm_id) as live, self._changing_it(live):
            guest.resize(self._process(live, exec_id), size)

    @abstractmethod
    def _process(self, live: Live, exec_id: ExecId) -> Process:
        """The program; raises `DriverError`."""


def _user(name: str | None) -> str:
    if (name or "root") not in tree.USERS:
        raise DriverError("no-such-user", f"the guest has no user {name!r}", retryable=False)
    return name or "root"


def _seen(machine: Machine, key: str) -> dict[bytes, tuple[int, int]]:
    prefix = key.rstrip("/") + "/"
    entries = (tree.entry(machine, prefix + tree.key_of(name)) for name in tree.names_in(machine, key))
    return {one.name: (one.modified_ns, one.size_bytes) for one in entries}


def _differences(before: dict[bytes, tuple[int, int]], now: dict[bytes, tuple[int, int]]) -> list[WatchEvent]:
    return [
        *(WatchEvent(kind="removed", name=name) for name in before if name not in now),
        *(WatchEvent(kind="made", name=name) for name in now if name not in before),
        *(WatchEvent(kind="written", name=name) for name in now if before.get(name, now[name]) != now[name]),
    ]

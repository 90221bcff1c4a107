"""Watches of directories: the kernel's inotify, turned into events for the host."""

import ctypes
import os
import struct
from typing import Any, Final

from torpor_guest_agent.files import path_of
from torpor_guest_agent.frames import Frame
from torpor_guest_agent.loop import Loop
from torpor_guest_agent.refusal import Refused, refusal

WATCHES_MAX: Final = 1024
EVENT_HEADER: Final = struct.Struct("iIII")
IN_Q_OVERFLOW: Final = 0x4000
IN_IGNORED: Final = 0x8000
KINDS: Final = {0x2: "modified", 0x8: "written", 0x40: "moved-from", 0x80: "moved-to", 0x100: "made", 0x200: "removed"}
MASK: Final = sum(KINDS)


class Watches:
    """Directories the host wants to hear of; each watch has the id the host gave it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int | None = None
        self._ids: dict[int, set[str]] = {}
        """The kernel's number of a watched directory -> the ids under which it is watched."""
        self._missed = False

    def add(self, request: dict[str, Any]) -> dict[str, Any]:
        """Watch the directory `path` (not what is below its directories) under the id `watch`."""
        if sum(map(len, self._ids.values())) >= WATCHES_MAX:
            raise Refused("too-many-watches", f"at most {WATCHES_MAX} watches")
        if self._descriptor is None:
            self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            self._loop.watch(self._descriptor, self._read)
        number = self._libc.inotify_add_watch(self._descriptor, path_of(request), MASK)
        if number < 0:
            code = ctypes.get_errno()
            raise refusal(OSError(code, os.strerror(code), request["path"]))
        self._ids.setdefault(number, set()).add(str(request["watch"]))
        return {}

    def remove(self, request: dict[str, Any]) -> dict[str, Any]:
        """End a watch; one that is not there is fine."""
        for number, ids in list(self._ids.items()):
            ids.discard(str(request["watch"]))
            if not ids:
                self._libc.inotify_rm_watch(self._descriptor, number)
                del self._ids[number]
        return {}

    def clear(self) -> None:
        """End all watches: the host that asked for them is gone."""
        for number in self._ids:
            self._libc.inotify_rm_watch(self._descriptor, number)
        self._ids = {}

    def _read(self) -> None:
        assert self._descriptor is not None
        try:
            data = os.read(self._descriptor, 64 * 1024)
        except BlockingIOError:
            return
        if self._loop.crowded:  # the host does not keep up: it is told that it missed something, once it does
            self._missed = True
            return
        if self._missed:
            self._missed = False
            self._tell_all("overflow")
        at = 0
        while at + EVENT_HEADER.size <= len(data):
            number, mask, _, length = EVENT_HEADER.unpack_from(data, at)
            name = data[at + EVENT_HEADER.size : at + EVENT_HEADER.size + length].rstrip(b"\0")
            at += EVENT_HEADER.size + length
            self._tell(number, mask, name)

    def _tell(self, number: int, mask: int, name: bytes) -> None:
        if mask & IN_Q_OVERFLOW:
            self._tell_all("overflow")
        elif mask & IN_IGNORED:
            for watch in self._ids.pop(number, ()):
                self._event(watch, "gone", b"")
        else:
            for watch in self._ids.get(number, ()):
                for bit, kind in KINDS.items():
                    if mask & bit:
                        self._event(watch, kind, name)

    def _tell_all(self, kind: str) -> None:
        for ids in self._ids.values():
            for watch in ids:
                self._event(watch, kind, b"")

    def _event(self, watch: str, kind: str, name: bytes) -> None:
        text = name.decode(errors="surrogateescape")
        self._loop.send(Frame({"event": "watch", "watch": watch, "kind": kind, "name": text}))

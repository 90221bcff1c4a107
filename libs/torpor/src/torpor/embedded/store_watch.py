"""Tells when the streams of nats-server have stopped storing, and when starting it again would help.

After one write that failed, on a full disk say, a stream answers that same error for ever, or the server does without
streams from then on: it never tries again by itself, and the whole would stand still although there is room. What it
had stored is still there after a restart. Its log tells of it, unless that was on the full disk too.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

LOOK_S: Final = 5.0
"""How often the log and the disk are looked at."""

FULL_BYTES: Final = 1024 * 1024
"""A disk with less left counts as full: writes fail."""

ROOM_BYTES: Final = 8 * 1024 * 1024
"""There is room again once so much can be had."""

PAUSE_S_FIRST: Final = 10.0
PAUSE_S_MAX: Final = 600.0
"""A server that stops again and again is started again ever less often: its disk has another trouble than its size."""

_READ_BYTES_MAX: Final = 256 * 1024
_STOPPED: Final = re.compile(
    rb"\[ERR\] JetStream (?:failed to store a msg|out of (?:space|resources)|consumer .* critical write error)"
)


class StoreWatch:
    """Looks at one server's log and at the disk of `directory`, on behalf of the supervisor."""

    def __init__(
        self,
        log: Path,
        directory: Path,
        now_s: Callable[[], float] = time.monotonic,
        left_bytes: Callable[[Path], int] | None = None,
    ) -> None:
        self._log = log
        self._directory = directory
        self._now_s = now_s
        self._left_bytes = left_bytes or writable_bytes
        self._read_bytes = self._size()
        self._stopped = False
        self._restarted_s = float("-inf")
        self._pause_s = 0.0
        self.due_s = now_s() + LOOK_S
        """When to look next."""

    def wants_restart(self) -> bool:
        """Whether the server should be started again now: it stores nothing any more, and there is room.

        Once that was said, it is taken to happen.
        """
        now_s = self._now_s()
        if now_s < self.due_s:
            return False
        self.due_s = now_s + LOOK_S
        self._stopped = self._read() or self._left_bytes(self._directory) < FULL_BYTES or self._stopped
        since_s = now_s - self._restarted_s
        if not self._stopped or since_s < self._pause_s or not self._has_room():
            return False
        calm = since_s >= 2 * PAUSE_S_MAX
        self._pause_s = PAUSE_S_FIRST if calm else min(2 * self._pause_s, PAUSE_S_MAX)
        self._restarted_s, self._stopped = now_s, False
        return True

    def _read(self) -> bool:
        """Whether what was added to the log since the last look tells of it."""
        size = self._size()
        if size == self._read_bytes:
            return False
        # A shorter log was begun anew, as it had become too long.
        start = max(self._read_bytes if size > self._read_bytes else 0, size - _READ_BYTES_MAX)
        self._read_bytes = size
        try:
            with self._log.open("rb") as log:
                log.seek(start)
                return _STOPPED.search(log.read(size - start)) is not None
        except OSError:
            return False

    def _size(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0

    def _has_room(self) -> bool:
        if self._left_bytes(self._directory) < ROOM_BYTES:
            return False
        probe = self._directory / ".room"
        try:
            handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(handle, 0, ROOM_BYTES)  # a quota does not show in what is left
            finally:
                os.close(handle)
                probe.unlink(missing_ok=True)
        except OSError:
            return False
        return True


def writable_bytes(directory: Path) -> int:
    """How much a disk has left for us; nothing when it is mounted read-only or gone."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return 0
    return 0 if disk.f_flag & os.ST_RDONLY else disk.f_bavail * disk.f_frsize

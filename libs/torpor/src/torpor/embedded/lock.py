"""One supervisor for a data directory: a lock that the kernel lets go of however its holder ends."""

import fcntl
import os
from types import TracebackType
from typing import Self

from torpor.embedded.layout import DataDir
from torpor.errors import CannotStart


class DataDirLock:
    """An flock on the data directory's lock file; the file's text only says who holds it."""

    def __init__(self, data: DataDir) -> None:
        self._data = data
        self._handle = -1

    def __enter__(self) -> Self:
        handle = os.open(self._data.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 64, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(handle)
            raise CannotStart(
                "already-running",
                f"Torpor already runs on {self._data.root} (pid {holder})",
                "use it, stop it with `torpor down`, or choose another directory with --data-dir",
            ) from None
        os.truncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode("ascii"), 0)
        self._handle = handle
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The file stays: removing it would let two supervisors hold two files of one name.
        os.close(self._handle)

"""Log files of the whole's processes, kept within bounds without the processes taking part."""

import os
import shutil
from pathlib import Path

BYTES_MAX = 4 * 1024 * 1024
"""A log file grows to about this size, then becomes `<name>.log.1`; one older file is kept."""


def open_log(path: Path) -> int:
    """A descriptor for a process's output: appending, so that trimming the file under it is safe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def trim(path: Path, bytes_max: int = BYTES_MAX) -> bool:
    """Move a full log's content to `.1`; whether it was full.

    Copied and truncated, as the writer holds the file open: lines written between the two steps are lost.
    """
    try:
        if path.stat().st_size <= bytes_max:
            return False
        shutil.copyfile(path, path.with_name(path.name + ".1"))
        os.truncate(path, 0)
    except OSError:
        # A full disk must not end the supervisor; the next round tries again.
        return False
    return True


def last_lines(path: Path, lines_max: int = 5) -> list[str]:
    """The last lines of a log, to show why a process ended."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 16_384))
            return log.read().decode("utf-8", "replace").splitlines()[-lines_max:]
    except OSError:
        return []

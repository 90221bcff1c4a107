"""The operating system's errors about files, as the typed errors of this port."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from torpor_chunks.port import ChunkError, NoSpace, StoreUnavailable

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def typed(about: Path) -> Iterator[None]:
    """Turn an `OSError` into `NoSpace` or `StoreUnavailable`; `about` is named when the error names no file."""
    try:
        yield
    except OSError as error:
        raise of_number(error.errno, str(error.filename or about), str(error)) from error


def of_number(number: int | None, where: str, otherwise: str) -> ChunkError:
    """The error that an error number of the system stands for."""
    reason = otherwise if number is None else os.strerror(number)
    if number in _FULL:
        return NoSpace(f"{where}: {reason}; free space or raise the quota, then try again")
    return StoreUnavailable(f"{where}: {reason}")

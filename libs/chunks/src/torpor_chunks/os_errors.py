"""The operating system's errors about files, as the typed errors of this port."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from torpor_chunks.port import NoSpace, StoreUnavailable

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def typed(about: Path) -> Iterator[None]:
    """Turn an `OSError` into `NoSpace` or `StoreUnavailable`; `about` is named when the error names no file."""
    try:
        yield
    except OSError as error:
        where = error.filename or about
        if error.errno in _FULL:
            raise NoSpace(f"{where}: {error.strerror}; free space or raise the quota, then try again") from error
        raise StoreUnavailable(f"{where}: {error.strerror or error}") from error

"""Object storage by obstore: a local directory, or any store that speaks the S3 protocol; chosen by a URL."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import LocalStore, ObjectStore, S3Store

from torpor_chunks.objects import Entry, ObjectExists, ObjectMissing
from torpor_chunks.os_errors import of_number, typed
from torpor_chunks.port import NoSpace, StoreUnavailable

RETRIES_MAX: Final = 4
RETRYING_S_MAX: Final = 20
"""A request may take 30 s (obstore's own bound); after so many seconds of failing no other one is begun."""

_SYSTEM_ERROR: Final = re.compile(r"\(os error (\d+)\)")
_FULL: Final = re.compile(r"507 |QuotaExceeded|StorageFull|InsufficientStorage", re.IGNORECASE)
_LEFT_BY_A_WRITER: Final = re.compile(r"#\d+$")


class StoredObjects:
    """`Objects` over one obstore store. `directory` is where a local one keeps its files."""

    def __init__(self, store: ObjectStore, name: str, directory: Path | None = None) -> None:
        self._store = store
        self._name = name
        self.directory = directory

    def put(self, path: str, data: bytes | Iterable[bytes], *, create: bool = False) -> None:
        """See `Objects.put`."""
        with self._typed(path):
            obstore.put(self._store, path, data, mode="create" if create else "overwrite")
        if self.directory is not None:
            self._settle(self.directory / path)

    @property
    def near(self) -> bool:
        """See `Objects.near`."""
        return self.directory is not None

    def tail(self, path: str, length: int) -> tuple[bytes, int]:
        """See `Objects.tail`."""
        if self.directory is not None:
            with self._opened(path) as file:
                size_bytes = os.fstat(file).st_size
                return os.pread(file, length, max(0, size_bytes - length)), size_bytes
        try:
            with self._typed(path):
                found = obstore.get(self._store, path, options={"range": {"suffix": length}})
                return found.bytes().to_bytes(), found.meta["size"]
        except StoreUnavailable:
            # Of an empty object there is no last byte: servers refuse the range, each in its own way.
            entry = self.look(path)
            if entry is None or entry.size_bytes > 0:
                raise
            return b"", 0

    def read(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See `Objects.read`."""
        if self.directory is not None:
            # A tenth of what handing each range to a thread of obstore's takes.
            with self._opened(path) as file:
                return [os.pread(file, length, start) for start, length in ranges]
        starts, lengths = [start for start, _ in ranges], [length for _, length in ranges]
        with self._typed(path):
            found = obstore.get_ranges(self._store, path, starts=starts, lengths=lengths)
            return [part.to_bytes() for part in found]

    def look(self, path: str) -> Entry | None:
        """See `Objects.look`."""
        try:
            with self._typed(path):
                meta = obstore.head(self._store, path)
        except ObjectMissing:
            return None
        return Entry(path, meta["size"], _age_s(meta["last_modified"]))

    def delete(self, path: str) -> bool:
        """See `Objects.delete`: S3 does not say whether there was anything, so it is asked first."""
        if self.look(path) is None:
            return False
        try:
            with self._typed(path):
                obstore.delete(self._store, path)
        except ObjectMissing:
            return False
        if self.directory is not None:
            with typed(self.directory / path):
                _sync((self.directory / path).parent)
        return True

    def entries(self, prefix: str) -> Iterator[Entry]:
        """See `Objects.entries`."""
        with self._typed(prefix):
            for page in obstore.list(self._store, prefix=prefix, chunk_size=1000):
                for meta in page:
                    yield Entry(meta["path"], meta["size"], _age_s(meta["last_modified"]))

    def folders(self, prefix: str) -> list[str]:
        """See `Objects.folders`."""
        with self._typed(prefix):
            found = obstore.list_with_delimiter(self._store, prefix=prefix)["common_prefixes"]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def distrust(self, path: str) -> bool:
        """See `Objects.distrust`: there is no nearer copy."""
        del path
        return False

    def remove_abandoned(self, older_s: float) -> int:
        """Remove what dead writers left half-written in a local directory; the bytes freed."""
        freed_bytes = 0
        if self.directory is None:
            return freed_bytes
        oldest_s = datetime.now(UTC).timestamp() - older_s
        with typed(self.directory):
            for folder, _, names in os.walk(self.directory):
                for name in filter(_LEFT_BY_A_WRITER.search, names):
                    left = Path(folder, name)
                    found = left.stat()
                    if found.st_mtime <= oldest_s:
                        left.unlink(missing_ok=True)
                        freed_bytes += found.st_size
        return freed_bytes

    def _settle(self, file: Path) -> None:
        """Make a file that obstore has put in place durable, and unchangeable by accident."""
        with typed(file):
            number = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fchmod(number, 0o400)
                os.fsync(number)
            finally:
                os.close(number)
            folder = file.parent
            # Folders that are not new have nothing to write: syncing them costs next to nothing.
            while folder != self.directory:
                _sync(folder)
                folder = folder.parent
            _sync(folder)

    @contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        assert self.directory is not None, "only local objects are files"
        with self._typed(path):
            file = os.open(self.directory / path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield file
            finally:
                os.close(file)

    @contextmanager
    def _typed(self, path: str) -> Iterator[None]:
        where = f"{self._name}/{path}"
        try:
            yield
        except AlreadyExistsError as error:
            raise ObjectExists(where) from error
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise StoreUnavailable(f"{self._name}: there is no such bucket; make it, or correct the URL") from error
            raise ObjectMissing(f"{where} is not in the store") from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise StoreUnavailable(f"{where}: {_first_line(error)}; check the credentials and their rights") from error
        except (BaseError, OSError) as error:
            found = _SYSTEM_ERROR.search(str(error))
            if found is None and _FULL.search(str(error)):
                raise NoSpace(f"{where}: {_first_line(error)}; free space or raise the quota") from error
            raise of_number(int(found[1]) if found else None, where, _first_line(error)) from error


def open_objects(url: str, **options: Any) -> StoredObjects:
    """Object storage at `file:///directory` or `s3://bucket/prefix`; raises `StoreUnavailable` for other URLs.

    For S3, obstore reads AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL (and AWS_ALLOW_HTTP
    for an endpoint without TLS) from the environment; `options` come before those.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        directory = Path(unquote(parts.path))
        with typed(directory):
            directory.mkdir(parents=True, exist_ok=True)
        return StoredObjects(LocalStore(directory, mkdir=True), str(directory), directory)
    if parts.scheme == "s3" and parts.netloc:
        store = S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            retry_config={"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=RETRYING_S_MAX)},
            **options,
        )
        return StoredObjects(store, url.rstrip("/"))
    raise StoreUnavailable(f"{url!r} is no URL of a chunk store; write file:///directory or s3://bucket/prefix")


def _age_s(put_at: datetime) -> float:
    return (datetime.now(UTC) - put_at).total_seconds()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)

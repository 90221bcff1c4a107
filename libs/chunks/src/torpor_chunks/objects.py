"""What the store asks of object storage: whole immutable objects under paths, and ranges of them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from torpor_chunks.port import PartMissing


class ObjectMissing(PartMissing):
    """There is no object under this path."""


class ObjectExists(Exception):  # noqa: N818  (says what is so; never leaves this library)
    """There is an object under this path already."""


class Entry(NamedTuple):
    """An object that is there, and how long ago it was put, seconds."""

    path: str
    size_bytes: int
    age_s: float


class Objects(Protocol):
    """Object storage. Blocking; every method raises a `ChunkError` for what goes wrong."""

    @property
    def near(self) -> bool:
        """Whether reading takes no time worth hiding."""
        ...

    def put(self, path: str, data: bytes | Iterable[bytes], *, create: bool = False) -> None:
        """Make an object, visible once it is whole, durable when this returns; `create`: raises `ObjectExists`."""
        ...

    def tail(self, path: str, length: int) -> tuple[bytes, int]:
        """The last `length` bytes of an object (all of a shorter one), and its size."""
        ...

    def read(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Byte ranges (start, length) of an object; those past its end come back shorter."""
        ...

    def look(self, path: str) -> Entry | None:
        """The object without its content, or None when there is none."""
        ...

    def delete(self, path: str) -> bool:
        """Remove the object; whether it was there."""
        ...

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Every object below a path that ends with no slash."""
        ...

    def folders(self, prefix: str) -> list[str]:
        """The names of the folders right below a path."""
        ...

    def distrust(self, path: str) -> bool:
        """Forget a nearer copy of the object, which was found damaged; whether there was one."""
        ...

    def remove_abandoned(self, older_s: float) -> int:
        """Remove what dead writers left half-written so long ago, if this store leaves that to us; the bytes freed."""
        ...

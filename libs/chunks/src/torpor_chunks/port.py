"""The chunk store's port: immutable parts under the SHA-256 of their bytes; a part that is visible is whole."""

import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import ClassVar, Final, NewType, Protocol

import msgspec

from torpor_contracts.errors import TorporError

Digest = NewType("Digest", str)
"""`sha256:<64 hex digits>` of a part's bytes."""

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


class ChunkError(TorporError):
    """A part could not be kept or had; `code` is stable and for programs."""

    code: ClassVar[str]


class PartMissing(ChunkError):  # noqa: N818  (each says what is so, as the errors of the contracts do)
    """The store holds no part of this digest."""

    code = "checkpoint-part-missing"


class PartCorrupt(ChunkError):  # noqa: N818
    """What the store holds under this digest is something else."""

    code = "checkpoint-part-corrupt"


class NoSpace(ChunkError):  # noqa: N818
    """The disk or quota is full; nothing half-written stays visible."""

    code = "no-space"


class StoreUnavailable(ChunkError):  # noqa: N818
    """The store cannot be read or written: permissions, a read-only or failing disk, or a lock held too long."""

    code = "chunk-store-unavailable"


class IllegalDigest(ChunkError):  # noqa: N818
    """The text is no digest, so no part can have it."""

    code = "illegal-digest"


class StoredPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part that is durably in the store. `unique_bytes` is what this put added: 0 when the part was there."""

    digest: Digest
    size_bytes: int
    unique_bytes: int


class ChunkStore(Protocol):
    """Keeps parts. Every method raises a `ChunkError` for what goes wrong, and changes nothing then."""

    async def put(self, file: Path) -> StoredPart:
        """Keep the bytes of `file`, which nobody may write meanwhile; durable when this returns."""
        ...

    async def fetch(self, digest: str, size_bytes: int, into: Path) -> None:
        """Write the part to the new file `into` and verify it on the way; on an error there is no such file."""
        ...

    async def size(self, digest: str) -> int | None:
        """The size in bytes of the part, or None when it is not there; looks at no content."""
        ...

    async def verify(self, digest: str, size_bytes: int) -> None:
        """Read the whole part; raises `PartMissing` or `PartCorrupt` unless it is what its digest and size say."""
        ...

    async def delete(self, digest: str) -> bool:
        """Remove the part for good; whether it was there. Only for who holds `exclusive`."""
        ...

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        """Held while it is decided, from the log, what is referenced: by one at a time, in all processes together.

        Puts and fetches do not wait for it. Raises `StoreUnavailable` when it cannot be had in the stated time.
        """
        ...


def hex_of(digest: str) -> str:
    """The 64 hex digits of a digest; raises `IllegalDigest`."""
    if _DIGEST.fullmatch(digest) is None:
        raise IllegalDigest(f"{digest!r} is no digest; it must read sha256:<64 hex digits>")
    return digest.removeprefix("sha256:")

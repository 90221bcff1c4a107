"""What a driver does inside a running guest beside starting programs: files, input, terminals.

A call that finds the machine paused waits for it, within the caller's bound. Codes of `DriverError` beside the port's
own: what the guest says of a path (`not-found`, `exists`, `not-a-directory`, `is-a-directory`, `not-a-file`,
`not-empty`, `not-permitted`, `disk-full`, `name-too-long`, `too-many-links`, `illegal-path`, `no-such-user`,
`io-error`), `upload-unknown` (the pieces before this one are not there: begin again), `stdin-closed`, `stdin-full`
(nothing is lost: give it again later), `stdin-gap` (bytes before this piece are missing), `no-terminal`.
"""

from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from torpor_contracts.guest import DirectoryListed, FileEntry, FileRead, WatchEvent, WriteFile
from torpor_contracts.ids import ExecId, VmId
from torpor_contracts.session import TerminalSize

STDIN_FULL: Final = "stdin-full"
"""The code of a `DriverError` that says: the program has not read what it was given before; try again later."""


class FilePiece(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a file, and what the file is at this moment."""

    read: FileRead
    data: bytes


OnWatchEvent = Callable[[WatchEvent], None]
"""Takes what happens in a directory; must not wait."""


class Guest(Protocol):
    """Reaches into running machines. Paths are absolute, and bytes."""

    async def read_file(self, vm_id: VmId, path: bytes, offset: int, length: int) -> FilePiece:
        """At most `length` bytes of a regular file from `offset` on; none behind its end."""
        ...

    async def write_file(self, vm_id: VmId, piece: WriteFile, data: bytes) -> int:
        """Write a piece of an upload; how many bytes of it are there. See `torpor_contracts.guest.WriteFile`."""
        ...

    async def stat_file(self, vm_id: VmId, path: bytes) -> FileEntry:
        """What there is under the path; a link is not followed."""
        ...

    async def list_directory(self, vm_id: VmId, path: bytes, after: bytes, limit: int) -> DirectoryListed:
        """At most `limit` entries in the order of their names' bytes, those behind `after`."""
        ...

    async def make_directory(self, vm_id: VmId, path: bytes, mode: int, user: str | None) -> None:
        """Make a directory and those above it; one that is there is fine."""
        ...

    async def move_file(self, vm_id: VmId, path: bytes, to: bytes) -> None:
        """Rename; a file that is there is replaced."""
        ...

    async def remove_file(self, vm_id: VmId, path: bytes, *, recursive: bool) -> None:
        """Remove a file, a link, an empty directory, or with `recursive` a directory and all below it."""
        ...

    async def watch_directory(self, vm_id: VmId, path: bytes, on_event: OnWatchEvent) -> None:
        """Tell what happens in a directory until cancelled, or until the directory or the machine is gone."""
        ...

    async def feed(self, vm_id: VmId, exec_id: ExecId, data: bytes, offset: int, *, ends: bool) -> int:
        """Give a program input that begins at `offset` of all its input; how much of that it has been given.

        What it has been given before is not given again.
        """
        ...

    async def resize(self, vm_id: VmId, exec_id: ExecId, size: TerminalSize) -> None:
        """Set the size of a program's terminal."""
        ...

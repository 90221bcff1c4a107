"""What clients ask of a running machine directly: files, input, terminals. Answered at once, recorded nowhere.

`guest.<tenant>.<host id>.<type>.<session id>`, a core request with one answer. Both are a JSON object, and where
bytes go with it a newline and then the bytes. An answer is the object that `OPERATIONS` states, or one with `refusal`.
Paths and names are bytes as Linux has them, in JSON as base64. Every request names the incarnation it is for; one that
is not the session's machine on that host now is refused as `not-here`: look at the session again, and wake it if it
sleeps.
"""

from typing import Final, Literal, NamedTuple

import msgspec

from torpor_contracts.ids import ExecId

PIECE_BYTES_MAX: Final = 256 * 1024
"""The most bytes that go with one request or answer."""

ENTRIES_MAX: Final = 1_000
"""The most entries of a directory in one answer."""

NOT_HERE: Final = "not-here"
"""The code of a refusal that says: the session has no such machine on this host now."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file, directory or link. `modified_ns` counts from the Unix epoch; `link_to` is where a link points."""

    name: bytes
    kind: Literal["file", "directory", "link", "other"]
    size_bytes: int
    mode: int
    user_id: int
    group_id: int
    modified_ns: int
    link_to: bytes | None = None


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`request_id`: a repeat under the same id is answered as the first was, for a while, and changes nothing again."""

    incarnation: int
    request_id: str = ""


class ReadFile(_Request, frozen=True, kw_only=True):
    """At most `length` bytes of a file from `offset` on; answered with the bytes."""

    path: bytes
    offset: int = 0
    length: int = PIECE_BYTES_MAX


class FileRead(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes go with it. `size_bytes` and `modified_ns` are the file's: when they change, so has the file."""

    size_bytes: int
    modified_ns: int


class WriteFile(_Request, frozen=True, kw_only=True):
    """A piece of a file; the bytes go with it, and the pieces come in order.

    The file takes its place with the `last` piece, whole, so nobody sees half of it; until then it grows under the
    name of its `upload`, which the client makes up. `mode` and `user` are the file's.
    """

    path: bytes
    upload: str
    offset: int
    last: bool
    mode: int = 0o644
    user: str | None = None


class FileWritten(msgspec.Struct, frozen=True, kw_only=True):
    """So many bytes of the file are in the guest."""

    size_bytes: int


class StatFile(_Request, frozen=True, kw_only=True):
    """One file, directory or link; a link is not followed."""

    path: bytes


class FileStat(msgspec.Struct, frozen=True, kw_only=True):
    """What there is under the path."""

    entry: FileEntry


class ListDirectory(_Request, frozen=True, kw_only=True):
    """Entries of a directory in the order of their names' bytes, those behind `after`."""

    path: bytes
    after: bytes = b""
    limit: int = ENTRIES_MAX


class DirectoryListed(msgspec.Struct, frozen=True, kw_only=True):
    """A page of entries; `more`: there are others behind the last one."""

    entries: list[FileEntry]
    more: bool


class MakeDirectory(_Request, frozen=True, kw_only=True):
    """Make a directory and those above it; one that is there is fine."""

    path: bytes
    mode: int = 0o755
    user: str | None = None


class MoveFile(_Request, frozen=True, kw_only=True):
    """Rename; a file that is there is replaced."""

    path: bytes
    to: bytes


class RemoveFile(_Request, frozen=True, kw_only=True):
    """Remove a file, a link, an empty directory, or with `recursive` a directory and all below it."""

    path: bytes
    recursive: bool = False


class WatchDirectory(_Request, frozen=True, kw_only=True):
    """What has happened in a directory since the watch was asked last; waits up to `wait_s` for the first of it.

    The watch begins with the first question under its id `watch`, and ends some time after the last one.
    """

    path: bytes
    watch: str
    wait_s: float = 20.0


class WatchEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to `name` in the directory. `overflow`: some events are lost, look yourself; `gone`: so is it."""

    kind: Literal["made", "written", "modified", "moved-from", "moved-to", "removed", "overflow", "gone"]
    name: bytes


class DirectoryWatched(msgspec.Struct, frozen=True, kw_only=True):
    """What happened, in order; empty when nothing did."""

    events: list[WatchEvent]


class FeedProgram(_Request, frozen=True, kw_only=True):
    """Standard input of a program that was started with `stdin_open` or a terminal; the bytes go with it.

    `offset` counts the bytes given before, so that a repeat is not given twice. `ends`: no more will come.
    """

    exec_id: ExecId
    offset: int
    ends: bool = False


class ProgramFed(msgspec.Struct, frozen=True, kw_only=True):
    """So many bytes of input are with the program; what of a piece is not, its pipe had no room for: give it again."""

    offset: int


class ResizeTerminal(_Request, frozen=True, kw_only=True):
    """The program's terminal has another size."""

    exec_id: ExecId
    rows: int
    columns: int


class SignalProgram(_Request, frozen=True, kw_only=True):
    """Send a signal to a program and all it has started; nothing happens to one that has ended."""

    exec_id: ExecId
    signal: int


class ListPrograms(_Request, frozen=True, kw_only=True):
    """The programs that the guest knows."""


class RunningProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A program that runs, or has ended a moment ago. `remaining_s`: until its time-out."""

    exec_id: ExecId
    running: bool
    remaining_s: float


class ProgramsListed(msgspec.Struct, frozen=True, kw_only=True):
    """The programs, those of other clients too."""

    programs: list[RunningProgram]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """It is done."""


GuestRequest = (
    ReadFile
    | WriteFile
    | StatFile
    | ListDirectory
    | MakeDirectory
    | MoveFile
    | RemoveFile
    | WatchDirectory
    | FeedProgram
    | ResizeTerminal
    | SignalProgram
    | ListPrograms
)


class Operation(NamedTuple):
    """What is asked and what is answered; `reads`: nothing changes, so it may be asked as often as one likes."""

    request: type[_Request]
    answer: type[msgspec.Struct]
    reads: bool = False


OPERATIONS: Final = {
    "read-file": Operation(ReadFile, FileRead, reads=True),
    "write-file": Operation(WriteFile, FileWritten),
    "stat-file": Operation(StatFile, FileStat, reads=True),
    "list-directory": Operation(ListDirectory, DirectoryListed, reads=True),
    "make-directory": Operation(MakeDirectory, Done),
    "move-file": Operation(MoveFile, Done),
    "remove-file": Operation(RemoveFile, Done),
    "watch-directory": Operation(WatchDirectory, DirectoryWatched),
    "feed-program": Operation(FeedProgram, ProgramFed),
    "resize-terminal": Operation(ResizeTerminal, Done),
    "signal-program": Operation(SignalProgram, Done),
    "list-programs": Operation(ListPrograms, ProgramsListed, reads=True),
}
"""Type token -> what it takes and what it is answered with."""

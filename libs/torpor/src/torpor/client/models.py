"""What the SDK hands out: results, chunks of output, events; plain values."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import msgspec

from torpor_contracts.replies import Receipt

Outcome = Literal["exited", "signaled", "timed-out", "failed", "lost", "cancelled"]


@dataclass(frozen=True)
class Chunk:
    """A piece of a program's output. `offset` counts the bytes of both streams together, in the order they came."""

    stream: Literal["stdout", "stderr"]
    offset: int
    data: bytes

    @property
    def text(self) -> str:
        """The bytes as text; a character cut by the chunk's border shows as a replacement character."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True)
class ExecResult:
    """How a program ended, and what it wrote.

    `outcome` is `exited` (see `exit_code`), `signaled`, `timed-out`, `failed` (it could not run: see `detail`),
    `lost` (its machine was gone first) or `cancelled` (the session ended first). `missing_bytes` counts output
    that is not here: beyond what the caller let us keep, or no longer stored. `recorded` is False when the host has
    told the end and the log has not, for longer than usual; `position` is then that of the receipt.
    """

    exec_id: str
    outcome: Outcome
    exit_code: int | None
    stdout_bytes: bytes
    stderr_bytes: bytes
    detail: str
    incarnation: int
    missing_bytes: int
    receipt: Receipt
    position: int
    recorded: bool = True

    @property
    def stdout(self) -> str:
        """Standard output as text (UTF-8; what is not shows as replacement characters)."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Standard error as text."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Whether the program exited with 0."""
        return self.outcome == "exited" and self.exit_code == 0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was asked for. The session stood still for `pause_ms` from `taken_at`.

    Both are None while it is only asked for; `pause_ms` is 0 for one that the session sleeps in.
    """

    checkpoint_id: str
    session_id: str
    incarnation: int
    label: str
    pause_ms: float | None
    taken_at: datetime | None
    receipt: Receipt
    position: int


@dataclass(frozen=True)
class ProgramInfo:
    """A program that has not ended. `pending` waits for a machine; `asleep` goes on once the session is woken.

    `remaining_s`: until its time limit, as its guest counts; None when the guest was not asked.
    """

    exec_id: str
    state: Literal["pending", "running", "asleep", "ending"]
    requested_at: datetime
    started_at: datetime | None
    remaining_s: float | None


@dataclass(frozen=True)
class FileInfo:
    """What there is under a path in a session. `modified_ns` counts from the Unix epoch.

    Bytes of `name` and `link_to` that are no UTF-8 stand as with `os.fsdecode`.
    """

    name: str
    kind: Literal["file", "directory", "link", "other"]
    size_bytes: int
    mode: int
    user_id: int
    group_id: int
    modified_ns: int
    link_to: str | None = None


@dataclass(frozen=True)
class FileChange:
    """What happened to `name` in a watched directory.

    `overflow`: some of it is lost, so look yourself; `gone`: the directory itself is.
    """

    kind: Literal["made", "written", "modified", "moved-from", "moved-to", "removed", "overflow", "gone"]
    name: str


@dataclass(frozen=True)
class Event:
    """One event of the log. `type` is its wire tag, `data` its content.

    `body` is the same as the published type, None for a tag that this client does not know.
    """

    position: int
    stream: str
    version: int
    type: str
    occurred_at: datetime
    tenant_id: str
    command_id: str
    causation_id: str
    correlation_id: str
    digest: str
    data: Mapping[str, Any]
    body: msgspec.Struct | None

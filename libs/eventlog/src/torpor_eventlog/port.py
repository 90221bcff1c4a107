"""The event log's port: what every implementation promises, proved by one contract suite.

The log never forgets, reorders or edits an event; there is no operation for it.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from torpor_contracts.ids import CommandId, TenantId
from torpor_contracts.replies import Receipt


class NewEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event about to be appended: its versioned wire tag, and its JSON object, whose `type` repeats the tag."""

    stream: str
    tag: str
    data: bytes


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """All events of one command, appended together or not at all.

    `expected` holds, for each stream written, and for any other that the events rest on, the version it must have
    before (0: it must not exist).
    The first event's stream is the command's own: the receipt names the last event of that stream.
    `request_digest` is the SHA-256 of the command's subject and payload: the same id with another request is refused.
    `occurred_at_us` counts microseconds since the Unix epoch, UTC.
    """

    command_id: CommandId
    tenant_id: TenantId
    causation_id: str
    correlation_id: str
    request_digest: bytes
    occurred_at_us: int
    expected: Mapping[str, int]
    events: Sequence[NewEvent]


class Recorded(msgspec.Struct, frozen=True, gc=False):
    """One row of the log. `position` counts from 1 without gaps; `version` counts from 1 within the stream.

    `digest` is the RFC 9162 leaf hash of the row's canonical bytes, which begin with the digest of the row before.
    The fields stand in the order of the tables' columns; write them by keyword wherever a person does it.
    """

    position: int
    stream: str
    version: int
    tag: str
    data: bytes
    occurred_at_us: int
    command_id: str
    causation_id: str
    correlation_id: str
    tenant_id: str
    digest: bytes


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Where the log ends: its last position (0: empty), that row's digest, and the Merkle root over all rows."""

    position: int
    digest: bytes
    root: bytes


class EventLog(Protocol):
    """An append-only log with optimistic concurrency per stream and idempotency per command."""

    async def append(self, commit: Commit) -> Receipt:
        """Append a command's events durably and answer its receipt.

        A command id that is in the log already answers its first receipt and appends nothing.
        Raises `VersionConflict` for a lost race, `Rejected("command-id-reused")` for a known id with another
        request digest, `Transient` when the database is locked, full, read-only or away (nothing was appended).
        """
        ...

    async def receipt(self, command_id: CommandId) -> Receipt | None:
        """The receipt of a command, or None if it is not in the log."""
        ...

    async def load(self, stream: str, after_version: int = 0) -> list[Recorded]:
        """The stream's events with a version above `after_version`, in order."""
        ...

    async def read(self, after_position: int, limit: int) -> list[Recorded]:
        """At most `limit` events with a position above `after_position`, in order, without a gap."""
        ...

    async def head(self) -> Head:
        """The log's present end."""
        ...

    async def inclusion_proof(self, position: int, tree_size: int) -> list[bytes]:
        """The RFC 9162 inclusion proof of the row at `position` in the tree over the first `tree_size` rows."""
        ...

    async def consistency_proof(self, old_size: int, new_size: int) -> list[bytes]:
        """The RFC 9162 proof that the tree over `old_size` rows is a prefix of the one over `new_size`."""
        ...

    async def close(self) -> None:
        """Finish the appends that wait, then let go of the database."""
        ...

"""Decides, without any I/O, which of the waiting commits go into the log, at which positions and with which digests.

Every implementation of the log runs this while it holds the log's one write lock; so they all keep the same promises.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from torpor_contracts.errors import InvariantViolation, Rejected, TorporError, VersionConflict
from torpor_contracts.ids import CommandId
from torpor_contracts.replies import Receipt
from torpor_eventlog.canonical import NO_DIGEST, TEXT_BYTES_MAX, Texts, placed_digest, tail_bytes
from torpor_eventlog.merkle import Frontier, Node
from torpor_eventlog.port import Commit, Head, NewEvent, Recorded

DATA_BYTES_MAX: Final = 900_000
"""The largest event: with its headers it must fit a JetStream message of the default 1 MiB, or the relay would stop."""

EVENTS_MAX: Final = 1000
"""The most events of one commit."""

REQUEST_DIGEST_BYTES: Final = 32

TIME_US_END: Final = 1 << 63
"""Times are kept in signed columns of eight bytes."""

Outcome = Receipt | TorporError
"""What became of one commit: an error is raised to the one who waits for it."""


Row = tuple[int, str, int, str, bytes, int, str, str, str, str, bytes, bytes | None]
"""A row to insert: the fields of a `Recorded` in their order, then the request digest, which only the command's
receipt row has. A bare tuple, for it is made once for every event."""


class Prepared(msgspec.Struct, frozen=True, gc=False):
    """A commit that was found legal, with everything of its canonical bytes that does not depend on its place.

    `receipt_at` is the index of the event that the receipt names. `size_bytes` counts the events' data.
    """

    commit: Commit
    tails: Sequence[bytes]
    receipt_at: int
    size_bytes: int


class Known(msgspec.Struct, frozen=True, gc=False):
    """A command that is in the log already."""

    request_digest: bytes
    receipt: Receipt


class End(NamedTuple):
    """Where the log ends: last position, that row's digest, and the Merkle tree's growing edge."""

    position: int
    digest: bytes
    frontier: Frontier

    def head(self) -> Head:
        """The end as a reader sees it."""
        return Head(position=self.position, digest=self.digest, root=self.frontier.root())


START: Final = End(0, NO_DIGEST, Frontier())


class Plan(NamedTuple):
    """What to write, in one transaction, and what to answer once that is durable: one outcome per commit.

    The rows go between `before` and `end`; `versions` are the new versions of the streams written.
    """

    outcomes: list[Outcome]
    rows: list[Row]
    nodes: list[Node]
    versions: dict[str, int]
    before: End
    end: End


def prepare(commit: Commit) -> Prepared:
    """Check a commit and encode it.

    Raises `Rejected` for what no log could hold, `InvariantViolation` for a mistake of the code that made it.
    """
    events, expected = commit.events, commit.expected
    _check_envelope(commit)
    tails: list[bytes] = []
    size_bytes, receipt_at = 0, 0
    for at, event in enumerate(events):
        stream, data = event.stream, event.data
        if stream not in expected:
            raise InvariantViolation(f"command {commit.command_id}: no expected version for stream {stream}")
        if len(data) > DATA_BYTES_MAX:
            raise _too_large(event)
        texts = (stream, event.tag, commit.command_id, commit.causation_id, commit.correlation_id, commit.tenant_id)
        try:
            tails.append(tail_bytes(texts, data))
        except ValueError as error:
            raise _illegal_text(texts, error) from error
        size_bytes += len(data)
        if stream == events[0].stream:
            receipt_at = at
    return Prepared(commit, tails, receipt_at, size_bytes)


def plan(batch: Iterable[Prepared], end: End, versions: Mapping[str, int], known: Mapping[str, Known]) -> Plan:
    """Place the commits one after the other behind `end`; one that loses its race or is known already adds nothing.

    `versions` holds the present version of every existing stream the batch expects something of, `known` the
    commands of the batch that are in the log already.
    """
    now = dict(versions)
    written: dict[str, int] = {}
    placed: dict[str, Known] = {}
    outcomes: list[Outcome] = []
    rows: list[Row] = []
    digests: list[bytes] = []
    position, digest = end.position, end.digest
    for prepared in batch:
        commit = prepared.commit
        command_id, receipt_at = commit.command_id, prepared.receipt_at
        outcome = _without_place(commit, now, placed.get(command_id) or known.get(command_id))
        if outcome is not None:
            outcomes.append(outcome)
            continue
        occurred_at_us = commit.occurred_at_us
        for event, tail in zip(commit.events, prepared.tails, strict=True):
            stream = event.stream
            position += 1
            version = now[stream] = written[stream] = now.get(stream, 0) + 1
            digest = placed_digest(digest, position, version, occurred_at_us, tail)
            digests.append(digest)
            request_digest = None
            if receipt_at == 0:
                request_digest = commit.request_digest
                receipt = receipt_from(command_id, stream, version, position, digest)
                placed[command_id] = Known(request_digest, receipt)
                outcomes.append(receipt)
            receipt_at -= 1
            rows.append(
                (
                    position, stream, version, event.tag, event.data, occurred_at_us, command_id, commit.causation_id,
                    commit.correlation_id, commit.tenant_id, digest, request_digest,
                )
            )  # fmt: skip
    frontier = end.frontier.copy()
    nodes = frontier.extend(digests)
    return Plan(outcomes, rows, nodes, written, end, End(position, digest, frontier))


def recorded(row: Row) -> Recorded:
    """The row as a reader sees it."""
    return Recorded(*row[:-1])


def receipt_of(row: Row) -> Receipt:
    """The receipt that a command's receipt row stands for."""
    return receipt_from(row[6], row[1], row[2], row[0], row[10])


def receipt_from(command_id: str, stream: str, version: int, position: int, digest: bytes) -> Receipt:
    """The receipt of a command whose receipt row has these columns."""
    return Receipt(
        command_id=CommandId(command_id), stream=stream, version=version, position=position, digest=digest.hex()
    )


def _check_envelope(commit: Commit) -> None:
    if len(commit.request_digest) != REQUEST_DIGEST_BYTES:
        raise InvariantViolation(f"command {commit.command_id}: the request digest is no SHA-256")
    if not 0 <= commit.occurred_at_us < TIME_US_END:
        raise InvariantViolation(f"command {commit.command_id}: {commit.occurred_at_us} is no time in microseconds")
    if len(commit.events) > EVENTS_MAX:
        raise Rejected(
            "too-many-events",
            f"command {commit.command_id} has {len(commit.events)} events, at most {EVENTS_MAX} commit together",
            "split the command",
        )
    if len(commit.events) != 1 or len(commit.expected) != 1:  # else the one event's own check covers them
        for text in (commit.command_id, *commit.expected):
            texts = (text, "-", "-", "-", "-", "-")
            try:
                tail_bytes(texts, b"")
            except ValueError as error:
                raise _illegal_text(texts, error) from error


def _illegal_text(texts: Texts, error: ValueError) -> Rejected:
    return Rejected(
        "illegal-text",
        f"a stream, tag, id or tenant cannot be kept: {error}; one of {', '.join(repr(text[:80]) for text in texts)}",
        f"use 1 to {TEXT_BYTES_MAX} bytes of UTF-8 without NUL",
    )


def _too_large(event: NewEvent) -> Rejected:
    return Rejected(
        "event-too-large",
        f"a {event.tag} of stream {event.stream} has {len(event.data)} bytes, over {DATA_BYTES_MAX}",
        "put large content into the snapshot store and record its digest",
    )


def _without_place(commit: Commit, now: Mapping[str, int], before: Known | None) -> Outcome | None:
    """What to answer to a commit that adds nothing to the log; None for one that gets its place."""
    if before is not None:
        return _answer_again(commit, before)
    if not commit.events:
        return InvariantViolation(f"command {commit.command_id} is not in the log and has no events")
    for stream, expected in commit.expected.items():
        actual = now.get(stream, 0)
        if actual != expected:
            return VersionConflict(stream, expected, actual)
    return None


def _answer_again(commit: Commit, before: Known) -> Outcome:
    if before.request_digest == commit.request_digest:
        return before.receipt
    return Rejected(
        "command-id-reused",
        f"command {commit.command_id} is in the log with another request",
        "use a new id for a new command; repeat a command with the same subject and payload",
    )

"""Decides, without any I/O, which of the waiting commits go into the log, at which positions and with which digests.

Every implementation of the log runs this while it holds the log's one write lock; so they all keep the same promises.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from torpor_contracts.errors import InvariantViolation, Rejected, TorporError, VersionConflict
from torpor_contracts.ids import CommandId
from torpor_contracts.replies import Receipt
from torpor_eventlog.canonical import NO_DIGEST, placed_digest, tail_bytes
from torpor_eventlog.merkle import Frontier, Node
from torpor_eventlog.port import Commit, Head, Recorded

DATA_BYTES_MAX: Final = 900_000
"""The largest event: with its headers it must fit a JetStream message of the default 1 MiB, or the relay would stop."""

TEXT_BYTES_MAX: Final = 255
"""The longest stream, tag or id: it must fit an index entry of every database."""

EVENTS_MAX: Final = 1000
"""The most events of one commit."""

REQUEST_DIGEST_BYTES: Final = 32

TIME_US_END: Final = 1 << 63
"""Times are kept in signed columns of eight bytes."""

Outcome = Receipt | TorporError
"""What became of one commit: an error is raised to the one who waits for it."""


class Row(NamedTuple):
    """A row to insert, in the order of the table's columns. Only a command's receipt row has its `request_digest`."""

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
    request_digest: bytes | None

    def recorded(self) -> Recorded:
        """The row as a reader sees it."""
        return Recorded(
            position=self.position,
            stream=self.stream,
            version=self.version,
            tag=self.tag,
            data=self.data,
            occurred_at_us=self.occurred_at_us,
            command_id=self.command_id,
            causation_id=self.causation_id,
            correlation_id=self.correlation_id,
            tenant_id=self.tenant_id,
            digest=self.digest,
        )


class Prepared(NamedTuple):
    """A commit that was found legal, with everything of its canonical bytes that does not depend on its place."""

    commit: Commit
    tails: Sequence[bytes]
    size_bytes: int


class Known(NamedTuple):
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
    """What to write, in one transaction, and what to answer once that is durable: one outcome per commit."""

    outcomes: list[Outcome]
    rows: list[Row]
    nodes: list[Node]
    end: End


def prepare(commit: Commit) -> Prepared:
    """Check a commit and encode it.

    Raises `Rejected` for what no log could hold, `InvariantViolation` for a mistake of the code that made it.
    """
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
    command_id = _text(commit.command_id, "command id")
    causation_id = _text(commit.causation_id, "causation id")
    correlation_id = _text(commit.correlation_id, "correlation id")
    tenant_id = _text(commit.tenant_id, "tenant id")
    tails, size_bytes = [], 0
    for event in commit.events:
        if event.stream not in commit.expected:
            raise InvariantViolation(f"command {commit.command_id}: no expected version for stream {event.stream}")
        if len(event.data) > DATA_BYTES_MAX:
            raise Rejected(
                "event-too-large",
                f"a {event.tag} of stream {event.stream} has {len(event.data)} bytes, over {DATA_BYTES_MAX}",
                "put large content into the snapshot store and record its digest",
            )
        stream, tag = _text(event.stream, "stream"), _text(event.tag, "tag")
        tails.append(tail_bytes((stream, tag, command_id, causation_id, correlation_id, tenant_id, event.data)))
        size_bytes += len(event.data)
    return Prepared(commit, tails, size_bytes)


def plan(
    batch: Iterable[Prepared], end: End, versions: Mapping[str, int], known: Callable[[str], Known | None]
) -> Plan:
    """Place the commits one after the other behind `end`; one that loses its race or is known already adds nothing.

    `versions` holds the present version of every existing stream the batch expects something of; `known` answers
    for a command id whether it is in the log.
    """
    now: dict[str, int] = {}
    placed: dict[str, Known] = {}
    outcomes: list[Outcome] = []
    rows: list[Row] = []
    position, digest = end.position, end.digest
    for commit, tails, _ in batch:
        before = placed.get(commit.command_id) or known(commit.command_id)
        if before is not None:
            outcomes.append(_answer_again(commit, before))
            continue
        refusal = _refusal(commit, now, versions)
        if refusal is not None:
            outcomes.append(refusal)
            continue
        own_stream = commit.events[0].stream
        own_at = max(at for at, event in enumerate(commit.events) if event.stream == own_stream)
        for at, (event, tail) in enumerate(zip(commit.events, tails, strict=True)):
            stream = event.stream
            position += 1
            version = now[stream] = now.get(stream, commit.expected[stream]) + 1
            digest = placed_digest(digest, position, version, commit.occurred_at_us, tail)
            request_digest = commit.request_digest if at == own_at else None
            rows.append(
                Row(
                    position, stream, version, event.tag, event.data, commit.occurred_at_us, commit.command_id,
                    commit.causation_id, commit.correlation_id, commit.tenant_id, digest, request_digest,
                )
            )  # fmt: skip
        receipt = receipt_of(rows[own_at - len(commit.events)])
        placed[commit.command_id] = Known(commit.request_digest, receipt)
        outcomes.append(receipt)
    frontier = end.frontier.copy()
    nodes = frontier.extend(row.digest for row in rows)
    return Plan(outcomes, rows, nodes, End(position, digest, frontier))


def receipt_of(row: Row) -> Receipt:
    """The receipt that a command's receipt row stands for."""
    return receipt_at(CommandId(row.command_id), row.stream, row.version, row.position, row.digest)


def receipt_at(command_id: CommandId, stream: str, version: int, position: int, digest: bytes) -> Receipt:
    """The receipt of a command whose receipt row has these columns."""
    return Receipt(command_id=command_id, stream=stream, version=version, position=position, digest=digest.hex())


def _text(text: str, what: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        encoded = b""
    if not 0 < len(encoded) <= TEXT_BYTES_MAX or b"\x00" in encoded:
        raise Rejected(
            "illegal-text",
            f"the {what} {text[:80]!r} cannot be kept",
            f"use 1 to {TEXT_BYTES_MAX} bytes of UTF-8 without NUL",
        )
    return encoded


def _answer_again(commit: Commit, before: Known) -> Outcome:
    if before.request_digest == commit.request_digest:
        return before.receipt
    return Rejected(
        "command-id-reused",
        f"command {commit.command_id} is in the log with another request",
        "use a new id for a new command; repeat a command with the same subject and payload",
    )


def _refusal(commit: Commit, now: Mapping[str, int], versions: Mapping[str, int]) -> TorporError | None:
    if not commit.events:
        return InvariantViolation(f"command {commit.command_id} is not in the log and has no events")
    for stream, expected in commit.expected.items():
        actual = now.get(stream)
        if actual is None:
            actual = versions.get(stream, 0)
        if actual != expected:
            return VersionConflict(stream, expected, actual)
    return None

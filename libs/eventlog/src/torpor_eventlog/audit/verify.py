"""Verifies the log against its own digests, the heads signed and kept elsewhere, and its copy EVENTS."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from torpor_contracts.errors import TorporError
from torpor_eventlog.audit.findings import READ_MAX, Finding, Findings, OnProgress, silent
from torpor_eventlog.audit.stream import StoredStream
from torpor_eventlog.canonical import NO_DIGEST
from torpor_eventlog.healing import Carried, digest_fits
from torpor_eventlog.merkle import TILE_LEVELS, Frontier, inclusion_holds
from torpor_eventlog.port import EventLog, Head, Recorded

RELAY_GRACE_S: Final = 5.0
"""How long a stream that is behind the log is given to catch up before it counts as truncated."""

_FIELDS: Final = Recorded.__struct_fields__
_TILE: Final = 1 << TILE_LEVELS
_BLOCK: Final = 1 << 2 * TILE_LEVELS


class KeptHead(msgspec.Struct, frozen=True, kw_only=True):
    """A head that was signed and kept outside the database; `root` is the Merkle root over the first `size` rows."""

    size: int
    root: bytes
    kept_in: str
    """Where it was found, for the report."""


def open_heads(
    notes: Iterable[str], open_head: Callable[[str], tuple[int, bytes]], kept_in: str
) -> tuple[list[KeptHead], list[Finding]]:
    """Open the notes kept in one place; `open_head` is `VerifierKey.open_checkpoint`.

    A note that the log's key has not signed is no head but a finding, to be passed on to `verify`.
    """
    heads: list[KeptHead] = []
    refused: list[Finding] = []
    for number, note in enumerate(notes, 1):
        try:
            size, root = open_head(note)
        except TorporError as error:
            detail = f"note {number} in {kept_in}: {error}"
            refused.append(Finding(place="head", position=0, kind="changed", detail=detail))
        else:
            heads.append(KeptHead(size=size, root=root, kept_in=kept_in))
    return heads, refused


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What was verified, and what was found. `findings` holds the first of `findings_total`."""

    position: int
    """The log's last position when the audit began."""
    root: str
    """The Merkle root over the rows up to there, recomputed (hex)."""
    rows: int
    heads: int
    stream_messages: int
    findings: list[Finding]
    findings_total: int

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return self.findings_total == 0

    @property
    def first_bad_position(self) -> int | None:
        """The lowest position of the log at which something is wrong; a note that cannot be opened has none."""
        return min((finding.position for finding in self.findings if finding.position), default=None)


async def verify(
    log: EventLog,
    kept: Sequence[KeptHead] = (),
    stream: StoredStream | None = None,
    *,
    refused: Sequence[Finding] = (),
    on_progress: OnProgress = silent,
    relay_grace_s: float = RELAY_GRACE_S,
) -> Verified:
    """Verify the log up to its present head, then the stream if one is given. `refused` is from `open_heads`.

    A head that was never kept proves nothing about the log's end: only what is kept elsewhere shows a lost tail.
    """
    findings = Findings()
    for finding in refused:
        findings.add(finding.place, finding.position, finding.kind, finding.detail)
    head = await log.head()
    rows, root = await _verify_log(log, head, kept, findings, on_progress)
    if rows == head.position:
        await _verify_nodes(log, rows, root, findings)
    messages = 0
    if stream is not None:
        messages = await _verify_stream(log, stream, findings, on_progress, relay_grace_s)
    return Verified(
        position=head.position,
        root=root.hex(),
        rows=rows,
        heads=len(kept),
        stream_messages=messages,
        findings=sorted(findings.first, key=lambda finding: finding.position),
        findings_total=findings.total,
    )


async def _verify_log(
    log: EventLog, head: Head, kept: Sequence[KeptHead], findings: Findings, on_progress: OnProgress
) -> tuple[int, bytes]:
    """Recompute the chain and the tree; the rows seen, and the root over them."""
    frontier, digest, position = Frontier(), NO_DIGEST, 0
    agreed = 0
    for until in [*sorted(kept, key=lambda each: each.size), None]:
        goal = min(head.position, until.size) if until is not None else head.position
        while position < goal:
            rows = await _read(log, position, goal, findings)
            if not rows:
                return position, frontier.root()
            _check_chain(rows, position, digest, findings)
            frontier.extend(row.digest for row in rows)
            position, digest = rows[-1].position, rows[-1].digest
            on_progress("log", position, head.position)
        if until is not None and _agrees(until, frontier, agreed, findings):
            agreed = until.size
    if (digest, frontier.root()) != (head.digest, head.root):
        findings.add("log", position, "changed", "the head row does not say what the rows up to it add up to")
    return position, frontier.root()


async def _read(log: EventLog, position: int, goal: int, findings: Findings) -> list[Recorded]:
    """The next rows up to `goal`, without a gap; what is in the way is a finding, and the walk ends there."""
    try:
        rows = await log.read(position, min(READ_MAX, goal - position))
    except TorporError as error:
        findings.add("log", position + 1, "unreadable", str(error))
        return []
    for at, row in enumerate(rows):
        if row.position != position + 1 + at:
            findings.add("log", position + 1 + at, "missing", f"the next row is at position {row.position}")
            return rows[:at]
    if not rows:
        findings.add("log", position + 1, "missing", f"the head row says the log goes on to position {goal}")
    return rows


def _check_chain(rows: Sequence[Recorded], position: int, digest: bytes, findings: Findings) -> None:
    for row in rows:
        position += 1
        if not digest_fits(digest, row):
            findings.add("log", position, "changed", "its digest does not follow from the row before and its content")
        digest = row.digest


def _agrees(kept: KeptHead, frontier: Frontier, agreed: int, findings: Findings) -> bool:
    if frontier.size < kept.size:
        findings.add(
            "log",
            frontier.size + 1,
            "truncated",
            f"the log ends at {frontier.size}; the head in {kept.kept_in} was signed at {kept.size}",
        )
        return False
    if frontier.root() != kept.root:
        findings.add(
            "log",
            agreed + 1,
            "changed",
            f"the rows are not those of the head in {kept.kept_in}, signed at {kept.size}; the first of them that "
            f"was changed is after position {agreed}, with all later digests recomputed",
        )
        return False
    return True


async def _verify_nodes(log: EventLog, rows: int, root: bytes, findings: Findings) -> None:
    """Ask for proofs that between them need every stored node of the tree, and check them."""
    for block in range(0, rows, _BLOCK):
        for position in (block + 1, block + _TILE + 1):
            if position > rows:
                continue
            (row,) = await log.read(position - 1, 1)
            proof = await log.inclusion_proof(position, rows)
            if not inclusion_holds(row.digest, position - 1, rows, proof, root):
                detail = "its inclusion proof fails: stored nodes of the tree are not what the rows add up to"
                findings.add("log", position, "changed", detail)
                return


async def _verify_stream(
    log: EventLog, stream: StoredStream, findings: Findings, on_progress: OnProgress, relay_grace_s: float
) -> int:
    """Compare the stream with the log, message by message; how many messages there were."""
    goal = (await log.head()).position
    last = await _caught_up(stream, goal, relay_grace_s)
    end = (await log.head()).position
    if last < goal:
        findings.add("stream", last + 1, "truncated", f"the stream ends at {last}, the log at {goal}")
    if last > end:
        findings.add("stream", end + 1, "extra", f"the stream goes on to {last}, the log ends at {end}")
    position, digest, messages, both = 0, NO_DIGEST, 0, min(last, end)
    while position < both:
        try:
            rows = await log.read(position, min(READ_MAX, both - position))
        except TorporError:
            break  # a finding already
        if not rows:
            break
        carried = await _messages_up_to(stream, position, rows[-1].position)
        messages += len(carried)
        _compare(rows, carried, digest, findings)
        position, digest = rows[-1].position, rows[-1].digest
        on_progress("stream", position, both)
    return messages


async def _caught_up(stream: StoredStream, goal: int, relay_grace_s: float) -> int:
    """The stream's last sequence, once it has reached `goal` or the grace is over."""
    clock = asyncio.get_running_loop().time
    until = clock() + relay_grace_s
    last = (await stream.last()).sequence
    while last < goal and clock() < until:
        await asyncio.sleep(min(0.1, relay_grace_s))
        last = (await stream.last()).sequence
    return last


async def _messages_up_to(stream: StoredStream, after: int, up_to: int) -> list[Carried]:
    found: list[Carried] = []
    while after < up_to:
        batch = await stream.read(after, up_to - after)
        found += [carried for carried in batch if carried.sequence <= up_to]
        if not batch:
            break
        after = batch[-1].sequence
    return found


def _compare(rows: Sequence[Recorded], carried: Sequence[Carried], previous: bytes, findings: Findings) -> None:
    """Note what the stream has otherwise; messages missing in a row are one finding."""
    by_sequence = {message.sequence: message.row for message in carried}
    missing_since = 0
    for row in [*rows, None]:
        if row is not None and row.position not in by_sequence:
            missing_since, previous = missing_since or row.position, row.digest
            continue
        if missing_since:
            last = (row.position if row is not None else rows[-1].position + 1) - 1
            findings.add("stream", missing_since, "missing", f"messages {missing_since} to {last} are not there")
            missing_since = 0
        if row is None:
            break
        copy = by_sequence[row.position]
        if copy is None:
            findings.add("stream", row.position, "unreadable", "the message is no row of the log")
        elif copy != row:
            findings.add("stream", row.position, "changed", _difference(row, copy, previous))
        previous = row.digest


def _difference(row: Recorded, copy: Recorded, previous: bytes) -> str:
    fields = ", ".join(field for field in _FIELDS if getattr(copy, field) != getattr(row, field))
    if copy.digest == row.digest and digest_fits(previous, copy) and not digest_fits(previous, row):
        return f"it differs from the log in {fields}; the digest says that the message is right and the log is not"
    return f"it differs from the log in {fields}"

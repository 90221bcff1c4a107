"""Evidence of one session in a file: all events of its streams, each proved to be in the log under one signed head.

Whoever has the log's public key can verify it, without the log and without us. It proves that what it holds is in the
log, unchanged and without an event left out in between; that nothing came after the last event of a stream it cannot
prove.
"""

import base64
import binascii
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from torpor_contracts.errors import Rejected, TorporError
from torpor_contracts.ids import SessionId
from torpor_eventlog.audit.findings import Finding, Findings, OnProgress, silent
from torpor_eventlog.canonical import NO_DIGEST, row_digest
from torpor_eventlog.merkle import DIGEST_BYTES, inclusion_holds
from torpor_eventlog.port import EventLog, Recorded

FORMAT: Final = "torpor-session-bundle.v1"

REFERENCES: Final = frozenset({"vm_id", "checkpoint_id", "parent_id"})
"""Fields of events that name a stream which belongs to the session too."""

STREAMS_MAX: Final = 100_000
"""How many streams one session may have before an export gives up."""

OpenedHead = tuple[int, bytes]
"""A signed head that was opened: how many rows it covers, and the Merkle root over them."""


class BundledEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the log. `data` is its text, byte for byte, or base64 where it is no UTF-8.

    `previous` is the digest of the row before it in the log, `proof` its RFC 9162 inclusion proof (hex).
    """

    position: int
    stream: str
    version: int
    tag: str
    data: str
    encoding: Literal["utf-8", "base64"]
    occurred_at_us: int
    command_id: str
    causation_id: str
    correlation_id: str
    tenant_id: str
    previous: str
    proof: list[str]


class Bundle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file. `head` is the signed note; `streams` how many events of each stream it holds (0: it has none)."""

    format: Literal["torpor-session-bundle.v1"]
    session_id: str
    head: str
    streams: dict[str, int]
    events: list[BundledEvent]


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What an export made. `left_out` events are newer than the signed head, which cannot prove them."""

    content: bytes
    session_id: str
    events: int
    streams: int
    head_size: int
    left_out: int


class BundleVerified(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a bundle, and what is wrong with it. Without findings, all of it is proved."""

    session_id: str
    head_size: int
    streams: dict[str, int]
    events: int
    findings: list[Finding]
    findings_total: int

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return self.findings_total == 0


async def export_session(
    log: EventLog, session_id: SessionId, head: str, size: int, on_progress: OnProgress = silent
) -> Exported:
    """Bundle a session's events under the signed head `head`, which covers the first `size` rows.

    Raises `Rejected` when there is no such session, or none of it is covered yet.
    """
    rows, streams, left_out = await _rows_of(log, session_id, size)
    if not streams.get(session_id):
        raise Rejected(
            "session-not-covered" if left_out else "session-unknown",
            f"the signed head of {size} rows covers no event of session {session_id}",
            "wait for the next signed head, then export again" if left_out else "look it up: torpor session list",
        )
    rows.sort(key=lambda row: row.position)
    events = []
    for done, row in enumerate(rows, 1):
        events.append(await _bundled(log, row, size))
        on_progress("export", done, len(rows))
    bundle = Bundle(
        format=FORMAT, session_id=session_id, head=head, streams=dict(sorted(streams.items())), events=events
    )
    return Exported(
        content=_encode(bundle),
        session_id=session_id,
        events=len(events),
        streams=len(streams),
        head_size=size,
        left_out=left_out,
    )


def verify_bundle(content: bytes, open_head: Callable[[str], OpenedHead]) -> BundleVerified:
    """Verify a bundle with nothing but what `open_head` needs: the log's public key.

    `open_head` raises a `TorporError` for a note that this key has not signed. Raises `Rejected` for a file that is
    no bundle at all.
    """
    findings = Findings()
    bundle = _decode(content, findings)
    size, root = 0, b""
    try:
        size, root = open_head(bundle.head)
    except TorporError as error:
        findings.add("head", 0, "changed", str(error))
    else:
        for event in bundle.events:
            _verify_event(event, size, root, findings)
    _verify_streams(bundle, findings)
    return BundleVerified(
        session_id=bundle.session_id,
        head_size=size,
        streams=bundle.streams,
        events=len(bundle.events),
        findings=findings.first,
        findings_total=findings.total,
    )


async def _rows_of(log: EventLog, session_id: str, size: int) -> tuple[list[Recorded], dict[str, int], int]:
    """The rows of every stream that belongs to the session; how many of each stream; how many are not covered."""
    rows: list[Recorded] = []
    streams: dict[str, int] = {}
    left_out = 0
    waiting = [session_id]
    while waiting:
        stream = waiting.pop()
        if stream in streams:
            continue
        if len(streams) >= STREAMS_MAX:
            raise Rejected("session-too-large", f"over {STREAMS_MAX} streams", "ask for less: this is no one session")
        loaded = await log.load(stream)
        covered = [row for row in loaded if row.position <= size]
        left_out += len(loaded) - len(covered)
        streams[stream] = len(covered)
        rows += covered
        for row in covered:
            waiting += sorted(_named_in(row.data))
    return rows, streams, left_out


async def _bundled(log: EventLog, row: Recorded, size: int) -> BundledEvent:
    previous = (await log.read(row.position - 2, 1))[0].digest if row.position > 1 else NO_DIGEST
    proof = await log.inclusion_proof(row.position, size)
    try:
        data, encoding = row.data.decode(), "utf-8"
    except UnicodeDecodeError:
        data, encoding = base64.b64encode(row.data).decode(), "base64"
    return BundledEvent(
        position=row.position,
        stream=row.stream,
        version=row.version,
        tag=row.tag,
        data=data,
        encoding="utf-8" if encoding == "utf-8" else "base64",
        occurred_at_us=row.occurred_at_us,
        command_id=row.command_id,
        causation_id=row.causation_id,
        correlation_id=row.correlation_id,
        tenant_id=row.tenant_id,
        previous=previous.hex(),
        proof=[step.hex() for step in proof],
    )


def _encode(bundle: Bundle) -> bytes:
    """The one form a bundle has: anything else, though it may mean the same, is a changed file."""
    return msgspec.json.format(msgspec.json.encode(bundle), indent=1) + b"\n"


def _decode(content: bytes, findings: Findings) -> Bundle:
    try:
        bundle = msgspec.json.decode(content, type=Bundle)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected(
            "bundle-unreadable", f"the file is no session bundle: {error}", "export it again: torpor audit export"
        ) from error
    if _encode(bundle) != content:
        findings.add("bundle", 0, "changed", "the file was edited after its export, if only in its form")
    return bundle


def _verify_event(event: BundledEvent, size: int, root: bytes, findings: Findings) -> None:
    try:
        previous, *proof = [_digest(text) for text in (event.previous, *event.proof)]
        leaf = row_digest(previous, _row_of(event))
    except (struct.error, ValueError, OverflowError, msgspec.MsgspecError) as error:
        findings.add("bundle", event.position, "changed", f"it is not written as an export writes it: {error}")
        return
    if not inclusion_holds(leaf, event.position - 1, size, proof, root):
        findings.add(
            "bundle", event.position, "changed", f"{event.tag} is not proved to be in the log as it stands here"
        )


def _verify_streams(bundle: Bundle, findings: Findings) -> None:
    positions = [event.position for event in bundle.events]
    if positions != sorted(set(positions)) or list(bundle.streams) != sorted(bundle.streams):
        findings.add("bundle", 0, "changed", "its events or streams are not in order")
    versions: dict[str, int] = {}
    for event in bundle.events:
        expected = versions.get(event.stream, 0) + 1
        if event.version != expected:
            missing = f"version {expected} of {event.stream} is not here, but version {event.version} is"
            findings.add("bundle", event.position, "missing", missing)
        versions[event.stream] = event.version
    if not versions.get(bundle.session_id):
        findings.add("bundle", 0, "missing", f"no event of session {bundle.session_id} is here")
    reached = _reached(bundle)
    for stream in sorted(reached | versions.keys() | bundle.streams.keys()):
        if bundle.streams.get(stream) != versions.get(stream, 0) or stream not in reached:
            findings.add("bundle", 0, "missing", f"stream {stream} is not as complete as the session's events say")


def _reached(bundle: Bundle) -> frozenset[str]:
    """The streams that the session's events lead to."""
    named: dict[str, set[str]] = {}
    for event in bundle.events:
        named.setdefault(event.stream, set()).update(_named_in(event.data.encode()))
    reached: set[str] = set()
    waiting = [bundle.session_id]
    while waiting:
        stream = waiting.pop()
        if stream not in reached:
            reached.add(stream)
            waiting += named.get(stream, ())
    return frozenset(reached)


def _digest(text: str) -> bytes:
    digest = bytes.fromhex(text)
    if len(digest) != DIGEST_BYTES or digest.hex() != text:
        raise ValueError(f"{text[:80]!r} is no digest")
    return digest


def _row_of(event: BundledEvent) -> Recorded:
    data = event.data.encode() if event.encoding == "utf-8" else _strictly_decoded(event.data)
    return Recorded(
        position=event.position,
        stream=event.stream,
        version=event.version,
        tag=event.tag,
        data=data,
        occurred_at_us=event.occurred_at_us,
        command_id=event.command_id,
        causation_id=event.causation_id,
        correlation_id=event.correlation_id,
        tenant_id=event.tenant_id,
        digest=b"",
    )


def _strictly_decoded(text: str) -> bytes:
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data).decode() != text:
        raise binascii.Error("the base64 is not in its one form")
    return data


def _named_in(data: bytes) -> set[str]:
    """The streams that an event names."""
    try:
        decoded = msgspec.json.decode(data)
    except msgspec.MsgspecError:
        return set()
    found: set[str] = set()
    waiting: list[Any] = [decoded]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            found.update(name for key, name in value.items() if key in REFERENCES and isinstance(name, str))
            waiting += value.values()
        elif isinstance(value, Sequence) and not isinstance(value, str):
            waiting += value
    return found

"""Golden histories: reads them, folds them through everything, and writes what is expected of a new one.

`python -m tests.support.golden NAME…` writes `schemas/golden/NAME.expected.json` from today's code, for review, and
adds the digest of `NAME.jsonl` to `FROZEN`: that file is never edited from then on.
"""

import asyncio
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import msgspec

from tests.support.histories import no_dead_letters
from torpor_billing.projections import Meters
from torpor_contracts.checkpoint import CheckpointEvent
from torpor_contracts.cleanup import CleanupEvent
from torpor_contracts.host import HostEvent
from torpor_contracts.session import SessionEvent
from torpor_contracts.vm import VmEvent
from torpor_eventlog.canonical import NO_DIGEST, row_digest
from torpor_eventlog.codec import decode_event
from torpor_eventlog.feeds import LogFeed
from torpor_eventlog.followers import ProjectionFollower
from torpor_eventlog.instants import from_us, to_us
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Recorded
from torpor_eventlog.views_memory import MemoryViewStore
from torpor_eventlog.views_port import Projection
from torpor_reaper.domain.cleanup import IDLE
from torpor_reaper.domain.cleanup import evolve as evolve_cleanup
from torpor_reaper.projections import Resources
from torpor_scheduler.domain.folding import evolve as evolve_session
from torpor_scheduler.domain.host import ABSENT_HOST, evolve_host
from torpor_scheduler.domain.session import INITIAL
from torpor_scheduler.projections import Views
from torpor_snapshot_store.domain.checkpoint import ABSENT as CHECKPOINT_ABSENT
from torpor_snapshot_store.domain.checkpoint import evolve as evolve_checkpoint
from torpor_snapshot_store.projections import Checkpoints
from torpor_vm_host.domain.vm import ABSENT as VM_ABSENT
from torpor_vm_host.domain.vm import evolve as evolve_vm
from torpor_vm_host.projections import Vms

ROOM: Final = Path(__file__).resolve().parents[2] / "schemas" / "golden"
FROZEN: Final = ROOM / "FROZEN"
ROWS_MAX: Final = 1000


class Aggregate(NamedTuple):
    """A kind of stream: whose events it holds, where its state begins, and how that moves."""

    events: tuple[type, ...]
    initial: Any
    evolve: Any


AGGREGATES: Final = {
    "session": Aggregate(get_args(SessionEvent), INITIAL, evolve_session),
    "host": Aggregate(get_args(HostEvent), ABSENT_HOST, evolve_host),
    "vm": Aggregate(get_args(VmEvent), VM_ABSENT, evolve_vm),
    "checkpoint": Aggregate(get_args(CheckpointEvent), CHECKPOINT_ABSENT, evolve_checkpoint),
    "cleanup": Aggregate(get_args(CleanupEvent), IDLE, evolve_cleanup),
}


def projections() -> Mapping[str, Projection]:
    """Every view of every service, by service."""
    return {
        "scheduler": Views(),
        "vm-host": Vms(),
        "snapshot-store": Checkpoints(),
        "billing": Meters(),
        "reaper": Resources(),
    }


def names() -> list[str]:
    """The histories there are."""
    return sorted(path.stem for path in ROOM.glob("*.jsonl"))


def read(name: str) -> list[Recorded]:
    """A history's rows."""
    return [_row(json.loads(line)) for line in (ROOM / f"{name}.jsonl").read_text().splitlines()]


def line_of(row: Recorded) -> str:
    """A row as a history holds it: `data` as it is, everything else for people to read."""
    head = {
        "position": row.position,
        "stream": row.stream,
        "version": row.version,
        "tag": row.tag,
        "occurred_at": from_us(row.occurred_at_us).isoformat(timespec="microseconds"),
        "tenant_id": row.tenant_id,
        "command_id": row.command_id,
        "causation_id": row.causation_id,
        "correlation_id": row.correlation_id,
        "digest": row.digest.hex(),
    }
    return json.dumps(head, ensure_ascii=False)[:-1] + f', "data": {row.data.decode()}}}'


def digest_of(name: str) -> str:
    """The SHA-256 of a history's file."""
    return hashlib.sha256((ROOM / f"{name}.jsonl").read_bytes()).hexdigest()


def frozen() -> dict[str, str]:
    """Name -> digest of every history that may not change any more."""
    lines = FROZEN.read_text().splitlines() if FROZEN.is_file() else []
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


def broken_at(rows: Iterable[Recorded]) -> int | None:
    """The first position whose digest, or place, is not what the rows before make it."""
    previous, versions = NO_DIGEST, dict[str, int]()
    for position, row in enumerate(rows, 1):
        versions[row.stream] = versions.get(row.stream, 0) + 1
        sound = row.position == position and row.version == versions[row.stream]
        if not sound or row.digest != row_digest(previous, row):
            return position
        previous = row.digest
    return None


def expected(name: str) -> dict[str, Any]:
    """What was written down of the history's end."""
    found: dict[str, Any] = json.loads((ROOM / f"{name}.expected.json").read_text())
    return found


async def folded(rows: list[Recorded]) -> dict[str, Any]:
    """The history's end: the state of every stream, and the rows of every view."""
    return {
        "head": {"position": rows[-1].position, "digest": rows[-1].digest.hex()},
        "streams": _streams(rows),
        "views": {service: await _view(projection, rows) for service, projection in projections().items()},
    }


def _streams(rows: list[Recorded]) -> dict[str, Any]:
    states: dict[str, tuple[str, Any]] = {}
    for row in rows:
        event = decode_event(row)
        if row.stream not in states:
            kind = next(kind for kind, aggregate in AGGREGATES.items() if isinstance(event, aggregate.events))
            states[row.stream] = kind, AGGREGATES[kind].initial
        kind, state = states[row.stream]
        states[row.stream] = kind, AGGREGATES[kind].evolve(state, event)
    return {stream: {"kind": kind, "state": _plain(state)} for stream, (kind, state) in sorted(states.items())}


async def _view(projection: Projection, rows: list[Recorded]) -> dict[str, Any]:
    views, follower_log = MemoryViewStore(), MemoryLog()
    follower = ProjectionFollower(projection, views, LogFeed(follower_log), dead=no_dead_letters)
    await views.prepare(projection.name, projection.tables)
    await follower.fold(rows)
    async with views.reading() as reading:
        return {
            table.name: [_plain(row) for row in await reading.find(table, limit=ROWS_MAX)]
            for table in projection.tables
        }


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, order="deterministic")


def _row(fields: dict[str, Any]) -> Recorded:
    return Recorded(
        position=fields["position"],
        stream=fields["stream"],
        version=fields["version"],
        tag=fields["tag"],
        data=msgspec.json.encode(fields["data"]),
        occurred_at_us=to_us(datetime.fromisoformat(fields["occurred_at"])),
        command_id=fields["command_id"],
        causation_id=fields["causation_id"],
        correlation_id=fields["correlation_id"],
        tenant_id=fields["tenant_id"],
        digest=bytes.fromhex(fields["digest"]),
    )


def main(wanted: list[str]) -> int:
    """Write what is expected of these histories; they must be whole."""
    for name in wanted:
        rows = read(name)
        position = broken_at(rows)
        if position is not None:
            sys.stderr.write(f"{name}: position {position} is not what the rows before it make it\n")
            return 1
        if frozen().get(name, digest_of(name)) != digest_of(name):
            sys.stderr.write(f"{name}: a frozen history was changed; take it back, and write a new one instead\n")
            return 1
        text = json.dumps(asyncio.run(folded(rows)), indent=1, ensure_ascii=False) + "\n"
        (ROOM / f"{name}.expected.json").write_text(text)
        kept = {**frozen(), name: digest_of(name)}
        FROZEN.write_text("".join(f"{digest}  {known}\n" for known, digest in sorted(kept.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

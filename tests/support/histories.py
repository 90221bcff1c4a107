"""Example events of machines, sessions, hosts and checkpoints, and a log in memory to write them to."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec

from torpor_contracts.checkpoint import CheckpointFreed, CheckpointManifest, CheckpointPart, CheckpointRecorded
from torpor_contracts.host import HostLost
from torpor_contracts.ids import CheckpointId, CommandId, HostId, SessionId, TenantId, VmId
from torpor_contracts.session import (
    MachineSpec,
    SessionFailed,
    SessionLost,
    SessionRecovered,
    SessionStartFailed,
    SessionTerminated,
    VmStartRequested,
)
from torpor_contracts.vm import (
    ResourceRef,
    VmClaimed,
    VmQuarantined,
    VmReaped,
    VmReleased,
    VmStarted,
    VmStartFailed,
    VmStopped,
    VmSuspended,
)
from torpor_eventlog.codec import encode_event
from torpor_eventlog.feeds import LogFeed
from torpor_eventlog.followers import ProjectionFollower
from torpor_eventlog.instants import to_us
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Commit, EventLog, Recorded
from torpor_eventlog.views_memory import MemoryViewStore
from torpor_eventlog.views_port import Projection

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
"""Where every example begins; times are seconds after it."""

ACME = TenantId("acme")
_VM, _HOST, _SESSION = VmId("vm-1"), HostId("host-a"), SessionId("s-1")


def at(seconds: float) -> datetime:
    """The moment `seconds` after noon."""
    return NOON + timedelta(seconds=seconds)


@dataclass(frozen=True)
class Machine:
    """One machine of one incarnation; each method is an event that says what happened to it at a second after noon."""

    vm_id: VmId = _VM
    host_id: HostId = _HOST
    session_id: SessionId = _SESSION
    incarnation: int = 1
    tenant_id: TenantId = ACME
    spec: MachineSpec = field(default_factory=MachineSpec)
    resources: tuple[ResourceRef, ...] = (
        ResourceRef(kind="process", name="vmm"),
        ResourceRef(kind="overlay", name="disk.overlay"),
    )

    def asked_for(self, second: float) -> VmStartRequested:
        return VmStartRequested(
            session_id=self.session_id,
            host_id=self.host_id,
            vm_id=self.vm_id,
            incarnation=self.incarnation,
            attempt=1,
            machine=self.spec,
            checkpoint_id=None,
            fingerprint="simulated-1",
            requested_at=at(second),
            deadline_at=at(second + 60),
        )

    def claimed(self, second: float) -> VmClaimed:
        return VmClaimed(
            vm_id=self.vm_id,
            host_id=self.host_id,
            boot_id="boot-1",
            tenant_id=self.tenant_id,
            session_id=self.session_id,
            incarnation=self.incarnation,
            machine=self.spec,
            checkpoint_id=None,
            resources=list(self.resources),
            claimed_at=at(second),
        )

    def started(self, second: float) -> VmStarted:
        return VmStarted(
            vm_id=self.vm_id,
            host_id=self.host_id,
            session_id=self.session_id,
            incarnation=self.incarnation,
            machine=self.spec,
            checkpoint_id=None,
            start_ms=120,
            observed_at=at(second),
        )

    def start_failed(self, second: float) -> VmStartFailed:
        return VmStartFailed(
            vm_id=self.vm_id,
            host_id=self.host_id,
            session_id=self.session_id,
            incarnation=self.incarnation,
            code="agent-silent",
            detail="the guest agent did not answer",
            retryable=True,
            observed_at=at(second),
        )

    def start_given_up(self, second: float = 60) -> SessionStartFailed:
        return SessionStartFailed(
            vm_id=self.vm_id,
            host_id=self.host_id,
            incarnation=self.incarnation,
            attempt=1,
            code="start-timed-out",
            detail="no start was observed in time",
            observed_at=at(second),
            retry_at=None,
        )

    def suspended(self, second: float) -> VmSuspended:
        return VmSuspended(
            vm_id=self.vm_id,
            host_id=self.host_id,
            session_id=self.session_id,
            incarnation=self.incarnation,
            checkpoint_id=CheckpointId(f"ckp-of-{self.vm_id}"),
            suspend_ms=80,
            observed_at=at(second),
        )

    def stopped(self, second: float, *, expected: bool = True) -> VmStopped:
        return VmStopped(
            vm_id=self.vm_id,
            host_id=self.host_id,
            session_id=self.session_id,
            incarnation=self.incarnation,
            expected=expected,
            cause="asked" if expected else "the process was gone",
            observed_at=at(second),
        )

    def released(self, second: float, *kinds: str) -> VmReleased:
        chosen = [resource for resource in self.resources if not kinds or resource.kind in kinds]
        return VmReleased(vm_id=self.vm_id, host_id=self.host_id, resources=chosen, released_at=at(second))

    def quarantined(self, second: float) -> VmQuarantined:
        return VmQuarantined(vm_id=self.vm_id, host_id=self.host_id, evidence="nobody's", observed_at=at(second))

    def reaped(self, second: float) -> VmReaped:
        return VmReaped(
            vm_id=self.vm_id, host_id=self.host_id, evidence="nobody's", checked_position=1, observed_at=at(second)
        )

    def lost(self, second: float) -> SessionLost:
        return SessionLost(
            incarnation=self.incarnation,
            host_id=self.host_id,
            vm_id=self.vm_id,
            cause="host-lost",
            lost_since=at(0),
            observed_at=at(second),
        )

    def found_again(self, second: float) -> SessionRecovered:
        return SessionRecovered(
            vm_id=self.vm_id, host_id=self.host_id, incarnation=self.incarnation, observed_at=at(second)
        )


def host_lost(last_seen: float, declared: float | None = None, host: str = "host-a") -> HostLost:
    """A host was declared lost some time after its last heartbeat."""
    return HostLost(
        host_id=HostId(host),
        boot_id="boot-1",
        last_seen_at=at(last_seen),
        declared_at=at(declared if declared is not None else last_seen + 30),
    )


def session_over(second: float, how: Literal["terminated", "failed"] = "terminated") -> msgspec.Struct:
    """The session has come to its end."""
    if how == "failed":
        return SessionFailed(incarnation=1, code="start-failed", detail="", way_out="resume", observed_at=at(second))
    return SessionTerminated(incarnation=1, cause="client", observed_at=at(second))


def checkpoint_recorded(
    second: float, stored_bytes: int, checkpoint: str = "ckp-1", session: str = "s-1", tenant: str = "acme"
) -> CheckpointRecorded:
    """The store holds a checkpoint."""
    part = CheckpointPart(kind="memory", digest="sha256:00", size_bytes=stored_bytes, unique_bytes=stored_bytes)
    return CheckpointRecorded(
        checkpoint_id=CheckpointId(checkpoint),
        tenant_id=TenantId(tenant),
        manifest=CheckpointManifest(
            session_id=SessionId(session), incarnation=1, parent_id=None, fingerprint="simulated-1", parts=[part]
        ),
        stored_bytes=stored_bytes,
        recorded_at=at(second),
    )


def checkpoint_freed(second: float, checkpoint: str = "ckp-1") -> CheckpointFreed:
    """The store let go of a checkpoint."""
    return CheckpointFreed(checkpoint_id=CheckpointId(checkpoint), reason="asked", freed_bytes=1, freed_at=at(second))


def stream_of(event: msgspec.Struct) -> str:
    """The stream an event of a machine, host or checkpoint belongs to."""
    for name in ("vm_id", "checkpoint_id", "host_id"):
        found = getattr(event, name, None)
        if isinstance(found, str):
            return found
    raise AssertionError(f"say which stream {type(event).__name__} is in")


async def append(log: EventLog, event: msgspec.Struct, stream: str, tenant: str = "acme") -> int:
    """Append one event, as a command of its own; answers its position."""
    head, version = await log.head(), len(await log.load(stream))
    receipt = await log.append(
        Commit(
            command_id=CommandId(f"c-{head.position + 1}"),
            tenant_id=TenantId(tenant),
            causation_id=f"m-{head.position + 1}",
            correlation_id="g-1",
            request_digest=bytes(32),
            occurred_at_us=to_us(NOON),
            expected={stream: version},
            events=[encode_event(stream, event)],
        )
    )
    return receipt.position


async def written(*events: msgspec.Struct | tuple[str, msgspec.Struct]) -> MemoryLog:
    """A log with these events, in order; a session's are given with their stream: ("s-1", event)."""
    log = MemoryLog()
    for given in events:
        stream, event = given if isinstance(given, tuple) else (stream_of(given), given)
        await append(log, event, stream)
    return log


async def no_dead_letters(follower: str, recorded: Recorded, error: Exception) -> None:
    """A follower in a test must not bury anything: what would be is raised."""
    raise AssertionError(f"{follower} could not fold position {recorded.position}") from error


async def fold_into(views: MemoryViewStore, projection: Projection, log: EventLog, until: int | None = None) -> None:
    """Fold the log, up to a position, into a view as the service's own follower does."""
    follower = ProjectionFollower(projection, views, LogFeed(log), dead=no_dead_letters)
    await views.prepare(projection.name, projection.tables)
    rows = await log.read(await views.position(projection.name), limit=100_000)
    await follower.fold([row for row in rows if until is None or row.position <= until])

"""What the scheduler answers to queries (`qry.<tenant>.scheduler.<type>.<target>`): sessions, programs and hosts.

A tenant sees its own sessions; the tenant `system` sees all of them, and the hosts. Answers come from views, which
follow the log: `at_least` makes an answer wait until the view has come to that position (of a receipt, say).
"""

from datetime import datetime
from typing import Literal

import msgspec

from torpor_contracts.host import HostCapacity
from torpor_contracts.ids import CheckpointId, ExecId, HostId, SessionId, TenantId, VmId
from torpor_contracts.session import MachineSpec
from torpor_contracts.session_branches import Lineage

SessionState = Literal[
    "requested",
    "placing",
    "starting",
    "running",
    "suspending",
    "suspended",
    "resuming",
    "rolling-back",
    "lost",
    "terminating",
    "terminated",
    "failed",
]
DesiredState = Literal["running", "suspended", "terminated"]
ObservedState = Literal["none", "running", "suspended", "lost", "gone"]


class SessionQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`session`: the one that is the target."""

    at_least: int = 0


class SessionsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sessions`: those of the tenant, in the order of their ids. `after` is the `next` of the page before."""

    state: SessionState | None = None
    after: str | None = None
    limit: int = 200
    at_least: int = 0


class ExecQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`exec`: a program of the session that is the target."""

    exec_id: ExecId
    at_least: int = 0


class HostsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`hosts`: all of them; for the system tenant alone."""

    after: str | None = None
    limit: int = 200
    at_least: int = 0


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong last and has not been made good since. `way_out` says what the owner can do."""

    code: str
    detail: str
    way_out: str
    since: datetime


class ExecInFlight(msgspec.Struct, frozen=True, kw_only=True):
    """A program that has not ended; `started_at` None: it waits for a machine."""

    exec_id: ExecId
    requested_at: datetime
    started_at: datetime | None


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A session: what is wanted of it and what is seen of it stand apart.

    `position` and `version` are those of its last event. `host_id` and `vm_id` name its machine, None while it has
    none. `suspends_at`: when idleness will suspend it. `retries_at`: when its start is tried again. `lost_since`:
    the moment after which work is lost, until a resume has told so. `checkpointing_id`: the checkpoint that is being
    taken while it runs. `lineage`: where a fork came from.
    """

    session_id: SessionId
    tenant_id: TenantId
    state: SessionState
    desired: DesiredState
    observed: ObservedState
    incarnation: int
    version: int
    position: int
    machine: MachineSpec
    idle_after_s: float | None
    metadata: dict[str, str]
    requested_at: datetime
    changed_at: datetime
    host_id: HostId | None
    vm_id: VmId | None
    checkpoint_id: CheckpointId | None
    checkpointed_at: datetime | None
    execs: list[ExecInFlight]
    suspends_at: datetime | None
    retries_at: datetime | None
    lost_since: datetime | None
    problem: Problem | None
    checkpointing_id: CheckpointId | None = None
    lineage: Lineage | None = None


class SessionsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of sessions, derived from the log up to `position`; `next` asks for the page after, None ends."""

    position: int
    sessions: list[SessionView]
    next: str | None


class ExecView(msgspec.Struct, frozen=True, kw_only=True):
    """A program: where it is, and once it has ended how. `position` is that of its last event."""

    session_id: SessionId
    exec_id: ExecId
    state: Literal["pending", "started", "ended"]
    requested_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    incarnation: int | None
    outcome: Literal["exited", "signaled", "timed-out", "failed", "lost", "cancelled"] | None
    exit_code: int | None
    detail: str
    output_bytes: int
    position: int


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """A host: what it offers, and what of that the machines of sessions have taken. `last_seen_at` is a heartbeat's."""

    host_id: HostId
    state: Literal["up", "lost"]
    draining: bool
    boot_id: str
    driver: str
    fingerprint: str
    capacity: HostCapacity
    vcpus_taken: int
    memory_mib_taken: int
    disk_mib_taken: int
    vms: int
    registered_at: datetime
    last_seen_at: datetime | None
    position: int


class HostsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of hosts, derived from the log up to `position`; `next` asks for the page after, None ends."""

    position: int
    hosts: list[HostView]
    next: str | None

"""Commands and events of a session; stream `<session id>`, owned by the scheduler."""

from datetime import datetime
from typing import Literal

import msgspec

from torpor_contracts.ids import CheckpointId, ExecId, HostId, SessionId, TenantId, VmId
from torpor_contracts.session_branches import BranchCommand, BranchEvent, ExecContinued, Lineage
from torpor_contracts.session_reports import SessionReport


class RetryRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bounded retry: `attempts_max` tries, `backoff_s` doubling up to `backoff_s_max`, all within `deadline_s`."""

    attempts_max: int = 3
    backoff_s: float = 1.0
    backoff_s_max: float = 30.0
    deadline_s: float = 120.0


class MachineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a session's microVM is made of. Sizes in MiB; `image` names a guest image."""

    image: str = "default"
    vcpus: int = 1
    memory_mib: int = 256
    disk_mib: int = 1024


class TerminalSize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How large a program's terminal is, in characters."""

    rows: int = 24
    columns: int = 80


class ExecSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One program to run in the guest. `timeout_s` bounds it; `stdin` is text given to it at once.

    `stdin_open`: more input may come (`torpor_contracts.guest.FeedProgram`). `terminal`: it runs in a terminal of this
    size, takes more input, and writes all it writes to stdout.
    """

    argv: list[str]
    env: dict[str, str] = {}
    cwd: str | None = None
    user: str | None = None
    stdin: str = ""
    timeout_s: float = 3600.0
    stdin_open: bool = False
    terminal: TerminalSize | None = None


# --- commands of clients: cmd.<tenant>.scheduler.<type>.<session id> -------------------------------------------


class CreateSession(msgspec.Struct, frozen=True, kw_only=True, tag="create-session.v1", forbid_unknown_fields=True):
    """Ask for a session; its id is chosen by the caller and is the last token of the subject.

    `idle_after_s`: suspend after so many seconds without work; None never does.
    """

    machine: MachineSpec = MachineSpec()
    idle_after_s: float | None = 300.0
    start_retry: RetryRule = RetryRule()
    metadata: dict[str, str] = {}


class ExecSession(msgspec.Struct, frozen=True, kw_only=True, tag="exec-session.v1", forbid_unknown_fields=True):
    """Run a program in the session; wakes it when it sleeps. Output goes to `out.<tenant>.<session>.<exec id>`."""

    exec_id: ExecId
    program: ExecSpec
    incarnation: int | None = None


class SuspendSession(msgspec.Struct, frozen=True, kw_only=True, tag="suspend-session.v1", forbid_unknown_fields=True):
    """Checkpoint the session's machine and free it. `incarnation`, when given, must be the current one."""

    incarnation: int | None = None


class ResumeSession(msgspec.Struct, frozen=True, kw_only=True, tag="resume-session.v1", forbid_unknown_fields=True):
    """Wake a suspended or lost session from its newest checkpoint."""

    incarnation: int | None = None


class TerminateSession(
    msgspec.Struct, frozen=True, kw_only=True, tag="terminate-session.v1", forbid_unknown_fields=True
):
    """End the session for good; receipts, usage and history stay."""

    reason: str = ""


ClientSessionCommand = CreateSession | ExecSession | SuspendSession | ResumeSession | TerminateSession | BranchCommand
SessionCommand = ClientSessionCommand | SessionReport

# --- events -----------------------------------------------------------------------------------------------------


class SessionRequested(msgspec.Struct, frozen=True, kw_only=True, tag="session-requested.v1", omit_defaults=True):
    """Somebody asked for a session; no machine exists yet. `lineage`: it is a fork, and begins in a checkpoint."""

    session_id: SessionId
    tenant_id: TenantId
    machine: MachineSpec
    idle_after_s: float | None
    start_retry: RetryRule
    metadata: dict[str, str]
    requested_at: datetime
    lineage: Lineage | None = None


class PlacementDeferred(msgspec.Struct, frozen=True, kw_only=True, tag="placement-deferred.v1"):
    """No host can take the machine now; looked for again at `retry_at`, until `give_up_at`."""

    incarnation: int
    attempt: int
    reason: str
    deferred_at: datetime
    retry_at: datetime
    give_up_at: datetime


class VmStartRequested(msgspec.Struct, frozen=True, kw_only=True, tag="vm-start-requested.v1"):
    """A host was chosen and is asked to start the machine of this incarnation (an effect asked for, not done).

    `fingerprint` is that of the host, so of the checkpoints it will make.
    """

    session_id: SessionId
    host_id: HostId
    vm_id: VmId
    incarnation: int
    attempt: int
    machine: MachineSpec
    checkpoint_id: CheckpointId | None
    fingerprint: str
    requested_at: datetime
    deadline_at: datetime


class SessionStarted(msgspec.Struct, frozen=True, kw_only=True, tag="session-started.v1"):
    """The first machine of the session was observed running."""

    vm_id: VmId
    host_id: HostId
    incarnation: int
    observed_at: datetime


class SessionResumed(msgspec.Struct, frozen=True, kw_only=True, tag="session-resumed.v1"):
    """A later machine of the session was observed running, restored from `checkpoint_id` (None: from the image).

    `lost_since`, when set, is the moment after which work of an earlier incarnation was lost.
    """

    vm_id: VmId
    host_id: HostId
    incarnation: int
    checkpoint_id: CheckpointId | None
    lost_since: datetime | None
    observed_at: datetime


class SessionRecovered(msgspec.Struct, frozen=True, kw_only=True, tag="session-recovered.v1"):
    """A machine given up for lost was seen alive, and is still the session's newest: its work was not lost.

    Programs that were called lost stay so: nobody watched them meanwhile.
    """

    vm_id: VmId
    host_id: HostId
    incarnation: int
    observed_at: datetime


class SessionStartFailed(msgspec.Struct, frozen=True, kw_only=True, tag="session-start-failed.v1"):
    """One try to start the machine failed; the next is at `retry_at`, or none when that is None."""

    vm_id: VmId
    host_id: HostId
    incarnation: int
    attempt: int
    code: str
    detail: str
    observed_at: datetime
    retry_at: datetime | None


class ExecRequested(msgspec.Struct, frozen=True, kw_only=True, tag="exec-requested.v1"):
    """A program is to run in the session; it starts once a machine of the session runs."""

    exec_id: ExecId
    program: ExecSpec
    requested_at: datetime


class ExecStarted(msgspec.Struct, frozen=True, kw_only=True, tag="exec-started.v1"):
    """A program was observed started; it is never started again, also not by a later machine of the session."""

    exec_id: ExecId
    incarnation: int
    observed_at: datetime


class ExecEnded(msgspec.Struct, frozen=True, kw_only=True, tag="exec-ended.v1"):
    """A program ended, or nobody will see its end.

    `lost`: its machine was gone first, or no end was observed in its time. `cancelled`: the session was ended first.
    """

    exec_id: ExecId
    incarnation: int
    outcome: Literal["exited", "signaled", "timed-out", "failed", "lost", "cancelled"]
    exit_code: int | None
    detail: str
    output_bytes: int
    observed_at: datetime


class SuspendRequested(msgspec.Struct, frozen=True, kw_only=True, tag="suspend-requested.v1"):
    """The machine is to be checkpointed and freed; asked for by a client, by idleness, or because its host drains."""

    session_id: SessionId
    host_id: HostId
    vm_id: VmId
    incarnation: int
    checkpoint_id: CheckpointId
    parent_id: CheckpointId | None
    cause: Literal["client", "idle", "drain"]
    requested_at: datetime
    deadline_at: datetime


class SessionSuspended(msgspec.Struct, frozen=True, kw_only=True, tag="session-suspended.v1"):
    """The machine was observed checkpointed and gone; only engines of this `fingerprint` can load the checkpoint."""

    incarnation: int
    host_id: HostId
    checkpoint_id: CheckpointId
    fingerprint: str
    observed_at: datetime


class SuspendFailed(msgspec.Struct, frozen=True, kw_only=True, tag="suspend-failed.v1"):
    """The checkpoint could not be made; the machine goes on running.

    Idleness tries again no sooner than `retry_at`; None: not before there has been work again.
    """

    incarnation: int
    checkpoint_id: CheckpointId
    attempt: int
    code: str
    detail: str
    observed_at: datetime
    retry_at: datetime | None


class SuspendWithdrawn(msgspec.Struct, frozen=True, kw_only=True, tag="suspend-withdrawn.v1"):
    """Idleness was mistaken: the host saw the machine used. It runs on; looked at again no sooner than `retry_at`."""

    incarnation: int
    checkpoint_id: CheckpointId
    detail: str
    observed_at: datetime
    retry_at: datetime


class ResumeDeferred(msgspec.Struct, frozen=True, kw_only=True, tag="resume-deferred.v1"):
    """A resume was asked for while the session was being suspended; it follows as soon as that has ended."""

    incarnation: int
    requested_at: datetime


class ResumeRequested(msgspec.Struct, frozen=True, kw_only=True, tag="resume-requested.v1"):
    """The session is to be woken from `checkpoint_id` as incarnation `incarnation`.

    `work`: a program waits for it; `drain`: a program was running when its host was drained; `rollback`: it goes back.
    """

    incarnation: int
    checkpoint_id: CheckpointId | None
    cause: Literal["client", "work", "drain", "rollback"]
    requested_at: datetime


class SessionLost(msgspec.Struct, frozen=True, kw_only=True, tag="session-lost.v1"):
    """The machine is gone without a checkpoint of its last state; work done after `lost_since` is lost with it."""

    incarnation: int
    host_id: HostId
    vm_id: VmId
    cause: str
    lost_since: datetime
    observed_at: datetime


class TerminateRequested(msgspec.Struct, frozen=True, kw_only=True, tag="terminate-requested.v1"):
    """The session is to end; a machine that still runs is asked to stop (`vm_id` None: there is none)."""

    session_id: SessionId
    host_id: HostId | None
    vm_id: VmId | None
    incarnation: int
    reason: str
    requested_at: datetime
    deadline_at: datetime


class SessionTerminated(msgspec.Struct, frozen=True, kw_only=True, tag="session-terminated.v1"):
    """The session is over; what it still holds is projected by the reaper."""

    incarnation: int
    cause: str
    observed_at: datetime


class SessionFailed(msgspec.Struct, frozen=True, kw_only=True, tag="session-failed.v1"):
    """The session cannot go on by itself; `way_out` says what its owner can do."""

    incarnation: int
    code: str
    detail: str
    way_out: str
    observed_at: datetime


SessionEvent = (
    SessionRequested
    | PlacementDeferred
    | VmStartRequested
    | SessionStarted
    | SessionResumed
    | SessionRecovered
    | SessionStartFailed
    | ExecRequested
    | ExecStarted
    | ExecEnded
    | ExecContinued
    | SuspendRequested
    | SessionSuspended
    | SuspendFailed
    | SuspendWithdrawn
    | ResumeDeferred
    | ResumeRequested
    | SessionLost
    | TerminateRequested
    | SessionTerminated
    | SessionFailed
    | BranchEvent
)

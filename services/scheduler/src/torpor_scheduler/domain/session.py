"""A session's folded state, and the one table of legal transitions; the documentation's diagram is made from it."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Final, Literal

import msgspec

from torpor_contracts.ids import CheckpointId, ExecId, HostId, SessionId, TenantId, VmId
from torpor_contracts.scheduling import Problem
from torpor_contracts.session import (
    ExecEnded,
    ExecRequested,
    ExecStarted,
    MachineSpec,
    PlacementDeferred,
    ResumeDeferred,
    ResumeRequested,
    RetryRule,
    SessionFailed,
    SessionLost,
    SessionRecovered,
    SessionRequested,
    SessionResumed,
    SessionStarted,
    SessionStartFailed,
    SessionSuspended,
    SessionTerminated,
    SuspendFailed,
    SuspendRequested,
    SuspendWithdrawn,
    TerminateRequested,
    VmStartRequested,
)
from torpor_contracts.session_branches import (
    CheckpointFailed,
    CheckpointRequested,
    ExecContinued,
    ForkFailed,
    ForkRequested,
    Lineage,
    RollbackRequested,
    SessionCheckpointed,
    SessionForked,
)


class Phase(StrEnum):
    """Where a session is in its life."""

    ABSENT = "absent"
    REQUESTED = "requested"
    PLACING = "placing"
    STARTING = "starting"
    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    ROLLING_BACK = "rolling-back"
    LOST = "lost"
    TERMINATING = "terminating"
    TERMINATED = "terminated"
    FAILED = "failed"


P = Phase

TRANSITIONS: Final[Mapping[Phase, Mapping[type[msgspec.Struct], Phase]]] = {
    P.ABSENT: {SessionRequested: P.REQUESTED},
    # Nothing rests in `requested`: the command that asks for a session also places it, or defers that.
    P.REQUESTED: {VmStartRequested: P.STARTING, PlacementDeferred: P.PLACING},
    P.PLACING: {
        PlacementDeferred: P.PLACING,
        VmStartRequested: P.STARTING,
        ExecRequested: P.PLACING,
        ExecEnded: P.PLACING,
        SessionForked: P.PLACING,
        SessionFailed: P.FAILED,
        TerminateRequested: P.TERMINATING,
    },
    P.STARTING: {
        SessionStarted: P.RUNNING,
        SessionStartFailed: P.PLACING,
        ExecRequested: P.STARTING,
        ExecEnded: P.STARTING,
        SessionForked: P.STARTING,
        TerminateRequested: P.TERMINATING,
    },
    P.RUNNING: {
        ExecRequested: P.RUNNING,
        ExecStarted: P.RUNNING,
        ExecEnded: P.RUNNING,
        ExecContinued: P.RUNNING,
        CheckpointRequested: P.RUNNING,
        SessionCheckpointed: P.RUNNING,
        CheckpointFailed: P.RUNNING,
        ForkRequested: P.RUNNING,
        SessionForked: P.RUNNING,
        ForkFailed: P.RUNNING,
        RollbackRequested: P.ROLLING_BACK,
        SuspendRequested: P.SUSPENDING,
        # The host said so only after the time for it had passed; what was observed counts.
        SessionSuspended: P.SUSPENDED,
        SessionLost: P.LOST,
        TerminateRequested: P.TERMINATING,
    },
    P.SUSPENDING: {
        SessionSuspended: P.SUSPENDED,
        SuspendFailed: P.RUNNING,
        SuspendWithdrawn: P.RUNNING,
        SessionLost: P.LOST,
        # The host said so only after the time for it had passed.
        SessionCheckpointed: P.SUSPENDING,
        SessionForked: P.SUSPENDING,
        ResumeDeferred: P.SUSPENDING,
        ExecRequested: P.SUSPENDING,
        ExecStarted: P.SUSPENDING,
        ExecEnded: P.SUSPENDING,
        TerminateRequested: P.TERMINATING,
    },
    P.SUSPENDED: {
        ResumeRequested: P.RESUMING,
        RollbackRequested: P.ROLLING_BACK,
        SessionCheckpointed: P.SUSPENDED,
        SessionForked: P.SUSPENDED,
        ExecRequested: P.SUSPENDED,
        ExecEnded: P.SUSPENDED,
        TerminateRequested: P.TERMINATING,
    },
    P.RESUMING: {
        VmStartRequested: P.RESUMING,
        PlacementDeferred: P.RESUMING,
        SessionResumed: P.RUNNING,
        SessionStartFailed: P.RESUMING,
        ExecRequested: P.RESUMING,
        ExecStarted: P.RESUMING,
        ExecEnded: P.RESUMING,
        SessionForked: P.RESUMING,
        SessionFailed: P.FAILED,
        TerminateRequested: P.TERMINATING,
    },
    P.ROLLING_BACK: {
        # Its machine is gone, or there was none.
        ResumeRequested: P.RESUMING,
        ExecRequested: P.ROLLING_BACK,
        ExecEnded: P.ROLLING_BACK,
        SessionForked: P.ROLLING_BACK,
        TerminateRequested: P.TERMINATING,
    },
    P.LOST: {
        ResumeRequested: P.RESUMING,
        SessionRecovered: P.RUNNING,
        # The host was given up between its checkpoint and our hearing of it.
        SessionSuspended: P.SUSPENDED,
        SessionCheckpointed: P.LOST,
        SessionForked: P.LOST,
        RollbackRequested: P.ROLLING_BACK,
        ExecRequested: P.LOST,
        ExecEnded: P.LOST,
        TerminateRequested: P.TERMINATING,
    },
    P.TERMINATING: {SessionTerminated: P.TERMINATED},
    P.FAILED: {
        ResumeRequested: P.RESUMING,
        RollbackRequested: P.ROLLING_BACK,
        SessionForked: P.FAILED,
        TerminateRequested: P.TERMINATING,
    },
    P.TERMINATED: {},
}
"""Phase -> type of event -> the phase after it; what is not here cannot happen."""


class Machine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The session's machine, asked for or running; `checkpoint_id` is what it is restored from.

    `tip_id` is the checkpoint that was taken of it last while it ran.
    """

    vm_id: VmId
    host_id: HostId
    incarnation: int
    checkpoint_id: CheckpointId | None
    fingerprint: str
    deadline_at: datetime
    started_at: datetime | None = None
    tip_id: CheckpointId | None = None

    @property
    def parent_id(self) -> CheckpointId | None:
        """The parent of the next checkpoint of this machine."""
        return self.tip_id or self.checkpoint_id


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the session would be resumed from, what it holds (the work of `incarnation` and before), where it was made.

    `partial`: the machine ran on after it, so not all work of the incarnation is in it.
    """

    checkpoint_id: CheckpointId
    incarnation: int
    fingerprint: str
    host_id: HostId | None
    observed_at: datetime
    partial: bool = False


class Starting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tries to get a machine running since `began_at`; `retry_at` is set while the next try is waited for."""

    began_at: datetime
    attempt: int = 0
    deferrals: int = 0
    retry_at: datetime | None = None


class Suspending(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The suspend under way."""

    checkpoint_id: CheckpointId
    cause: Literal["client", "idle", "drain"]
    deadline_at: datetime
    parent_id: CheckpointId | None = None


class Checkpointing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The checkpoint that is being taken while the machine runs; `retry_at` is set while the next try is waited for."""

    checkpoint_id: CheckpointId
    parent_id: CheckpointId | None
    label: str
    cause: Literal["client", "fork"]
    attempt: int
    began_at: datetime
    requested_at: datetime
    deadline_at: datetime
    retry_at: datetime | None = None


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions to be made once the checkpoint that is being taken is there."""

    checkpoint_id: CheckpointId
    session_ids: tuple[SessionId, ...]
    metadata: dict[str, str]


class Exec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A program that has not ended. Its text stays in the log, at stream version `version`, unless it came along."""

    exec_id: ExecId
    version: int
    requested_at: datetime
    timeout_s: float
    started_at: datetime | None = None
    started_incarnation: int | None = None


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A machine given up at `at`; work done after `since` is lost unless it is seen again."""

    machine: Machine
    since: datetime
    at: datetime


class Session(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A session as folded from its events.

    `incarnation` is the newest one, `incarnation_used` the newest that a machine was asked for: an incarnation is
    given to one machine only. `step_version` is the version of the last event that was not about a program.
    `restorable_at` is the moment that can be gone back to. `suspend_failures` counts since there last was work;
    with failures and no `suspend_retry_at`, idleness has given up until there is work.
    """

    phase: Phase = Phase.ABSENT
    session_id: SessionId = SessionId("")
    tenant_id: TenantId = TenantId("")
    spec: MachineSpec = MachineSpec()
    idle_after_s: float | None = None
    start_retry: RetryRule = RetryRule()
    metadata: dict[str, str] = {}
    lineage: Lineage | None = None
    requested_at: datetime | None = None
    version: int = 0
    step_version: int = 0
    incarnation: int = 0
    incarnation_used: int = 0
    machine: Machine | None = None
    checkpoint: Checkpoint | None = None
    starting: Starting | None = None
    suspending: Suspending | None = None
    checkpointing: Checkpointing | None = None
    fork: Fork | None = None
    stop_deadline_at: datetime | None = None
    resume_wanted: bool = False
    execs: tuple[Exec, ...] = ()
    recent_execs: tuple[ExecId, ...] = ()
    active_at: datetime | None = None
    restorable_at: datetime | None = None
    lost: Lost | None = None
    losses: int = 0
    suspend_failures: int = 0
    suspend_retry_at: datetime | None = None
    problem: Problem | None = None


INITIAL: Final = Session()
"""The state of a session nobody has asked for."""


def next_incarnation(session: Session) -> int:
    """The incarnation that the next machine gets."""
    return max(session.incarnation, session.incarnation_used + 1)


def unstarted(session: Session) -> tuple[Exec, ...]:
    """The programs that no machine has started yet."""
    return tuple(program for program in session.execs if program.started_at is None)


def started(session: Session) -> tuple[Exec, ...]:
    """The programs that a machine has started, and that have not ended."""
    return tuple(program for program in session.execs if program.started_at is not None)

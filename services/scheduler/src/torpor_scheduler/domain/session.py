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
    TerminateRequested,
    VmStartRequested,
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
        SessionFailed: P.FAILED,
        TerminateRequested: P.TERMINATING,
    },
    P.STARTING: {
        SessionStarted: P.RUNNING,
        SessionStartFailed: P.PLACING,
        ExecRequested: P.STARTING,
        ExecEnded: P.STARTING,
        TerminateRequested: P.TERMINATING,
    },
    P.RUNNING: {
        ExecRequested: P.RUNNING,
        ExecStarted: P.RUNNING,
        ExecEnded: P.RUNNING,
        SuspendRequested: P.SUSPENDING,
        # The host said so only after the time for it had passed; what was observed counts.
        SessionSuspended: P.SUSPENDED,
        SessionLost: P.LOST,
        TerminateRequested: P.TERMINATING,
    },
    P.SUSPENDING: {
        SessionSuspended: P.SUSPENDED,
        SuspendFailed: P.RUNNING,
        SessionLost: P.LOST,
        ResumeDeferred: P.SUSPENDING,
        ExecRequested: P.SUSPENDING,
        ExecStarted: P.SUSPENDING,
        ExecEnded: P.SUSPENDING,
        TerminateRequested: P.TERMINATING,
    },
    P.SUSPENDED: {
        ResumeRequested: P.RESUMING,
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
        SessionFailed: P.FAILED,
        TerminateRequested: P.TERMINATING,
    },
    P.LOST: {
        ResumeRequested: P.RESUMING,
        SessionRecovered: P.RUNNING,
        # The host was given up between its checkpoint and our hearing of it.
        SessionSuspended: P.SUSPENDED,
        ExecRequested: P.LOST,
        ExecEnded: P.LOST,
        TerminateRequested: P.TERMINATING,
    },
    P.TERMINATING: {SessionTerminated: P.TERMINATED},
    P.FAILED: {ResumeRequested: P.RESUMING, TerminateRequested: P.TERMINATING},
    P.TERMINATED: {},
}
"""Phase -> type of event -> the phase after it; what is not here cannot happen."""


class Machine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The session's machine, asked for or running; `checkpoint_id` is what it is restored from."""

    vm_id: VmId
    host_id: HostId
    incarnation: int
    checkpoint_id: CheckpointId | None
    fingerprint: str
    deadline_at: datetime
    started_at: datetime | None = None


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint, what it holds (the work of `incarnation` and before), and where it was made."""

    checkpoint_id: CheckpointId
    incarnation: int
    fingerprint: str
    host_id: HostId
    observed_at: datetime


class Starting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tries to get a machine running since `began_at`; `retry_at` is set while the next try is waited for."""

    began_at: datetime
    attempt: int = 0
    deferrals: int = 0
    retry_at: datetime | None = None


class Suspending(msgspec.Struct, frozen=True, kw_only=True):
    """The suspend under way."""

    checkpoint_id: CheckpointId
    cause: Literal["client", "idle", "drain"]
    deadline_at: datetime


class Exec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A program that has not ended. Its text stays in the log, at stream version `version`."""

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
    requested_at: datetime | None = None
    version: int = 0
    step_version: int = 0
    incarnation: int = 0
    incarnation_used: int = 0
    machine: Machine | None = None
    checkpoint: Checkpoint | None = None
    starting: Starting | None = None
    suspending: Suspending | None = None
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

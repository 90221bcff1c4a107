"""Commands of services to a session: what was observed of its machine, host and programs, and timers that are due.

Subjects are `cmd.<tenant>.scheduler.<type>.<session id>`, closed to clients. `position` is that of the event that
says so; 0 when a host's inventory said so. A report of a machine that is no longer the session's is ignored.
"""

from datetime import datetime
from typing import Literal

import msgspec

from torpor_contracts.ids import CheckpointId, ExecId, HostId, VmId

TimerKind = Literal["idle", "placement", "start", "suspend", "stop", "exec", "checkpoint"]


class ContinuedExec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program that came with the checkpoint a machine was started from; `remaining_s`: until its time-out."""

    exec_id: ExecId
    remaining_s: float


class ReportVmStarted(
    msgspec.Struct, frozen=True, kw_only=True, tag="report-vm-started.v1", forbid_unknown_fields=True
):
    """The host observed the session's machine running, and in it the programs that came with its checkpoint."""

    vm_id: VmId
    incarnation: int
    observed_at: datetime
    position: int
    execs: list[ContinuedExec] = []


class ReportVmStartFailed(
    msgspec.Struct, frozen=True, kw_only=True, tag="report-vm-start-failed.v1", forbid_unknown_fields=True
):
    """The host could not start the machine; `code` names the cause, `retryable` whether another try may help."""

    vm_id: VmId
    incarnation: int
    code: str
    detail: str
    retryable: bool
    position: int


class ReportVmSuspended(
    msgspec.Struct, frozen=True, kw_only=True, tag="report-vm-suspended.v1", forbid_unknown_fields=True
):
    """The host observed the machine checkpointed and gone; `fingerprint` may be empty: that of the machine's host."""

    vm_id: VmId
    incarnation: int
    checkpoint_id: CheckpointId
    fingerprint: str
    observed_at: datetime
    position: int


class ReportVmCheckpointed(
    msgspec.Struct, frozen=True, kw_only=True, tag="report-vm-checkpointed.v1", forbid_unknown_fields=True
):
    """The host observed a checkpoint of the machine with the store, and the machine running on."""

    vm_id: VmId
    incarnation: int
    checkpoint_id: CheckpointId
    fingerprint: str
    pause_ms: float
    log_position: int
    taken_at: datetime
    observed_at: datetime
    position: int


class ReportVmCheckpointFailed(
    msgspec.Struct, frozen=True, kw_only=True, tag="report-vm-checkpoint-failed.v1", forbid_unknown_fields=True
):
    """The host could not checkpoint the machine, which runs on; `retryable`: another try may help."""

    vm_id: VmId
    incarnation: int
    checkpoint_id: CheckpointId
    code: str
    detail: str
    retryable: bool
    position: int


class ReportVmSuspendFailed(
    msgspec.Struct, frozen=True, kw_only=True, tag="report-vm-suspend-failed.v1", forbid_unknown_fields=True
):
    """The host could not checkpoint the machine under `checkpoint_id`; it goes on running.

    Code `in-use` (`torpor_contracts.vm.IN_USE`): it was not idle at all.
    """

    vm_id: VmId
    incarnation: int
    checkpoint_id: CheckpointId
    code: str
    detail: str
    position: int


class ReportVmStopped(
    msgspec.Struct, frozen=True, kw_only=True, tag="report-vm-stopped.v1", forbid_unknown_fields=True
):
    """The host observed the machine gone; `expected` when it was asked to stop it."""

    vm_id: VmId
    incarnation: int
    expected: bool
    cause: str
    observed_at: datetime
    position: int


class ReportExecStarted(
    msgspec.Struct, frozen=True, kw_only=True, tag="report-exec-started.v1", forbid_unknown_fields=True
):
    """The host observed that a program was started."""

    vm_id: VmId
    incarnation: int
    exec_id: ExecId
    observed_at: datetime
    position: int


class ReportExecEnded(
    msgspec.Struct, frozen=True, kw_only=True, tag="report-exec-ended.v1", forbid_unknown_fields=True
):
    """The host observed a program's end."""

    vm_id: VmId
    incarnation: int
    exec_id: ExecId
    outcome: Literal["exited", "signaled", "timed-out", "failed"]
    exit_code: int | None
    detail: str
    output_bytes: int
    observed_at: datetime
    position: int


class ReportHostLost(msgspec.Struct, frozen=True, kw_only=True, tag="report-host-lost.v1", forbid_unknown_fields=True):
    """The session's host was declared lost; `last_seen_at` is the last moment anybody saw it alive."""

    host_id: HostId
    incarnation: int
    last_seen_at: datetime
    position: int


class ReportHostDraining(
    msgspec.Struct, frozen=True, kw_only=True, tag="report-host-draining.v1", forbid_unknown_fields=True
):
    """The session's host is to be emptied: a machine that runs there is suspended."""

    host_id: HostId
    incarnation: int
    position: int


class FireSessionTimer(
    msgspec.Struct, frozen=True, kw_only=True, tag="fire-session-timer.v1", forbid_unknown_fields=True
):
    """A session's timer is due. Stale when `generation` is no longer that of the session's timer; it has one at most.

    `generation` is the stream version of the event that set the timer.
    """

    kind: TimerKind
    incarnation: int
    generation: int


SessionReport = (
    ReportVmStarted
    | ReportVmStartFailed
    | ReportVmSuspended
    | ReportVmSuspendFailed
    | ReportVmCheckpointed
    | ReportVmCheckpointFailed
    | ReportVmStopped
    | ReportExecStarted
    | ReportExecEnded
    | ReportHostLost
    | ReportHostDraining
    | FireSessionTimer
)

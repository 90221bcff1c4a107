"""Commands and events of a microVM; stream `<vm id>`, owned by the vm-host of the machine it runs on.

Commands travel on `cmd.<tenant>.vm-host.<type>.<host id>.<vm id>`: the host filters its own, the vm orders them.
Programs that run at a checkpoint go on in the machine restored from it, so `exec-vm` may be sent again to every later
machine of a session for each program that has not ended: where it goes on, the command changes nothing.
Output is published on `out.<tenant>.<session>.<exec>`; `Torpor-Offset` counts the bytes of stdout and stderr together,
in the order in which they came, so a reader drops what it has seen after a repeat.
"""

from datetime import datetime
from typing import Final, Literal

import msgspec

from torpor_contracts.ids import CheckpointId, ExecId, HostId, SessionId, TenantId, VmId
from torpor_contracts.session import ExecSpec, MachineSpec
from torpor_contracts.session_reports import ContinuedExec

IN_USE: Final = "in-use"
"""The code of a `VmSuspendFailed` that says: the machine is not as idle as the command took it to be."""


class StartVm(msgspec.Struct, frozen=True, kw_only=True, tag="start-vm.v1", forbid_unknown_fields=True):
    """Start a machine for one incarnation of a session, from its image or from a checkpoint, before `deadline_at`."""

    session_id: SessionId
    incarnation: int
    machine: MachineSpec
    checkpoint_id: CheckpointId | None
    deadline_at: datetime


class ExecVm(msgspec.Struct, frozen=True, kw_only=True, tag="exec-vm.v1", forbid_unknown_fields=True):
    """Run a program in a running machine; at most once per `exec_id`, also when it came with the checkpoint."""

    session_id: SessionId
    incarnation: int
    exec_id: ExecId
    program: ExecSpec


class SuspendVm(msgspec.Struct, frozen=True, kw_only=True, tag="suspend-vm.v1", forbid_unknown_fields=True):
    """Checkpoint the machine under `checkpoint_id`, register that with the snapshot store, then free the machine.

    `idle_s`: only when nobody has used the machine for so long, which its host knows best; None: in any case.
    """

    session_id: SessionId
    incarnation: int
    checkpoint_id: CheckpointId
    parent_id: CheckpointId | None
    deadline_at: datetime
    idle_s: float | None = None


class CheckpointVm(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint-vm.v1", forbid_unknown_fields=True):
    """Checkpoint the machine under `checkpoint_id` and register that with the snapshot store; the machine runs on."""

    session_id: SessionId
    incarnation: int
    checkpoint_id: CheckpointId
    parent_id: CheckpointId | None
    deadline_at: datetime


class StopVm(msgspec.Struct, frozen=True, kw_only=True, tag="stop-vm.v1", forbid_unknown_fields=True):
    """Destroy the machine without a checkpoint."""

    session_id: SessionId
    incarnation: int
    reason: str


class QuarantineVm(msgspec.Struct, frozen=True, kw_only=True, tag="quarantine-vm.v1", forbid_unknown_fields=True):
    """Freeze a machine nobody claims: it may not run on, and is not destroyed before the reaper proves it unknown."""

    evidence: str


class ReapVm(msgspec.Struct, frozen=True, kw_only=True, tag="reap-vm.v1", forbid_unknown_fields=True):
    """Destroy a quarantined machine.

    `evidence` says why it is nobody's, `checked_position` up to where the log was read.
    """

    evidence: str
    checked_position: int


VmCommand = StartVm | ExecVm | SuspendVm | CheckpointVm | StopVm | QuarantineVm | ReapVm


class ResourceRef(msgspec.Struct, frozen=True, kw_only=True):
    """Something a machine holds on its host: a process, overlay, memory file, socket, port or cgroup."""

    kind: Literal["process", "overlay", "memory-file", "socket", "port", "cgroup", "directory"]
    name: str


class VmClaimed(msgspec.Struct, frozen=True, kw_only=True, tag="vm-claimed.v1"):
    """The host is about to acquire these resources for a machine; recorded before the first of them exists."""

    vm_id: VmId
    host_id: HostId
    boot_id: str
    tenant_id: TenantId
    session_id: SessionId
    incarnation: int
    machine: MachineSpec
    checkpoint_id: CheckpointId | None
    resources: list[ResourceRef]
    claimed_at: datetime


class VmStarted(msgspec.Struct, frozen=True, kw_only=True, tag="vm-started.v1", omit_defaults=True):
    """The machine runs and its agent answers; running time counts from `observed_at`.

    `execs` came with the checkpoint; each of them has a `vm-exec-continued` beside this event.
    """

    vm_id: VmId
    host_id: HostId
    session_id: SessionId
    incarnation: int
    machine: MachineSpec
    checkpoint_id: CheckpointId | None
    start_ms: int
    observed_at: datetime
    execs: list[ContinuedExec] = []


class VmStartFailed(msgspec.Struct, frozen=True, kw_only=True, tag="vm-start-failed.v1"):
    """The machine could not be started; `code` names the cause. Whatever was acquired is released."""

    vm_id: VmId
    host_id: HostId
    session_id: SessionId
    incarnation: int
    code: str
    detail: str
    retryable: bool
    observed_at: datetime


class VmExecStarted(msgspec.Struct, frozen=True, kw_only=True, tag="vm-exec-started.v1"):
    """A program is about to start in the guest; recorded first, so that it never starts twice."""

    vm_id: VmId
    session_id: SessionId
    incarnation: int
    exec_id: ExecId
    observed_at: datetime


class VmExecEnded(msgspec.Struct, frozen=True, kw_only=True, tag="vm-exec-ended.v1"):
    """A program ended; `output_bytes` were published on its output subject."""

    vm_id: VmId
    session_id: SessionId
    incarnation: int
    exec_id: ExecId
    outcome: Literal["exited", "signaled", "timed-out", "failed"]
    exit_code: int | None
    detail: str
    output_bytes: int
    observed_at: datetime


class VmExecContinued(msgspec.Struct, frozen=True, kw_only=True, tag="vm-exec-continued.v1"):
    """A program that was running when the checkpoint was taken goes on in this machine, under this incarnation."""

    vm_id: VmId
    session_id: SessionId
    incarnation: int
    exec_id: ExecId
    observed_at: datetime


class VmSuspendStarted(msgspec.Struct, frozen=True, kw_only=True, tag="vm-suspend-started.v1"):
    """The host is about to pause the machine and write its checkpoint; recorded first: a restart finishes it."""

    vm_id: VmId
    host_id: HostId
    session_id: SessionId
    incarnation: int
    checkpoint_id: CheckpointId
    parent_id: CheckpointId | None
    started_at: datetime
    deadline_at: datetime


class VmSuspended(msgspec.Struct, frozen=True, kw_only=True, tag="vm-suspended.v1"):
    """The checkpoint is with the snapshot store and the machine is gone; running time ends at `observed_at`.

    Engines of `fingerprint` can load the checkpoint; empty: those of the fingerprint the host registered with.
    """

    vm_id: VmId
    host_id: HostId
    session_id: SessionId
    incarnation: int
    checkpoint_id: CheckpointId
    fingerprint: str = ""
    suspend_ms: int
    observed_at: datetime


class VmSuspendFailed(msgspec.Struct, frozen=True, kw_only=True, tag="vm-suspend-failed.v1"):
    """The checkpoint could not be made or registered; the machine runs on."""

    vm_id: VmId
    host_id: HostId
    session_id: SessionId
    incarnation: int
    checkpoint_id: CheckpointId
    code: str
    detail: str
    observed_at: datetime


class VmCheckpointStarted(msgspec.Struct, frozen=True, kw_only=True, tag="vm-checkpoint-started.v1"):
    """The host is about to checkpoint the machine while it runs; recorded first: a restart finishes it."""

    vm_id: VmId
    host_id: HostId
    session_id: SessionId
    incarnation: int
    checkpoint_id: CheckpointId
    parent_id: CheckpointId | None
    started_at: datetime
    deadline_at: datetime


class VmCheckpointed(msgspec.Struct, frozen=True, kw_only=True, tag="vm-checkpointed.v1"):
    """The checkpoint is with the snapshot store and the machine runs on.

    The machine stood still from `taken_at` for `pause_ms`; by then the log had come to `log_position`.
    """

    vm_id: VmId
    host_id: HostId
    session_id: SessionId
    incarnation: int
    checkpoint_id: CheckpointId
    fingerprint: str
    pause_ms: float
    log_position: int
    taken_at: datetime
    observed_at: datetime


class VmCheckpointFailed(msgspec.Struct, frozen=True, kw_only=True, tag="vm-checkpoint-failed.v1"):
    """The checkpoint could not be made or registered; the machine runs on."""

    vm_id: VmId
    host_id: HostId
    session_id: SessionId
    incarnation: int
    checkpoint_id: CheckpointId
    code: str
    detail: str
    retryable: bool
    observed_at: datetime


class VmStopped(msgspec.Struct, frozen=True, kw_only=True, tag="vm-stopped.v1"):
    """The machine is gone without a checkpoint; `expected` when it was asked for.

    Running time ends at `observed_at`.
    """

    vm_id: VmId
    host_id: HostId
    session_id: SessionId
    incarnation: int
    expected: bool
    cause: str
    observed_at: datetime


class VmReleased(msgspec.Struct, frozen=True, kw_only=True, tag="vm-released.v1"):
    """These resources were observed gone."""

    vm_id: VmId
    host_id: HostId
    resources: list[ResourceRef]
    released_at: datetime


class VmQuarantined(msgspec.Struct, frozen=True, kw_only=True, tag="vm-quarantined.v1"):
    """A machine nobody claims was found on the host and frozen."""

    vm_id: VmId
    host_id: HostId
    evidence: str
    observed_at: datetime


class VmReaped(msgspec.Struct, frozen=True, kw_only=True, tag="vm-reaped.v1"):
    """A quarantined machine was destroyed, on the evidence given."""

    vm_id: VmId
    host_id: HostId
    evidence: str
    checked_position: int
    observed_at: datetime


VmEvent = (
    VmClaimed
    | VmStarted
    | VmStartFailed
    | VmExecStarted
    | VmExecEnded
    | VmExecContinued
    | VmSuspendStarted
    | VmSuspended
    | VmSuspendFailed
    | VmCheckpointStarted
    | VmCheckpointed
    | VmCheckpointFailed
    | VmStopped
    | VmReleased
    | VmQuarantined
    | VmReaped
)

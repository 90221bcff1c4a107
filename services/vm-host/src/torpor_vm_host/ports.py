"""What the vm-host asks of the outside: a driver that runs machines, and a place on the disk for each of them.

A driver never writes to the log and decides nothing. It may fail at any call, and its process may die between any two.
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec

from torpor_contracts.checkpoint import CheckpointManifest
from torpor_contracts.errors import TorporError
from torpor_contracts.host import HostCapacity
from torpor_contracts.ids import CheckpointId, ExecId, SessionId, TenantId, VmId
from torpor_contracts.session import ExecSpec, MachineSpec
from torpor_contracts.vm import ResourceRef
from torpor_vm_host.guest_ports import Guest

PartKind = Literal["memory", "devices", "disk"]

VM_GONE: Final = "vm-gone"
"""The code of a `DriverError` that says: there is no such machine, or it died during the call."""

EXEC_UNKNOWN: Final = "exec-unknown"
"""The code of a `DriverError` that says: the guest knows no program of this id."""


class DriverError(TorporError):
    """A driver could not do what it was asked. `code` is stable; `retryable`: the same call may succeed later."""

    def __init__(self, code: str, detail: str, *, retryable: bool) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.retryable = retryable


class VmSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A machine to start. `directory` exists, is the machine's own, and stays until the machine is destroyed.

    Before `start` returns, the guest must know its identity: session, incarnation, host name, the time, new randomness.
    """

    vm_id: VmId
    tenant_id: TenantId
    session_id: SessionId
    incarnation: int
    machine: MachineSpec
    directory: Path


class CheckpointFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint to start from: one verified file per kind, which may be read as long as the machine lives."""

    checkpoint_id: CheckpointId
    files: dict[PartKind, Path]


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """What checkpoints build on beside their own parts: files of no tenant, to which nobody writes again.

    `name` is 64 hex digits, by which checkpoints name it; `files` are named as `Driver.receive` must find them.
    """

    name: str
    files: dict[str, Path]


class PartFile(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a checkpoint as the driver wrote it; nobody writes to it again.

    `head_bytes`: how long the tables at its beginning are. After them it consists of pages, many of which it has in
    common with the checkpoint before.
    """

    kind: PartKind
    path: Path
    head_bytes: int = 0


class LiveCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a machine that runs on, and how long it stood still for them, in milliseconds."""

    parts: list[PartFile]
    pause_ms: float


class TakenCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is complete in the chunk store; its machine stood still from `taken_at` for `pause_ms`."""

    manifest: CheckpointManifest
    pause_ms: float
    taken_at: datetime


class PresentVm(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that exists on this host now, whoever started it.

    `running`: started to the end, its guest answers when asked. `starting`: a start that has not come to its end.
    `paused`: it exists and executes nothing. `dead`: it will never run again, but holds something still.
    `session_id` and `incarnation` are what it was started for, None when nothing of that can be read.
    """

    vm_id: VmId
    session_id: SessionId | None
    incarnation: int | None
    state: Literal["starting", "running", "paused", "dead"]
    detail: str = ""


class PresentExec(msgspec.Struct, frozen=True, kw_only=True):
    """A program the guest knows: it runs, or it has ended and was not forgotten. `remaining_s`: until its time-out."""

    exec_id: ExecId
    running: bool
    remaining_s: float


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a program wrote. `offset` counts the bytes of both streams together since the program began."""

    stream: Literal["stdout", "stderr"]
    offset: int
    data: bytes


class ExecOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended; `output_bytes` is all it wrote."""

    outcome: Literal["exited", "signaled", "timed-out"]
    exit_code: int | None
    detail: str
    output_bytes: int


OnPause = Callable[[], Awaitable[None]]
"""Called once while a machine stands still for a checkpoint; it stands still until this returns, so it is short."""

OnOutput = Callable[[Output], Awaitable[None]]
"""Takes output in order. When it returns, the bytes are kept elsewhere: the guest need not keep them any longer."""


class Driver(Guest, Protocol):
    """Runs machines. Every method raises `DriverError` for what it cannot do; none blocks the event loop.

    Cancelling a call lets go of it: what it had begun may go on, and `machines` says how far it came. A driver object
    may be thrown away at any time; its machines and their programs go on, and another object finds them by `machines`.
    """

    name: str

    async def fingerprint(self) -> str:
        """The engine, build, processor model and machine type whose checkpoints this driver can load."""
        ...

    async def capacity(self) -> HostCapacity:
        """What this machine can give to microVMs."""
        ...

    def resources(self, spec: VmSpec) -> list[ResourceRef]:
        """Everything `start` may acquire for this machine outside `spec.directory`, under names that stay the same."""
        ...

    async def remaining(self, resources: Sequence[ResourceRef]) -> list[ResourceRef]:
        """Those of these resources that exist still."""
        ...

    async def start(self, spec: VmSpec, checkpoint: CheckpointFiles | None) -> None:
        """Start a machine from its image, or from a checkpoint; it runs and its guest answers when this returns.

        Codes: `vm-exists`, `image-unknown`, `image-not-built`, `machine-refused` (more than a guest may have),
        `checkpoint-corrupt`, `checkpoint-mismatched` (parts of different generations, or another fingerprint),
        `template-missing` (see `lacking`), and the driver's own.
        """
        ...

    async def bases(self) -> list[Base]:
        """What checkpoints of machines that this driver starts will build on, as far as it has been made."""
        ...

    async def base_of(self, vm_id: VmId) -> Base | None:
        """What the machine's checkpoints build on; None where they are whole by themselves."""
        ...

    async def lacking(self, checkpoint: CheckpointFiles) -> str | None:
        """The name of the base that a checkpoint builds on, if this host does not have it.

        None also of a checkpoint that cannot be read: `start` says what is wrong with it.
        """
        ...

    async def receive(self, name: str, directory: Path) -> None:
        """Have this base from now on, whose files are in `directory` on this host's disk, and the driver's from now on.

        All or nothing; idempotent. Codes: `template-corrupt` (it is not the base of this name), and the driver's own.
        """
        ...

    async def adopt(self, vm_id: VmId) -> None:
        """Take charge of a running machine that another driver object started; its guest answers when this returns."""
        ...

    async def machines(self) -> list[PresentVm]:
        """Every machine of this driver on this host."""
        ...

    async def freeze(self, vm_id: VmId) -> None:
        """Let the machine execute nothing from now on; idempotent."""
        ...

    async def checkpoint(self, vm_id: VmId, directory: Path) -> list[PartFile]:
        """Pause the machine and write its parts into the empty `directory`, durably; it stays paused.

        After an error it may be paused or running: `resume` makes it run. Asked again of a machine that is paused by
        a checkpoint, it writes the same state again.
        """
        ...

    async def checkpoint_live(self, vm_id: VmId, directory: Path, at_pause: OnPause) -> LiveCheckpoint:
        """Write the parts of a running machine into the empty `directory`, durably; it stands still only briefly.

        All parts are of the moment at which `at_pause` is called, and it is called once. After an error the machine
        may be paused: `resume` makes it run. Code `vm-not-running`: there is nothing to capture of one that is paused.
        """
        ...

    async def resume(self, vm_id: VmId) -> None:
        """Let a machine that a checkpoint has paused run on as if nothing had been; idempotent."""
        ...

    async def destroy(self, vm_id: VmId) -> None:
        """End the machine at once and give back all it holds; idempotent, also for a machine that never was."""
        ...

    async def exec(self, vm_id: VmId, exec_id: ExecId, program: ExecSpec, on_output: OnOutput) -> ExecOutcome:
        """Start a program in the guest and follow it to its end; ended by the guest after `program.timeout_s`.

        A program that cannot be started ends as a shell would have it: exit code 127 or 126, the reason on stderr.
        While `on_output` does not return, the program is held up. Code `exec-exists`: the guest knows this id already.
        """
        ...

    async def attach(self, vm_id: VmId, exec_id: ExecId, on_output: OnOutput) -> ExecOutcome:
        """Follow a program that goes on (after a restore, an adoption, a lost connection) or that has ended.

        Output begins with the first byte that no earlier `on_output` has taken, as far as the guest knows. Code
        `exec-unknown`: the guest knows no such program.
        """
        ...

    async def execs(self, vm_id: VmId) -> list[PresentExec]:
        """The programs the guest knows: those that run, and those that have ended and are not forgotten."""
        ...

    async def kill(self, vm_id: VmId, exec_id: ExecId, signal: int) -> None:
        """Send a signal to a program; nothing happens to one that has ended."""
        ...

    async def forget(self, vm_id: VmId, exec_id: ExecId) -> None:
        """Let the guest drop what it keeps of a program that has ended; idempotent."""
        ...

    async def close(self) -> None:
        """Let go of everything but the machines."""
        ...


class Workspace(Protocol):
    """One directory for each machine on this host's disk. Raises `torpor_chunks.port.ChunkError`: a full disk, say."""

    def resource(self, vm_id: VmId) -> ResourceRef:
        """The name under which the machine's directory is claimed."""
        ...

    def path(self, vm_id: VmId) -> Path:
        """Where the machine's directory is, or would be."""
        ...

    async def lock(self) -> None:
        """Make this process the only one that works here; `Rejected("host-busy")` when another one does."""
        ...

    async def unlock(self) -> None:
        """Let another process work here."""
        ...

    async def create(self, vm_id: VmId) -> Path:
        """The machine's directory, there and empty; what an earlier attempt left in it is gone."""
        ...

    async def subdirectory(self, vm_id: VmId, name: str) -> Path:
        """A directory in the machine's own, there and empty."""
        ...

    async def remove(self, vm_id: VmId) -> None:
        """Remove the machine's directory with all that is in it; idempotent."""
        ...

    async def remove_subdirectory(self, vm_id: VmId, name: str) -> None:
        """Remove a directory in the machine's own; idempotent."""
        ...

    async def remaining(self, resources: Sequence[ResourceRef]) -> list[ResourceRef]:
        """Those of these resources that are directories of this workspace and exist still."""
        ...

    async def forget_manifest(self, vm_id: VmId, checkpoint_id: CheckpointId) -> None:
        """The checkpoint no longer is what the machine would be resumed from; idempotent."""
        ...

    async def write_manifest(self, vm_id: VmId, checkpoint_id: CheckpointId, manifest: CheckpointManifest) -> None:
        """Note durably that the checkpoint is complete in the chunk store."""
        ...

    async def write_taken(self, vm_id: VmId, checkpoint_id: CheckpointId, taken: TakenCheckpoint) -> None:
        """Note durably that the checkpoint of a machine that runs on is complete in the chunk store.

        `forget_manifest` drops this note too.
        """
        ...

    async def read_taken(self, vm_id: VmId, checkpoint_id: CheckpointId) -> TakenCheckpoint | None:
        """What was noted of the checkpoint, or None."""
        ...

    async def read_manifest(self, vm_id: VmId, checkpoint_id: CheckpointId) -> CheckpointManifest | None:
        """What was noted of the checkpoint, or None."""
        ...

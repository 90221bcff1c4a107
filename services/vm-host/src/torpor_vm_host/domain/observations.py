"""What an observation of a machine makes of its state: the events to record; none when they are recorded already."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Literal, NamedTuple, Protocol

import msgspec

from torpor_contracts.checkpoint import CheckpointManifest
from torpor_contracts.ids import ExecId, HostId, VmId
from torpor_contracts.session_reports import ContinuedExec
from torpor_contracts.vm import (
    ResourceRef,
    StartVm,
    VmCheckpointed,
    VmCheckpointFailed,
    VmCheckpointStarted,
    VmEvent,
    VmExecContinued,
    VmExecEnded,
    VmReleased,
    VmStarted,
    VmStartFailed,
    VmStopped,
    VmSuspended,
    VmSuspendFailed,
    VmSuspendStarted,
)
from torpor_vm_host.domain.vm import Claim, Claimed, Quarantined, Running, Suspending, VmState, claim_of, held_by


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where and when a decision is made: which machine, on which host, in which of its lives."""

    vm_id: VmId
    host_id: HostId
    boot_id: str
    now: datetime


class Failure(NamedTuple):
    """Why something was not done; `retryable`: the same may succeed later, or elsewhere."""

    code: str
    detail: str
    retryable: bool


class Outcome(NamedTuple):
    """How a program ended, as it is recorded; `output_bytes` were published."""

    outcome: Literal["exited", "signaled", "timed-out", "failed"]
    exit_code: int | None
    detail: str
    output_bytes: int


class Taken(Protocol):
    """A checkpoint of a machine that runs on; see `torpor_vm_host.ports.TakenCheckpoint`."""

    @property
    def manifest(self) -> CheckpointManifest:
        """What binds it together."""
        ...

    @property
    def pause_ms(self) -> float:
        """For how long the machine stood still."""
        ...

    @property
    def taken_at(self) -> datetime:
        """From when on."""
        ...


def start_failed(command: StartVm, place: Place, failure: Failure) -> VmStartFailed:
    """The event that says why a start came to nothing."""
    return VmStartFailed(
        vm_id=place.vm_id,
        host_id=place.host_id,
        session_id=command.session_id,
        incarnation=command.incarnation,
        code=failure.code,
        detail=failure.detail,
        retryable=failure.retryable,
        observed_at=place.now,
    )


def started(state: VmState, place: Place, start_ms: int, inherited: Sequence[ContinuedExec]) -> list[VmEvent]:
    """The machine was observed running, and with it the programs its checkpoint brought; once."""
    if not isinstance(state, Claimed):
        return []
    claim = state.claim
    return [
        VmStarted(
            vm_id=place.vm_id,
            host_id=place.host_id,
            session_id=claim.session_id,
            incarnation=claim.incarnation,
            machine=claim.machine,
            checkpoint_id=claim.checkpoint_id,
            start_ms=start_ms,
            observed_at=place.now,
            execs=list(inherited),
        ),
        *(_continued(claim, place, one.exec_id) for one in inherited),
    ]


def continued(state: VmState, place: Place, exec_ids: Iterable[ExecId]) -> list[VmEvent]:
    """Programs were found in the guest that the stream has not heard of."""
    if not isinstance(state, Running):
        return []
    return [_continued(state.claim, place, exec_id) for exec_id in exec_ids if exec_id not in state.execs]


def start_gave_up(state: VmState, place: Place, failure: Failure, gone: Sequence[ResourceRef]) -> list[VmEvent]:
    """A claimed machine will not start; what was observed gone is released."""
    if not isinstance(state, Claimed):
        return []
    claim = state.claim
    failed = VmStartFailed(
        vm_id=place.vm_id,
        host_id=place.host_id,
        session_id=claim.session_id,
        incarnation=claim.incarnation,
        code=failure.code,
        detail=failure.detail,
        retryable=failure.retryable,
        observed_at=place.now,
    )
    return [failed, *released(state, place, gone)]


def exec_end(claim: Claim, place: Place, exec_id: ExecId, outcome: Outcome) -> VmExecEnded:
    """The event that says how a program ended."""
    return VmExecEnded(
        vm_id=place.vm_id,
        session_id=claim.session_id,
        incarnation=claim.incarnation,
        exec_id=exec_id,
        outcome=outcome.outcome,
        exit_code=outcome.exit_code,
        detail=outcome.detail,
        output_bytes=outcome.output_bytes,
        observed_at=place.now,
    )


def exec_ended(state: VmState, end: VmExecEnded) -> list[VmEvent]:
    """A program's end, once, while its machine is there."""
    if not isinstance(state, Running | Suspending) or not state.execs.get(end.exec_id, False):
        return []
    return [end]


def suspend_failed(state: VmState, place: Place, failure: Failure) -> list[VmEvent]:
    """The checkpoint could not be made; the machine runs on."""
    return [not_suspended(state.suspend, place, failure)] if isinstance(state, Suspending) else []


def checkpointed(state: VmState, place: Place, taken: Taken) -> list[VmEvent]:
    """The checkpoint is registered and the machine runs on; once."""
    if not isinstance(state, Running) or state.checkpoint is None:
        return []
    return [
        VmCheckpointed(
            vm_id=place.vm_id,
            host_id=place.host_id,
            session_id=state.claim.session_id,
            incarnation=state.claim.incarnation,
            checkpoint_id=state.checkpoint.checkpoint_id,
            fingerprint=taken.manifest.fingerprint,
            pause_ms=taken.pause_ms,
            log_position=taken.manifest.log_position,
            taken_at=taken.taken_at,
            observed_at=place.now,
        )
    ]


def checkpoint_failed(state: VmState, place: Place, failure: Failure) -> list[VmEvent]:
    """The machine could not be captured; it runs on."""
    if not isinstance(state, Running) or state.checkpoint is None:
        return []
    return [not_checkpointed(state.checkpoint, place, failure)]


def suspended(
    state: VmState, place: Place, fingerprint: str, suspend_ms: int, gone: Sequence[ResourceRef]
) -> list[VmEvent]:
    """The checkpoint is registered and the machine is gone."""
    if not isinstance(state, Suspending):
        return []
    done = VmSuspended(
        vm_id=place.vm_id,
        host_id=place.host_id,
        session_id=state.claim.session_id,
        incarnation=state.claim.incarnation,
        checkpoint_id=state.suspend.checkpoint_id,
        fingerprint=fingerprint,
        suspend_ms=suspend_ms,
        observed_at=place.now,
    )
    return [done, *released(state, place, gone)]


def found_gone(
    state: VmState, place: Place, cause: str, gone: Sequence[ResourceRef], *, wanted: bool = True
) -> list[VmEvent]:
    """A machine that was seen running is there no more; expected when its session did not want it any more."""
    claim = claim_of(state)
    if claim is None or not isinstance(state, Running | Suspending | Quarantined):
        return []
    return [
        VmStopped(
            vm_id=place.vm_id,
            host_id=place.host_id,
            session_id=claim.session_id,
            incarnation=claim.incarnation,
            expected=not wanted,
            cause=cause,
            observed_at=place.now,
        ),
        *released(state, place, gone),
    ]


def released(state: VmState, place: Place, gone: Sequence[ResourceRef]) -> list[VmEvent]:
    """What of the machine's claims was observed gone."""
    known = [one for one in held_by(state) if one in gone]
    if not known:
        return []
    return [VmReleased(vm_id=place.vm_id, host_id=place.host_id, resources=known, released_at=place.now)]


def _continued(claim: Claim, place: Place, exec_id: ExecId) -> VmExecContinued:
    return VmExecContinued(
        vm_id=place.vm_id,
        session_id=claim.session_id,
        incarnation=claim.incarnation,
        exec_id=exec_id,
        observed_at=place.now,
    )


def not_checkpointed(started: VmCheckpointStarted, place: Place, failure: Failure) -> VmCheckpointFailed:
    """The event that says why a checkpoint of a running machine came to nothing."""
    return VmCheckpointFailed(
        vm_id=place.vm_id,
        host_id=place.host_id,
        session_id=started.session_id,
        incarnation=started.incarnation,
        checkpoint_id=started.checkpoint_id,
        code=failure.code,
        detail=failure.detail,
        retryable=failure.retryable,
        observed_at=place.now,
    )


def not_suspended(started: VmSuspendStarted, place: Place, failure: Failure) -> VmSuspendFailed:
    """The event that says why a suspend came to nothing."""
    return VmSuspendFailed(
        vm_id=place.vm_id,
        host_id=place.host_id,
        session_id=started.session_id,
        incarnation=started.incarnation,
        checkpoint_id=started.checkpoint_id,
        code=failure.code,
        detail=failure.detail,
        observed_at=place.now,
    )

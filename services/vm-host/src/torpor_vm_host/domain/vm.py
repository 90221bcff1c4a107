"""The states of a machine as its stream tells them, and the one table of what may follow what.

A machine's id belongs to one incarnation of one session. It may be claimed again only after a start that failed.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Literal, assert_never

import msgspec

from torpor_contracts.errors import InvariantViolation
from torpor_contracts.ids import CheckpointId, ExecId, HostId, SessionId, TenantId, VmId
from torpor_contracts.session import MachineSpec
from torpor_contracts.vm import (
    ResourceRef,
    VmCheckpointed,
    VmCheckpointFailed,
    VmCheckpointStarted,
    VmClaimed,
    VmEvent,
    VmExecContinued,
    VmExecEnded,
    VmExecStarted,
    VmQuarantined,
    VmReaped,
    VmReleased,
    VmStarted,
    VmStartFailed,
    VmStopped,
    VmSuspended,
    VmSuspendFailed,
    VmSuspendStarted,
)

EndedHow = Literal["start-failed", "suspended", "stopped", "reaped"]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Whose machine it is and what it is made of; nothing in it changes while the machine lives."""

    vm_id: VmId
    host_id: HostId
    tenant_id: TenantId
    session_id: SessionId
    incarnation: int
    machine: MachineSpec
    checkpoint_id: CheckpointId | None


class Absent(msgspec.Struct, frozen=True, kw_only=True, tag="absent"):
    """Nobody has heard of the machine."""


class Claimed(msgspec.Struct, frozen=True, kw_only=True, tag="claimed"):
    """Its resources may exist; it has not been seen running."""

    claim: Claim
    held: tuple[ResourceRef, ...]


class Running(msgspec.Struct, frozen=True, kw_only=True, tag="running"):
    """It was seen running. `execs`: every program it was given, and whether that has not ended yet.

    `checkpoint` is being taken of it while it runs, `checkpointed` was taken last.
    """

    claim: Claim
    held: tuple[ResourceRef, ...]
    execs: Mapping[ExecId, bool]
    checkpoint: VmCheckpointStarted | None = None
    checkpointed: CheckpointId | None = None


class Suspending(msgspec.Struct, frozen=True, kw_only=True, tag="suspending"):
    """It may be paused, its checkpoint may be written and registered; it runs on unless all of that succeeds."""

    claim: Claim
    held: tuple[ResourceRef, ...]
    execs: Mapping[ExecId, bool]
    suspend: VmSuspendStarted


class Quarantined(msgspec.Struct, frozen=True, kw_only=True, tag="quarantined"):
    """It is frozen, and nobody's until the reaper has proved it. `claim` is None when the log never heard of it."""

    claim: Claim | None
    held: tuple[ResourceRef, ...]
    execs: Mapping[ExecId, bool] = {}


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """It is gone. `held` was claimed and has not been observed gone; `execs` are the programs it had been given."""

    how: EndedHow
    claim: Claim | None
    held: tuple[ResourceRef, ...]
    checkpoint_id: CheckpointId | None = None
    execs: Mapping[ExecId, bool] = {}


VmState = Absent | Claimed | Running | Suspending | Quarantined | Ended

ABSENT: Final = Absent()

TRANSITIONS: Final[Mapping[str, Mapping[type[msgspec.Struct], str]]] = {
    "absent": {
        VmClaimed: "claimed",
        VmStartFailed: "ended",
        VmStopped: "ended",
        VmQuarantined: "quarantined",
    },
    "claimed": {
        VmStarted: "running",
        VmStartFailed: "ended",
        VmStopped: "ended",
    },
    "running": {
        VmExecStarted: "running",
        VmExecContinued: "running",
        VmExecEnded: "running",
        VmSuspendStarted: "suspending",
        VmSuspendFailed: "running",
        VmCheckpointStarted: "running",
        VmCheckpointed: "running",
        VmCheckpointFailed: "running",
        VmStopped: "ended",
        VmQuarantined: "quarantined",
    },
    "suspending": {
        VmExecEnded: "suspending",
        VmSuspended: "ended",
        VmSuspendFailed: "running",
        VmStopped: "ended",
    },
    "quarantined": {
        VmStopped: "ended",
        VmReaped: "ended",
    },
    "ended": {
        VmClaimed: "claimed",
        VmReleased: "ended",
        VmQuarantined: "quarantined",
    },
}
"""State -> event -> next state; what is not here cannot happen. Claimed again only after a start that failed."""


def name_of(state: VmState) -> str:
    """The state's name in `TRANSITIONS`."""
    return str(state.__struct_config__.tag)


def evolve(state: VmState, event: VmEvent) -> VmState:
    """The state after an event; raises `InvariantViolation` for one that cannot follow."""
    now = name_of(state)
    if type(event) not in TRANSITIONS[now] or (isinstance(event, VmClaimed) and not _claimable(state)):
        raise InvariantViolation(f"a machine that is {now} cannot see {type(event).__name__}")
    after = _evolved(state, event)
    if name_of(after) != TRANSITIONS[now][type(event)]:
        raise InvariantViolation(f"{type(event).__name__} leads from {now} to {name_of(after)}, against the table")
    return after


def claim_of(state: VmState) -> Claim | None:
    """Whose machine it is, as far as the log knows."""
    return None if isinstance(state, Absent) else state.claim


def held_by(state: VmState) -> tuple[ResourceRef, ...]:
    """What was claimed for it and has not been observed gone."""
    return () if isinstance(state, Absent) else state.held


def may_exist(state: VmState) -> bool:
    """Whether the machine, or something it held, may be on its host."""
    return not isinstance(state, Absent) and (not isinstance(state, Ended) or bool(state.held))


def execs_of(state: VmState) -> Mapping[ExecId, bool]:
    """Every program the machine was given, and whether that has not ended as far as its stream knows."""
    return {} if isinstance(state, Absent | Claimed) else state.execs


def running_execs(state: VmState) -> list[ExecId]:
    """The programs that have not ended, as far as the log knows."""
    if not isinstance(state, Running | Suspending):
        return []
    return [exec_id for exec_id, runs in state.execs.items() if runs]


def _claimable(state: VmState) -> bool:
    return isinstance(state, Absent) or (isinstance(state, Ended) and state.how == "start-failed")


def _evolved(state: VmState, event: VmEvent) -> VmState:
    """What an event that the table allows makes of a state."""
    after: VmState
    match event:
        case VmClaimed():
            after = Claimed(claim=_claim(event), held=_joined(held_by(state), event.resources))
        case VmStarted():
            after = Running(claim=_known_claim(state), held=held_by(state), execs={})
        case VmExecStarted() | VmExecContinued() | VmExecEnded():
            after = _with_exec(state, event.exec_id, runs=not isinstance(event, VmExecEnded))
        case VmSuspendStarted():
            after = Suspending(claim=_known_claim(state), held=held_by(state), execs=execs_of(state), suspend=event)
        case VmSuspendFailed():
            after = Running(claim=_known_claim(state), held=held_by(state), execs=execs_of(state))
        case VmCheckpointStarted() | VmCheckpointed() | VmCheckpointFailed():
            after = _with_checkpoint(state, event)
        case VmQuarantined():
            after = Quarantined(claim=claim_of(state), held=held_by(state), execs=execs_of(state))
        case VmStartFailed() | VmSuspended() | VmStopped() | VmReaped():
            after = _ended(state, event)
        case VmReleased():
            after = _without(state, event.resources)
        case _ as never:
            assert_never(never)
    return after


def _with_checkpoint(state: VmState, event: VmCheckpointStarted | VmCheckpointed | VmCheckpointFailed) -> Running:
    assert isinstance(state, Running), "the table allows it nowhere else"
    match event:
        case VmCheckpointStarted():
            return msgspec.structs.replace(state, checkpoint=event)
        case VmCheckpointed():
            return msgspec.structs.replace(state, checkpoint=None, checkpointed=event.checkpoint_id)
        case VmCheckpointFailed():
            return msgspec.structs.replace(state, checkpoint=None)
        case _ as never:
            assert_never(never)


def _ended(state: VmState, event: VmStartFailed | VmSuspended | VmStopped | VmReaped) -> Ended:
    checkpoint_id = event.checkpoint_id if isinstance(event, VmSuspended) else None
    how: Mapping[type[msgspec.Struct], EndedHow] = {
        VmStartFailed: "start-failed",
        VmSuspended: "suspended",
        VmStopped: "stopped",
        VmReaped: "reaped",
    }
    return Ended(
        how=how[type(event)],
        claim=claim_of(state),
        held=held_by(state),
        checkpoint_id=checkpoint_id,
        execs=execs_of(state),
    )


def _without(state: VmState, gone: Iterable[ResourceRef]) -> Ended:
    assert isinstance(state, Ended), "the table allows it nowhere else"
    released = set(gone)
    return msgspec.structs.replace(state, held=tuple(one for one in state.held if one not in released))


def _claim(event: VmClaimed) -> Claim:
    return Claim(
        vm_id=event.vm_id,
        host_id=event.host_id,
        tenant_id=event.tenant_id,
        session_id=event.session_id,
        incarnation=event.incarnation,
        machine=event.machine,
        checkpoint_id=event.checkpoint_id,
    )


def _known_claim(state: VmState) -> Claim:
    claim = claim_of(state)
    assert claim is not None, "the table leads here only from a claim"
    return claim


def _with_exec(state: VmState, exec_id: ExecId, *, runs: bool) -> VmState:
    assert isinstance(state, Running | Suspending), "the table leads here only from a running machine"
    return msgspec.structs.replace(state, execs={**state.execs, exec_id: runs})


def _joined(held: Iterable[ResourceRef], claimed: Iterable[ResourceRef]) -> tuple[ResourceRef, ...]:
    return tuple(dict.fromkeys([*held, *claimed]))

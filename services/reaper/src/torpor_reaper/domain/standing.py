"""Whose a machine is: folded from its own stream and from that of the session it was claimed for.

A machine that its session lost sight of stays the session's until that has asked for another one, or is over: a host
may come back, and the work with it.
"""

from typing import Final, assert_never

import msgspec

from torpor_contracts.cleanup import CleanupReason
from torpor_contracts.ids import HostId, SessionId, TenantId, VmId
from torpor_contracts.session import (
    SessionFailed,
    SessionStartFailed,
    SessionSuspended,
    SessionTerminated,
    VmStartRequested,
)
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
from torpor_eventlog.instants import to_us


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a machine was said to be before it was made."""

    host_id: HostId
    tenant_id: TenantId
    session_id: SessionId
    incarnation: int
    position: int


class End(msgspec.Struct, frozen=True, kw_only=True):
    """A machine was observed gone, by its host's clock at `at_us`; `how` is the event's tag without its version."""

    how: str
    at_us: int
    position: int


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """A machine was quarantined."""

    at_us: int
    position: int


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the log says of a machine; nothing, when it has never heard of it.

    `held` was claimed and not observed gone. `end` stays known while a machine seen after it is frozen.
    """

    vm_id: VmId
    claim: Claim | None = None
    end: End | None = None
    frozen: Frozen | None = None
    held: tuple[ResourceRef, ...] = ()
    release_position: int | None = None

    @property
    def is_reaped(self) -> bool:
        """Whether its last end was a reaping."""
        return self.end is not None and self.end.how == "vm-reaped"


class SessionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Which machine a session holds: the one it asked for last, unless it has let go of that since.

    `position` and `cause` are of the event that made it so.
    """

    vm_id: VmId | None = None
    incarnation: int = 0
    position: int = 0
    cause: str = "it has asked for no machine"


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A host's own word that a machine exists there, by its clock."""

    host_id: HostId
    seen_us: int


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody's; `holder` says whose."""

    holder: str


class Nobodys(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody's, and why; `position` is the event that shows it, None when the log has never heard of the machine."""

    reason: CleanupReason
    evidence: str
    position: int | None


SESSION_STEPS: Final = (VmStartRequested, SessionStartFailed, SessionSuspended, SessionTerminated, SessionFailed)
"""The events by which a session comes to hold a machine, or lets go of it."""

SessionStep = VmStartRequested | SessionStartFailed | SessionSuspended | SessionTerminated | SessionFailed


def evolve_machine(facts: MachineFacts, event: VmEvent, position: int) -> MachineFacts:
    """The facts after an event of the machine's stream."""
    match event:
        case VmClaimed():
            return _claimed(facts, event, position)
        case VmStartFailed() | VmSuspended() | VmStopped() | VmReaped():
            return _ended(facts, event, position)
        case VmQuarantined():
            frozen = Frozen(at_us=to_us(event.observed_at), position=position)
            return msgspec.structs.replace(facts, frozen=frozen)
        case VmReleased():
            gone = set(event.resources)
            held = tuple(resource for resource in facts.held if resource not in gone)
            return msgspec.structs.replace(facts, held=held, release_position=position)
        case (
            VmStarted()
            | VmExecStarted()
            | VmExecContinued()
            | VmExecEnded()
            | VmSuspendStarted()
            | VmSuspendFailed()
            | VmCheckpointStarted()
            | VmCheckpointed()
            | VmCheckpointFailed()
        ):  # fmt: skip
            return facts
        case _ as never:
            assert_never(never)


def evolve_session(facts: SessionFacts, event: SessionStep, position: int) -> SessionFacts:
    """The facts after a step of the session."""
    match event:
        case VmStartRequested():
            asked = f"it asked for {event.vm_id}"
            return SessionFacts(vm_id=event.vm_id, incarnation=event.incarnation, position=position, cause=asked)
        case SessionStartFailed():
            if facts.vm_id != event.vm_id:
                return facts
            return _let_go(facts, position, f"it gave up starting {event.vm_id} ({event.code})")
        case SessionSuspended():
            return _let_go(facts, position, "it is suspended")
        case SessionTerminated():
            return _let_go(facts, position, "it is terminated")
        case SessionFailed():
            return _let_go(facts, position, f"it failed ({event.code})")
        case _ as never:
            assert_never(never)


def whose(machine: MachineFacts, session: SessionFacts) -> Held | Nobodys:
    """Whose a machine is, as far as the log alone can tell; `session` is the one it was claimed for."""
    if machine.end is not None:
        end = machine.end
        return Nobodys(reason="ended", evidence=f"{end.how} at position {end.position}", position=end.position)
    claim = machine.claim
    if claim is None:
        return Nobodys(reason="unclaimed", evidence="no event of the log claims it", position=None)
    holder = f"incarnation {claim.incarnation} of session {claim.session_id}"
    if session.vm_id == machine.vm_id:
        return Held(holder=holder)
    evidence = f"claimed at position {claim.position} for {holder}; {session.cause} at position {session.position}"
    return Nobodys(reason="superseded", evidence=evidence, position=session.position)


def judge(machine: MachineFacts, session: SessionFacts, sighting: Sighting) -> Held | Nobodys:
    """Whose a machine is that a host says it has: what the log says, held against what was seen, and when."""
    if machine.end is not None and sighting.seen_us <= machine.end.at_us:
        return Held(holder=f"seen before its {machine.end.how} at position {machine.end.position}")
    claim = machine.claim
    if machine.end is None and claim is not None and claim.host_id != sighting.host_id:
        evidence = f"claimed at position {claim.position} on {claim.host_id}, seen on {sighting.host_id}"
        return Nobodys(reason="misplaced", evidence=evidence, position=claim.position)
    found = whose(machine, session)
    if isinstance(found, Nobodys) and found.reason == "ended":
        evidence = f"{found.evidence}, and seen on {sighting.host_id} later"
        return Nobodys(reason="ended", evidence=evidence, position=found.position)
    return found


def _claimed(facts: MachineFacts, event: VmClaimed, position: int) -> MachineFacts:
    """A machine may be claimed again after a start that failed; what is held from before stays held."""
    claim = Claim(
        host_id=event.host_id,
        tenant_id=event.tenant_id,
        session_id=event.session_id,
        incarnation=event.incarnation,
        position=position,
    )
    held = tuple(dict.fromkeys([*facts.held, *event.resources]))
    return msgspec.structs.replace(facts, claim=claim, end=None, frozen=None, held=held)


def _ended(
    facts: MachineFacts, event: VmStartFailed | VmSuspended | VmStopped | VmReaped, position: int
) -> MachineFacts:
    how = str(event.__struct_config__.tag).partition(".")[0]
    return msgspec.structs.replace(
        facts, end=End(how=how, at_us=to_us(event.observed_at), position=position), frozen=None
    )


def _let_go(facts: SessionFacts, position: int, cause: str) -> SessionFacts:
    return SessionFacts(vm_id=None, incarnation=facts.incarnation, position=position, cause=cause)

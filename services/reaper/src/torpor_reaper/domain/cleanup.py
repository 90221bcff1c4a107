"""The life of a clean-up: proposed, confirmed, carried out, withdrawn or given up; every try within a rule on record.

Law: nothing is destroyed before it was frozen, the grace period is over, and the log was read again to its end.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, Literal, assert_never

import msgspec

from torpor_contracts.cleanup import (
    CleanupCarriedOut,
    CleanupConfirmed,
    CleanupEvent,
    CleanupGivenUp,
    CleanupProposed,
    CleanupWithdrawn,
)
from torpor_contracts.errors import InvariantViolation
from torpor_contracts.ids import SYSTEM_TENANT, HostId
from torpor_contracts.session import RetryRule
from torpor_eventlog.instants import from_us
from torpor_reaper.domain.standing import MachineFacts, Nobodys

Action = Literal["reap", "release"]


class Idle(msgspec.Struct, frozen=True, kw_only=True, tag="idle"):
    """Nobody has proposed anything."""


class Proposed(msgspec.Struct, frozen=True, kw_only=True, tag="proposed"):
    """The host was asked to freeze a machine, or to let go of claims; `began_at` is the first try of this round."""

    proposal: CleanupProposed
    began_at: datetime


class Confirmed(msgspec.Struct, frozen=True, kw_only=True, tag="confirmed"):
    """The host was asked to destroy the frozen machine."""

    proposal: CleanupProposed
    confirmation: CleanupConfirmed
    began_at: datetime


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag="settled"):
    """Carried out, or withdrawn: it may begin anew if something is seen again."""

    at: datetime


class GivenUp(msgspec.Struct, frozen=True, kw_only=True, tag="given-up"):
    """The host did not do it; tried again once its vm-host has another boot."""

    proposal: CleanupProposed
    ending: CleanupGivenUp


CleanupState = Idle | Proposed | Confirmed | Settled | GivenUp

IDLE: Final = Idle()

TRANSITIONS: Final[Mapping[str, Mapping[type[msgspec.Struct], str]]] = {
    "idle": {CleanupProposed: "proposed"},
    "proposed": {
        CleanupProposed: "proposed",
        CleanupConfirmed: "confirmed",
        CleanupWithdrawn: "settled",
        CleanupCarriedOut: "settled",
        CleanupGivenUp: "given-up",
    },
    "confirmed": {
        CleanupConfirmed: "confirmed",
        CleanupWithdrawn: "settled",
        CleanupCarriedOut: "settled",
        CleanupGivenUp: "given-up",
    },
    "settled": {CleanupProposed: "proposed"},
    "given-up": {CleanupProposed: "proposed", CleanupWithdrawn: "settled", CleanupCarriedOut: "settled"},
}
"""State -> event -> next state; what is not here cannot happen."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How long a frozen machine is left alone, and how often a host is asked."""

    grace_s: float
    retry: RetryRule


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What a heartbeat and the log, read to `checked_position`, say of a machine at the moment `now`.

    `found` is None when there is nothing to clean up. `action` says what is asked of the host.
    """

    host_id: HostId
    boot_id: str
    machine: MachineFacts
    found: Nobodys | None
    action: Action
    cause: str
    checked_position: int
    now: datetime


def evolve(state: CleanupState, event: CleanupEvent) -> CleanupState:
    """The state after an event; raises `InvariantViolation` for one that cannot follow."""
    name = str(state.__struct_config__.tag)
    if type(event) not in TRANSITIONS[name]:
        raise InvariantViolation(f"a clean-up that is {name} cannot see {type(event).__name__}")
    match event:
        case CleanupProposed():
            if isinstance(state, Proposed) and event.attempt > 1:
                return Proposed(proposal=event, began_at=state.began_at)
            return Proposed(proposal=event, began_at=event.proposed_at)
        case CleanupConfirmed():
            proposal, began_at = _proposal(state), event.confirmed_at
            if isinstance(state, Confirmed) and event.attempt > 1:
                began_at = state.began_at
            return Confirmed(proposal=proposal, confirmation=event, began_at=began_at)
        case CleanupWithdrawn():
            return Settled(at=event.withdrawn_at)
        case CleanupCarriedOut():
            return Settled(at=event.observed_at)
        case CleanupGivenUp():
            return GivenUp(proposal=_proposal(state), ending=event)
        case _ as never:
            assert_never(never)


def decide(state: CleanupState, look: Look, rules: Rules) -> Sequence[CleanupEvent]:
    """The next step of a clean-up, if it is time for one."""
    other_wish = isinstance(state, Proposed | Confirmed | GivenUp) and state.proposal.action != look.action
    if look.found is None or other_wish:
        return _settle(state, look)  # what is found instead is proposed with the next look
    match state:
        case Idle() | Settled():
            return [_proposed(look, look.found, rules, attempt=1)]
        case GivenUp():
            return [] if state.ending.boot_id == look.boot_id else [_proposed(look, look.found, rules, attempt=1)]
        case Proposed():
            return _advance(state, look, look.found, rules)
        case Confirmed():
            return _insist(state, look, look.found)
        case _ as never:
            assert_never(never)


def is_due(state: CleanupState, machine: MachineFacts, boot_id: str, now: datetime) -> bool:
    """Whether a look may bring a machine that is still nobody's a step further; saves reading the log for nothing."""
    match state:
        case Idle() | Settled():
            return True
        case GivenUp():
            return state.ending.boot_id != boot_id
        case Proposed():
            return now >= (grace_over_at(state, machine) or next_try_at(state))
        case Confirmed():
            return now >= next_try_at(state)
        case _ as never:
            assert_never(never)


def next_try_at(state: Proposed | Confirmed) -> datetime:
    """When the host is asked again if it has not done what it was asked."""
    if isinstance(state, Proposed):
        return _after_pause(state.proposal.proposed_at, state.proposal.retry, state.proposal.attempt)
    return _after_pause(state.confirmation.confirmed_at, state.proposal.retry, state.confirmation.attempt)


def grace_over_at(state: Proposed, machine: MachineFacts) -> datetime | None:
    """When the frozen machine may be looked at again; None while the host has not frozen it."""
    if machine.frozen is None:
        return None
    since = max(state.proposal.proposed_at, from_us(machine.frozen.at_us))
    return since + timedelta(seconds=state.proposal.grace_s)


def _settle(state: CleanupState, look: Look) -> Sequence[CleanupEvent]:
    if not isinstance(state, Proposed | Confirmed | GivenUp):
        return []
    done = _done(state.proposal.action, look.machine)
    if done is not None:
        return [
            CleanupCarriedOut(
                vm_id=look.machine.vm_id, host_id=look.host_id, evidence_position=done, observed_at=look.now
            )
        ]
    return [
        CleanupWithdrawn(
            vm_id=look.machine.vm_id,
            host_id=look.host_id,
            cause=look.cause,
            checked_position=look.checked_position,
            withdrawn_at=look.now,
        )
    ]


def _done(action: Action, machine: MachineFacts) -> int | None:
    """The position of the event that says the host did what it was asked."""
    if action == "reap":
        return machine.end.position if machine.end is not None and machine.is_reaped else None
    return machine.release_position if not machine.held else None


def _advance(state: Proposed, look: Look, found: Nobodys, rules: Rules) -> Sequence[CleanupEvent]:
    over_at = grace_over_at(state, look.machine)
    if over_at is not None and look.action == "reap":
        return [_confirmed(look, found, attempt=1)] if look.now >= over_at else []
    if look.now < next_try_at(state):
        return []
    rule = state.proposal.retry
    attempt = _next_attempt(rule, state.proposal.attempt, state.proposal.proposed_at, state.began_at, look.now)
    if attempt is None:
        asked = "freeze the machine" if look.action == "reap" else "let go of what it claims"
        return [_given_up(look, state.proposal.attempt, f"the host did not {asked}")]
    return [_proposed(look, found, rules, attempt=attempt)]


def _insist(state: Confirmed, look: Look, found: Nobodys) -> Sequence[CleanupEvent]:
    if look.now < next_try_at(state):
        return []
    last = state.confirmation
    attempt = _next_attempt(state.proposal.retry, last.attempt, last.confirmed_at, state.began_at, look.now)
    if attempt is None:
        return [_given_up(look, last.attempt, "the host did not destroy the frozen machine")]
    return [_confirmed(look, found, attempt=attempt)]


def _next_attempt(rule: RetryRule, attempt: int, asked_at: datetime, began_at: datetime, now: datetime) -> int | None:
    """The number of the next try, None when the rule is used up.

    A host that was silent for longer than the deadline has not failed: it is asked from the start again.
    """
    deadline = timedelta(seconds=rule.deadline_s)
    if now - asked_at > deadline:
        return 1
    return attempt + 1 if attempt < rule.attempts_max and now - began_at <= deadline else None


def _after_pause(asked_at: datetime, rule: RetryRule, attempt: int) -> datetime:
    pause_s = min(rule.backoff_s * 2 ** min(attempt - 1, 32), rule.backoff_s_max)
    return asked_at + timedelta(seconds=pause_s)


def _proposal(state: CleanupState) -> CleanupProposed:
    if isinstance(state, Proposed | Confirmed | GivenUp):
        return state.proposal
    raise InvariantViolation(f"a clean-up that is {state.__struct_config__.tag} has no proposal")


def _proposed(look: Look, found: Nobodys, rules: Rules, attempt: int) -> CleanupProposed:
    claim = look.machine.claim
    return CleanupProposed(
        vm_id=look.machine.vm_id,
        host_id=look.host_id,
        boot_id=look.boot_id,
        tenant_id=SYSTEM_TENANT if claim is None else claim.tenant_id,
        session_id=None if claim is None else claim.session_id,
        incarnation=None if claim is None else claim.incarnation,
        reason=found.reason,
        action=look.action,
        attempt=attempt,
        evidence=found.evidence,
        evidence_position=found.position,
        checked_position=look.checked_position,
        grace_s=rules.grace_s,
        retry=rules.retry,
        proposed_at=look.now,
    )


def _confirmed(look: Look, found: Nobodys, attempt: int) -> CleanupConfirmed:
    return CleanupConfirmed(
        vm_id=look.machine.vm_id,
        host_id=look.host_id,
        attempt=attempt,
        evidence=found.evidence,
        checked_position=look.checked_position,
        confirmed_at=look.now,
    )


def _given_up(look: Look, attempts: int, cause: str) -> CleanupGivenUp:
    return CleanupGivenUp(
        vm_id=look.machine.vm_id,
        host_id=look.host_id,
        boot_id=look.boot_id,
        attempts=attempts,
        cause=cause,
        way_out=f"look at the log of vm-host {look.host_id}, then restart it: the clean-up begins anew",
        given_up_at=look.now,
    )

"""What a clean-up still waits for, in words for people; every candidate and every claim in use has such an answer."""

from datetime import datetime
from typing import assert_never

import msgspec

from torpor_contracts.ids import HostId
from torpor_reaper.domain.cleanup import (
    CleanupState,
    Confirmed,
    GivenUp,
    Idle,
    Proposed,
    Settled,
    grace_over_at,
    next_try_at,
)
from torpor_reaper.domain.standing import Held, MachineFacts, Nobodys, SessionFacts, whose


class HostWord(msgspec.Struct, frozen=True, kw_only=True):
    """When a host was last heard; `is_silent` when that is too long ago for what it has now."""

    host_id: HostId
    heard_at: datetime | None
    is_silent: bool


def why_not_yet(machine: MachineFacts, session: SessionFacts, cleanup: CleanupState, host: HostWord) -> str:
    """Why what the machine is or holds has not been cleaned up."""
    match cleanup:
        case GivenUp():
            ending = cleanup.ending
            return f"given up after {ending.attempts} tries: {ending.cause}; {ending.way_out}"
        case Proposed() | Confirmed():
            asked = _asked(cleanup, machine)
            return f"{asked}; {_silence(host)}" if host.is_silent else asked
        case Idle() | Settled():
            return _not_proposed(machine, whose(machine, session), host)
        case _ as never:
            assert_never(never)


def _asked(cleanup: Proposed | Confirmed, machine: MachineFacts) -> str:
    proposal = cleanup.proposal
    tries, then = proposal.retry.attempts_max, next_try_at(cleanup).isoformat()
    if isinstance(cleanup, Confirmed):
        attempt = cleanup.confirmation.attempt
        return f"{proposal.host_id} was asked to destroy it (try {attempt} of {tries}); asked again at {then}"
    over_at = grace_over_at(cleanup, machine)
    if proposal.action == "reap" and over_at is not None and machine.frozen is not None:
        return f"frozen at position {machine.frozen.position}; left alone until {over_at.isoformat()}"
    wish = "freeze it" if proposal.action == "reap" else "let go of its claims"
    return f"{proposal.host_id} was asked to {wish} (try {proposal.attempt} of {tries}); asked again at {then}"


def _not_proposed(machine: MachineFacts, found: Held | Nobodys, host: HostWord) -> str:
    if isinstance(found, Held):
        return f"in use by {found.holder}"
    if host.is_silent:
        return _silence(host)
    if machine.end is not None:
        return f"its machine ended ({found.evidence}); {host.host_id} is asked to let go with its next heartbeats"
    return f"nobody's ({found.evidence}); proposed once {host.host_id} is seen to have it"


def _silence(host: HostWord) -> str:
    since = "since the reaper started" if host.heard_at is None else f"since {host.heard_at.isoformat()}"
    return f"{host.host_id} has not been heard {since}: what it has now is not known"

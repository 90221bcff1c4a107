"""Events of a clean-up, stream `cleanup-<vm id>`, owned by the reaper; and what the reaper answers to queries.

A clean-up asks a host to destroy a machine that is nobody's, or to let go of what an ended machine still claims.
"""

from datetime import datetime
from typing import Literal

import msgspec

from torpor_contracts.ids import HostId, SessionId, TenantId, VmId
from torpor_contracts.session import RetryRule

CleanupReason = Literal["unclaimed", "misplaced", "ended", "superseded", "unreleased"]
"""Why something is nobody's: no claim in the log; claimed on another host; its machine ended before it was seen;
its session gave it up or went on with another; claimed by a machine that is gone."""


class CleanupProposed(msgspec.Struct, frozen=True, kw_only=True, tag="cleanup-proposed.v1"):
    """A host was seen to hold what nobody claims, and is asked to freeze it (`reap`) or to let go of it (`release`).

    `evidence_position` is the event that shows it is nobody's, None when the log has never heard of the machine.
    Nothing is destroyed before `grace_s` have passed and the log has been read again; tries follow `retry`.
    """

    vm_id: VmId
    host_id: HostId
    boot_id: str
    tenant_id: TenantId
    session_id: SessionId | None
    incarnation: int | None
    reason: CleanupReason
    action: Literal["reap", "release"]
    attempt: int
    evidence: str
    evidence_position: int | None
    checked_position: int
    grace_s: float
    retry: RetryRule
    proposed_at: datetime


class CleanupConfirmed(msgspec.Struct, frozen=True, kw_only=True, tag="cleanup-confirmed.v1"):
    """The machine is frozen, the grace period is over, and it is nobody's still: its host is asked to destroy it.

    `checked_position` is the end of the log up to which that was checked.
    """

    vm_id: VmId
    host_id: HostId
    attempt: int
    evidence: str
    checked_position: int
    confirmed_at: datetime


class CleanupWithdrawn(msgspec.Struct, frozen=True, kw_only=True, tag="cleanup-withdrawn.v1"):
    """Nothing is left to clean up, or it has an owner: the proposal is off."""

    vm_id: VmId
    host_id: HostId
    cause: str
    checked_position: int
    withdrawn_at: datetime


class CleanupCarriedOut(msgspec.Struct, frozen=True, kw_only=True, tag="cleanup-carried-out.v1"):
    """The host observed it gone; `evidence_position` is the event that says so."""

    vm_id: VmId
    host_id: HostId
    evidence_position: int
    observed_at: datetime


class CleanupGivenUp(msgspec.Struct, frozen=True, kw_only=True, tag="cleanup-given-up.v1"):
    """The host did not do it within the retry rule; tried again once its vm-host is started anew (another boot)."""

    vm_id: VmId
    host_id: HostId
    boot_id: str
    attempts: int
    cause: str
    way_out: str
    given_up_at: datetime


CleanupEvent = CleanupProposed | CleanupConfirmed | CleanupWithdrawn | CleanupCarriedOut | CleanupGivenUp

# --- queries: qry.<tenant>.reaper.<type>.<target> --------------------------------------------------------------


class ResourcesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`resources` of the session that is the target (`-`: of the tenant). `after` is the `next` of the page before."""

    held_only: bool = False
    after: str | None = None
    limit: int = 200


class ClaimedResource(msgspec.Struct, frozen=True, kw_only=True):
    """One claim and, when it is over, its release. `why_not_yet` says what its clean-up waits for, None when over."""

    kind: str
    name: str
    vm_id: VmId
    host_id: HostId
    session_id: SessionId
    incarnation: int
    holder: str
    claimed_at: datetime
    claimed_position: int
    released_at: datetime | None
    released_position: int | None
    why_not_yet: str | None


class ResourcesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of claims, derived from the log up to `position`; `next` asks for the page after, None ends."""

    tenant_id: TenantId
    session_id: SessionId | None
    as_of: datetime
    position: int
    resources: list[ClaimedResource]
    next: str | None


class CandidatesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`candidates` of the tenant (of everybody for the system tenant)."""

    after: str | None = None
    limit: int = 200


class CleanupCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """Something that may be cleaned up, on which evidence, and what that still waits for."""

    vm_id: VmId
    host_id: HostId
    tenant_id: TenantId
    session_id: SessionId | None
    incarnation: int | None
    reason: CleanupReason
    evidence: str
    evidence_position: int | None
    state: Literal["noticed", "proposed", "quarantined", "confirmed", "given-up"]
    attempts: int
    unreleased: int
    why_not_yet: str


class CandidatesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of candidates, derived from the log up to `position`; `next` asks for the page after, None ends."""

    tenant_id: TenantId
    as_of: datetime
    position: int
    candidates: list[CleanupCandidate]
    next: str | None

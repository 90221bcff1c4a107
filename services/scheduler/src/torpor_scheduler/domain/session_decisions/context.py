"""What a decision about a session is made from beside the session's state, and the draft it is written on."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from torpor_contracts.ids import CheckpointId, SessionId, TenantId, VmId
from torpor_contracts.session import RetryRule, SessionEvent
from torpor_scheduler.domain.folding import evolve
from torpor_scheduler.domain.placement import HostOffer
from torpor_scheduler.domain.session import Session


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may ask for. Sizes in MiB unless the name says otherwise."""

    vcpus_max: int = 32
    memory_mib_min: int = 16
    memory_mib_max: int = 131_072
    disk_mib_max: int = 1_048_576
    idle_after_s_min: float = 0.1
    idle_after_s_max: float = 30 * 86_400.0
    metadata_bytes_max: int = 4_096
    metadata_keys_max: int = 32
    attempts_max: int = 10
    backoff_s_min: float = 0.05
    backoff_s_max: float = 300.0
    deadline_s_max: float = 3_600.0
    execs_max: int = 64
    program_bytes_max: int = 262_144
    exec_timeout_s_max: float = 7 * 86_400.0
    forks_max: int = 100
    label_max: int = 200


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How long hosts are given, and how a failed suspend or checkpoint is tried again.

    `placement_backoff_s_max`: the longest pause between two looks for a host. `idle_again_s_min`: the shortest until
    a machine that was in use is taken for idle again.
    """

    limits: Limits = Limits()
    start_timeout_s: float = 60.0
    suspend_timeout_s: float = 120.0
    checkpoint_timeout_s: float = 120.0
    stop_timeout_s: float = 30.0
    idle_again_s_min: float = 1.0
    placement_backoff_s_max: float = 15.0
    suspend_retry: RetryRule = RetryRule(attempts_max=8, backoff_s=30.0, backoff_s_max=900.0, deadline_s=86_400.0)
    checkpoint_retry: RetryRule = RetryRule(attempts_max=3, backoff_s=1.0, backoff_s_max=10.0, deadline_s=300.0)


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the log has of a checkpoint of the session's tree; `kept`: it can be restored."""

    checkpoint_id: CheckpointId
    incarnation: int
    fingerprint: str
    log_position: int
    recorded_at: datetime
    kept: bool


class LookedUp(msgspec.Struct, frozen=True, kw_only=True):
    """What was found under a checkpoint's id; `facts` None: nothing that the session may use. `version` 0: nothing."""

    version: int
    facts: CheckpointFacts | None


class Seed(msgspec.Struct, frozen=True, kw_only=True):
    """A session that a fork is to make: what stands under its id now (None: no session), and its first machine's id."""

    session: Session | None
    vm_id: VmId


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """The moment, what hosts offer, and ids for what the decision may ask for.

    `exec_known`: whether the view of programs has the id of the program asked for already; None: nobody has looked.
    `checkpoints` and `seeds` are what was looked up of checkpoints and of sessions that are to be made.
    """

    now: datetime
    vm_id: VmId
    checkpoint_id: CheckpointId
    offers: tuple[HostOffer, ...] = ()
    exec_known: bool | None = None
    checkpoints: Mapping[CheckpointId, LookedUp] = {}
    seeds: Mapping[SessionId, Seed] = {}
    rules: Rules = Rules()

    def after(self, seconds: float) -> datetime:
        """The moment so many seconds from now."""
        return self.now + timedelta(seconds=seconds)

    def past(self, moment: datetime) -> datetime:
        """`moment`, or now if a host's clock is ahead of ours."""
        return min(moment, self.now)

    def checkpoint(self, checkpoint_id: CheckpointId) -> LookedUp:
        """What was found under a checkpoint's id; raises `CheckpointNeeded` when nobody has looked."""
        found = self.checkpoints.get(checkpoint_id)
        if found is None:
            raise CheckpointNeeded(checkpoint_id)
        return found

    def seeds_of(self, session_ids: Sequence[SessionId]) -> list[Seed]:
        """What a fork makes these sessions from; raises `SeedsNeeded` when nobody has looked for all of them."""
        if any(session_id not in self.seeds for session_id in session_ids):
            raise SeedsNeeded(session_ids)
        return [self.seeds[session_id] for session_id in session_ids]


class HistoryNeeded(Exception):  # noqa: N818  (a question, not a failure)
    """The session remembers its last programs only: look into the view for the id asked for, then decide again."""


class CheckpointNeeded(Exception):  # noqa: N818  (a question, not a failure)
    """Look into the log for this checkpoint, then decide again."""

    def __init__(self, checkpoint_id: CheckpointId) -> None:
        super().__init__(checkpoint_id)
        self.checkpoint_id = checkpoint_id


class SeedsNeeded(Exception):  # noqa: N818  (a question, not a failure)
    """Look for what stands under the ids of these sessions, then decide again."""

    def __init__(self, session_ids: Sequence[SessionId]) -> None:
        super().__init__(*session_ids)
        self.session_ids = tuple(session_ids)


class Addressee(msgspec.Struct, frozen=True, kw_only=True):
    """The session a command is for, and the tenant that sent it."""

    session_id: SessionId
    tenant_id: TenantId


class Draft:
    """The events of one decision, and the state they lead to; `made` are the drafts of sessions that a fork makes."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.events: list[SessionEvent] = []
        self.made: dict[SessionId, Draft] = {}

    def record(self, event: SessionEvent) -> None:
        """Let `event` happen."""
        self.session = evolve(self.session, event)
        self.events.append(event)


def pause_s(backoff_s: float, backoff_s_max: float, tries: int) -> float:
    """The pause after so many tries: doubling from `backoff_s`, at most `backoff_s_max`."""
    doublings = min(max(tries - 1, 0), 32)
    return min(backoff_s * 2.0**doublings, backoff_s_max)

"""How sessions branch: checkpoints of one that runs on, forks from a checkpoint, and the way back to one.

All of it stands in the stream of the session asked (see `torpor_contracts.session`), but for the sessions that a fork
makes: each has a stream of its own, which begins with a `session-requested` that names where it came from.

A `log_position` says up to where the log had come while the machine stood still for its checkpoint: what stands
behind it in the log is not in the checkpoint's past. 0: not known, as for checkpoints of the first release.
"""

from datetime import datetime
from typing import Literal

import msgspec

from torpor_contracts.ids import CheckpointId, ExecId, HostId, SessionId, VmId

# --- commands of clients: cmd.<tenant>.scheduler.<type>.<session id> -------------------------------------------


class CheckpointSession(
    msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint-session.v1", forbid_unknown_fields=True
):
    """Checkpoint the session while it runs on; one that sleeps is answered with the checkpoint it sleeps in.

    `checkpoint_id` (`ckp-…`) is what a checkpoint taken now is to be called; left out, an id is made. `label` is for
    people.
    """

    checkpoint_id: CheckpointId | None = None
    label: str = ""
    incarnation: int | None = None


class ForkSession(msgspec.Struct, frozen=True, kw_only=True, tag="fork-session.v1", forbid_unknown_fields=True):
    """Make new sessions that begin in a checkpoint of this one: all of them or none. This one goes on, or sleeps on.

    `session_ids` is what they are to be called; left out, `count` ids are made. `checkpoint_id` is where they begin;
    left out, `source` says: `fresh`, a checkpoint that is taken now of the running session; `newest`, the newest there
    is; `auto`, a fresh one of a session that runs, else the newest. `metadata`: theirs; None: as this session's.
    """

    session_ids: list[SessionId] = []
    count: int = 1
    checkpoint_id: CheckpointId | None = None
    source: Literal["auto", "newest", "fresh"] = "auto"
    metadata: dict[str, str] | None = None
    incarnation: int | None = None


class RollbackSession(msgspec.Struct, frozen=True, kw_only=True, tag="rollback-session.v1", forbid_unknown_fields=True):
    """Take the session back to a checkpoint of its tree: its own, or one that those it was forked from made before.

    Its machine is stopped, and it comes back as a new incarnation. Checkpoints made since stay as a branch of the tree.
    """

    checkpoint_id: CheckpointId
    incarnation: int | None = None


BranchCommand = CheckpointSession | ForkSession | RollbackSession

# --- events -----------------------------------------------------------------------------------------------------


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """Where a forked session came from; `made_on` is the host that made the checkpoint, as far as that is known."""

    session_id: SessionId
    checkpoint_id: CheckpointId
    fingerprint: str
    made_on: HostId | None
    log_position: int


class CheckpointRequested(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint-requested.v1"):
    """The host is asked for a checkpoint of the machine, which runs on; for a client, or for a fork."""

    session_id: SessionId
    host_id: HostId
    vm_id: VmId
    incarnation: int
    checkpoint_id: CheckpointId
    parent_id: CheckpointId | None
    label: str
    cause: Literal["client", "fork"]
    attempt: int
    requested_at: datetime
    deadline_at: datetime


class SessionCheckpointed(msgspec.Struct, frozen=True, kw_only=True, tag="session-checkpointed.v1"):
    """A checkpoint of the session is with the store; what was asked for while it slept names the one it sleeps in.

    The machine stood still from `taken_at` for `pause_ms`.
    """

    incarnation: int
    host_id: HostId
    checkpoint_id: CheckpointId
    fingerprint: str
    label: str
    pause_ms: float
    log_position: int
    taken_at: datetime
    observed_at: datetime


class CheckpointFailed(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint-failed.v1"):
    """The checkpoint could not be made; the machine, if it is there, runs on. Tried again at `retry_at`, None: not."""

    incarnation: int
    checkpoint_id: CheckpointId
    attempt: int
    code: str
    detail: str
    observed_at: datetime
    retry_at: datetime | None


class ForkRequested(msgspec.Struct, frozen=True, kw_only=True, tag="fork-requested.v1"):
    """New sessions are wanted that begin in a checkpoint which is still to be taken; none of them exists yet."""

    session_id: SessionId
    incarnation: int
    checkpoint_id: CheckpointId
    session_ids: list[SessionId]
    metadata: dict[str, str]
    requested_at: datetime


class SessionForked(msgspec.Struct, frozen=True, kw_only=True, tag="session-forked.v1"):
    """These sessions were made, together with this event; each begins in the checkpoint, as its incarnation 1."""

    session_id: SessionId
    incarnation: int
    checkpoint_id: CheckpointId
    session_ids: list[SessionId]
    log_position: int
    forked_at: datetime


class ForkFailed(msgspec.Struct, frozen=True, kw_only=True, tag="fork-failed.v1"):
    """None of these sessions was made, and none will be."""

    incarnation: int
    checkpoint_id: CheckpointId
    session_ids: list[SessionId]
    code: str
    detail: str
    observed_at: datetime


class RollbackRequested(msgspec.Struct, frozen=True, kw_only=True, tag="rollback-requested.v1"):
    """The session goes back to `checkpoint_id`; a machine that still runs is asked to stop (`vm_id` None: none does).

    `checkpoint_incarnation` and `recorded_at` are the checkpoint's. A `resume-requested` follows once the machine is
    gone.
    """

    session_id: SessionId
    host_id: HostId | None
    vm_id: VmId | None
    incarnation: int
    checkpoint_id: CheckpointId
    checkpoint_incarnation: int
    fingerprint: str
    log_position: int
    recorded_at: datetime
    requested_at: datetime
    deadline_at: datetime


class ExecContinued(msgspec.Struct, frozen=True, kw_only=True, tag="exec-continued.v1"):
    """A program came with the checkpoint and goes on although it was not in flight; it has `timeout_s` left.

    The session it was started in has forked since, or has gone back to where its end was not on record yet. It ends
    again.
    """

    exec_id: ExecId
    incarnation: int
    timeout_s: float
    observed_at: datetime


BranchEvent = (
    CheckpointRequested
    | SessionCheckpointed
    | CheckpointFailed
    | ForkRequested
    | SessionForked
    | ForkFailed
    | RollbackRequested
)

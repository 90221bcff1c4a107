"""Checkpoints of a session that runs on, forks of it, and its way back: what each command leads to, seen in the log."""

from collections.abc import Callable, Sequence

import msgspec

from torpor.client import events
from torpor.client.awaited import UP, judged_so, raise_if_elsewhere
from torpor.client.connection import Connection
from torpor.client.models import Checkpoint, Event
from torpor.errors import CheckpointFailed, ForkFailed, SessionEnded
from torpor_contracts import session_branches as contract_branches
from torpor_contracts.replies import Receipt


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions of a fork, and where the log says so; `sure`: they exist, and do not just wait for a checkpoint."""

    session_ids: list[str]
    checkpoint_id: str
    position: int
    sure: bool


async def checkpoint_of(connection: Connection, receipt: Receipt, timeout_s: float, *, wait: bool) -> Checkpoint:
    """The checkpoint that a receipt is for; with `wait` once it is with the store, else as soon as it has its id."""
    wanted: list[str] = []

    def judged(event: Event) -> Checkpoint | None:
        body = event.body
        if event.position == receipt.position and isinstance(body, contract_branches.CheckpointRequested):
            wanted.append(body.checkpoint_id)
            return None if wait else _requested(body, receipt)
        if isinstance(body, contract_branches.SessionCheckpointed) and (
            event.position == receipt.position or body.checkpoint_id in wanted
        ):
            return _taken(body, receipt, event.position)
        if (
            isinstance(body, contract_branches.CheckpointFailed)
            and body.checkpoint_id in wanted
            and body.retry_at is None
        ):
            raise CheckpointFailed(
                body.code,
                f"{body.checkpoint_id} could not be made: {body.detail}",
                f"see `torpor session show {receipt.stream}`; checkpoint it again once it runs",
                event.position,
            )
        return None

    subject = events.session_subject(connection.tenant, receipt.stream)
    what = f"session {receipt.stream} has not been checkpointed"
    return await judged_so(connection, subject, (receipt, receipt.position), judged, (timeout_s, what))


def _requested(body: contract_branches.CheckpointRequested, receipt: Receipt) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=body.checkpoint_id,
        session_id=receipt.stream,
        incarnation=body.incarnation,
        label=body.label,
        pause_ms=None,
        taken_at=None,
        receipt=receipt,
        position=receipt.position,
    )


def _taken(body: contract_branches.SessionCheckpointed, receipt: Receipt, position: int) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=body.checkpoint_id,
        session_id=receipt.stream,
        incarnation=body.incarnation,
        label=body.label,
        pause_ms=body.pause_ms,
        taken_at=body.taken_at,
        receipt=receipt,
        position=position,
    )


async def sessions_of(connection: Connection, receipt: Receipt, timeout_s: float, *, wait: bool) -> Made:
    """The sessions that a fork's receipt is for; with `wait` once they exist, else as soon as they have their ids."""
    planned: list[Made] = []

    def judged(event: Event) -> Made | None:
        body = event.body
        if isinstance(body, contract_branches.ForkRequested) and event.position < receipt.position:
            # A fork of a session that runs is asked for in two events: this one, then that of its checkpoint.
            made = Made(
                session_ids=list(body.session_ids),
                checkpoint_id=body.checkpoint_id,
                position=event.position,
                sure=False,
            )
            planned.append(made)
            return None if wait else made
        if event.position < receipt.position:
            return None
        mine = event.position == receipt.position or [one.checkpoint_id for one in planned] == [
            getattr(body, "checkpoint_id", "")
        ]
        if isinstance(body, contract_branches.SessionForked) and mine:
            return Made(
                session_ids=list(body.session_ids), checkpoint_id=body.checkpoint_id, position=event.position, sure=True
            )
        if isinstance(body, contract_branches.ForkFailed) and mine:
            raise ForkFailed(
                body.code,
                f"none of the {len(body.session_ids)} sessions was made: {body.detail}",
                "the session goes on as it was; fork it again, or from a checkpoint there is",
                event.position,
            )
        return None

    subject = events.session_subject(connection.tenant, receipt.stream)
    what = f"session {receipt.stream} has not been forked"
    since = max(1, receipt.position - 1)
    return await judged_so(connection, subject, (receipt, since), judged, (timeout_s, what))


async def all_up(
    connection: Connection, receipt: Receipt, made: Made, timeout_s: float, on_up: Callable[[str, int], None]
) -> None:
    """Until the machine of each session made was seen running; `on_up` is told of each, with the position.

    `ForkFailed` when the rest runs or has ended too, and one could not start.
    """
    waiting = set(made.session_ids)
    failures: list[SessionEnded] = []

    def judged(event: Event) -> bool | None:
        if event.stream not in waiting:
            return None
        if isinstance(event.body, UP):
            waiting.discard(event.stream)
            on_up(event.stream, event.position)
        else:
            try:
                raise_if_elsewhere(event, UP)
            except SessionEnded as ended:
                waiting.discard(event.stream)
                ended.add_note(event.stream)
                failures.append(ended)
        return None if waiting else True

    # One reader for many sessions: their tenant's events are few beside a consumer for each of them.
    alone = made.session_ids[0] if len(made.session_ids) == 1 else "*"
    subject = events.session_subject(connection.tenant, alone)
    what = f"not all of the {len(made.session_ids)} sessions forked from {receipt.stream} run"
    await judged_so(connection, subject, (receipt, made.position), judged, (timeout_s, what))
    if failures:
        raise _not_all(made, failures)


def _not_all(made: Made, failures: Sequence[SessionEnded]) -> ForkFailed:
    first = failures[0]
    failed = [note for one in failures for note in one.__notes__]
    return ForkFailed(
        first.code,
        f"{len(failed)} of {len(made.session_ids)} sessions did not start: {', '.join(failed)}: {first.message}",
        f"{first.advice}; the others run",
        first.position,
        session_ids=tuple(made.session_ids),
    )

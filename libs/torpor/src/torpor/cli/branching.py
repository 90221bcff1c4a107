"""`torpor session checkpoint|fork|rollback` and `torpor checkpoint create`."""

import asyncio
from typing import Annotated, Literal

from cyclopts import Parameter
from msgspec import structs

from torpor.cli import printing
from torpor.cli.options import DEFAULTS, Common
from torpor.cli.session import CommandId, SessionId, Timeout, Wait, changed, metadata_of
from torpor.client.models import Checkpoint
from torpor.client.session import WAIT_TIMEOUT_S, Session
from torpor.errors import InvalidRequest
from torpor_contracts.replies import Receipt
from torpor_contracts.scheduling import SessionView


def checkpoint_(
    session_id: SessionId,
    *,
    label: Annotated[str, Parameter(help="A name for people.")] = "",
    checkpoint_id: Annotated[str | None, Parameter(help="The id to give it (ckp-…); by default a new one.")] = None,
    incarnation: int | None = None,
    command_id: CommandId = None,
    wait: Wait = True,
    timeout_s: Timeout = WAIT_TIMEOUT_S,
    common: Common = DEFAULTS,
) -> int:
    """Checkpoint a session while it runs on; of one that sleeps, name the checkpoint it sleeps in."""

    async def work() -> Checkpoint:
        async with common.connect() as t:
            return await t.sessions.handle(session_id).checkpoint(
                label=label,
                checkpoint_id=checkpoint_id,
                incarnation=incarnation,
                command_id=command_id,
                wait=wait,
                timeout_s=timeout_s,
            )

    made = asyncio.run(work())
    if common.json:
        printing.emit(made)
    elif made.pause_ms is None:
        printing.say(f"{made.checkpoint_id}  asked for")
    else:
        printing.say(
            f"{made.checkpoint_id}  of {session_id}/{made.incarnation}, which stood still {made.pause_ms:.0f} ms"
        )
    return 0


def fork_(
    session_id: SessionId,
    count: Annotated[int, Parameter(help="How many sessions to make.")] = 1,
    *,
    session_ids: Annotated[
        list[str] | None, Parameter(name="--id", negative=(), help="What to call one of them; may be repeated.")
    ] = None,
    checkpoint_id: Annotated[str | None, Parameter(name="--from", help="The checkpoint they begin in.")] = None,
    source: Annotated[
        Literal["auto", "newest", "fresh"],
        Parameter(help="Without --from: a checkpoint taken now (fresh), the newest, or fresh if it runs (auto)."),
    ] = "auto",
    metadata: Annotated[
        list[str] | None, Parameter(negative=(), help="KEY=VALUE; may be repeated. By default as the session's.")
    ] = None,
    incarnation: int | None = None,
    command_id: CommandId = None,
    wait: Wait = True,
    timeout_s: Timeout = WAIT_TIMEOUT_S,
    common: Common = DEFAULTS,
) -> int:
    """Make new sessions that begin where this one is, all of them or none; this one goes on."""
    if session_ids and count not in {1, len(session_ids)}:
        raise InvalidRequest("illegal-fork", f"{count} sessions and {len(session_ids)} ids", "give one of the two")

    async def work() -> tuple[list[Session], list[SessionView]]:
        async with common.connect() as t:
            forks = await t.sessions.handle(session_id).fork(
                count,
                session_ids=session_ids or (),
                checkpoint_id=checkpoint_id,
                source=source,
                metadata=None if metadata is None else metadata_of(metadata),
                incarnation=incarnation,
                command_id=command_id,
                wait=wait,
                timeout_s=timeout_s,
            )
            # Without a wait they may not exist yet: there is nothing to show but their ids.
            return forks, [await fork.show(at_least=fork.position) for fork in forks if wait]

    forks, views = asyncio.run(work())
    if common.json:
        shown = [structs.asdict(view) for view in views] or [{"session_id": fork.session_id} for fork in forks]
        printing.emit({"sessions": shown, "receipt": forks[0].receipt})
        return 0
    for fork in forks[len(views) :]:
        printing.say(f"{fork.session_id}  asked for")
    for view in views:
        begun = f"  from {view.lineage.checkpoint_id}" if view.lineage else ""
        printing.say(f"{view.session_id}  {view.state}{begun}")
    return 0


def rollback_(
    session_id: SessionId,
    checkpoint_id: Annotated[str, Parameter(help="The checkpoint to go back to.", show_default=False)],
    *,
    incarnation: int | None = None,
    command_id: CommandId = None,
    wait: Wait = True,
    timeout_s: Timeout = WAIT_TIMEOUT_S,
    common: Common = DEFAULTS,
) -> int:
    """Take a session back to a checkpoint of its tree, as a new incarnation; what came since stays as a branch."""

    async def work(session: Session) -> Receipt:
        return await session.rollback(
            checkpoint_id, incarnation=incarnation, command_id=command_id, wait=wait, timeout_s=timeout_s
        )

    return changed(session_id, work, common)

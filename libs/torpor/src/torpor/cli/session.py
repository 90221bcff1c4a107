"""`torpor session …`."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated

from cyclopts import Parameter
from msgspec import structs

from torpor.cli import printing
from torpor.cli.options import DEFAULTS, Common
from torpor.client.session import WAIT_TIMEOUT_S, Session
from torpor.errors import InvalidRequest
from torpor_contracts.replies import Receipt
from torpor_contracts.scheduling import SessionView

CommandId = Annotated[
    str | None, Parameter(help="Sent again under the same id, the command happens once and answers the same receipt.")
]
Timeout = Annotated[float, Parameter(name="--timeout-s", help="How long to wait, in seconds.")]
Wait = Annotated[bool, Parameter(negative="--no-wait", help="Return when the effect was observed, not just recorded.")]
SessionId = Annotated[str, Parameter(help="The session's id.", show_default=False)]


def create_(
    session_id: Annotated[str | None, Parameter(help="The id to give it; by default a new one.")] = None,
    *,
    image: str = "default",
    vcpus: int = 1,
    memory_mib: int = 256,
    disk_mib: int = 1024,
    idle_after_s: Annotated[float | None, Parameter(help="Seconds without work after which it falls asleep.")] = 300.0,
    never_idle: Annotated[bool, Parameter(negative=(), help="It never falls asleep by itself.")] = False,
    metadata: Annotated[
        list[str] | None, Parameter(name="--metadata", negative=(), help="KEY=VALUE; may be repeated.")
    ] = None,
    command_id: CommandId = None,
    wait: Wait = True,
    timeout_s: Timeout = WAIT_TIMEOUT_S,
    common: Common = DEFAULTS,
) -> int:
    """Make a session, and wait until its machine runs."""

    async def work() -> int:
        async with common.connect() as t:
            session = await t.sessions.create(
                session_id=session_id,
                image=image,
                vcpus=vcpus,
                memory_mib=memory_mib,
                disk_mib=disk_mib,
                idle_after_s=None if never_idle else idle_after_s,
                metadata=metadata_of(metadata or []),
                command_id=command_id,
                wait=wait,
                timeout_s=timeout_s,
            )
            await _show(session, common, line=True)
        return 0

    return asyncio.run(work())


def metadata_of(entries: list[str]) -> dict[str, str]:
    """KEY=VALUE, again and again, as a mapping."""
    found = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            raise InvalidRequest("malformed-metadata", f"{entry!r} is not KEY=VALUE", "write --metadata owner=me")
        found[key] = value
    return found


def list_(
    *,
    state: Annotated[str | None, Parameter(help="Only those in this state.")] = None,
    common: Common = DEFAULTS,
) -> int:
    """List sessions."""

    async def work() -> int:
        async with common.connect() as t:
            views = [view async for view in t.sessions.list(state=state)]
        if common.json:
            printing.emit(views)
            return 0
        rows = [(v.session_id, v.state, v.incarnation, len(v.execs), v.changed_at, _problem(v)) for v in views]
        printing.table(
            ("session", "state", "incarnation", "programs", "since", "problem"),
            rows,
            "no sessions; make one with `torpor session create`",
        )
        return 0

    return asyncio.run(work())


def show_(session_id: SessionId, *, common: Common = DEFAULTS) -> int:
    """Show one session."""

    async def work() -> int:
        async with common.connect() as t:
            await _show(t.sessions.handle(session_id), common)
        return 0

    return asyncio.run(work())


def suspend_(
    session_id: SessionId,
    *,
    incarnation: int | None = None,
    command_id: CommandId = None,
    wait: Wait = True,
    timeout_s: Timeout = WAIT_TIMEOUT_S,
    common: Common = DEFAULTS,
) -> int:
    """Put a session to sleep: its machine is checkpointed and freed."""

    async def work(session: Session) -> Receipt:
        return await session.suspend(incarnation=incarnation, command_id=command_id, wait=wait, timeout_s=timeout_s)

    return changed(session_id, work, common)


def resume_(
    session_id: SessionId,
    *,
    incarnation: int | None = None,
    command_id: CommandId = None,
    wait: Wait = True,
    timeout_s: Timeout = WAIT_TIMEOUT_S,
    common: Common = DEFAULTS,
) -> int:
    """Wake a session from its newest checkpoint."""

    async def work(session: Session) -> Receipt:
        return await session.resume(incarnation=incarnation, command_id=command_id, wait=wait, timeout_s=timeout_s)

    return changed(session_id, work, common)


def terminate_(
    session_id: SessionId,
    *,
    reason: str = "",
    command_id: CommandId = None,
    wait: Wait = True,
    timeout_s: Timeout = WAIT_TIMEOUT_S,
    common: Common = DEFAULTS,
) -> int:
    """End a session for good; its history, receipts and usage stay."""

    async def work(session: Session) -> Receipt:
        return await session.terminate(reason=reason, command_id=command_id, wait=wait, timeout_s=timeout_s)

    return changed(session_id, work, common)


def changed(session_id: str, work: Callable[[Session], Awaitable[Receipt]], common: Common) -> int:
    """Do something to a session, and show what it is then."""

    async def run() -> int:
        async with common.connect() as t:
            session = t.sessions.handle(session_id)
            await work(session)
            await _show(session, common, line=True)
        return 0

    return asyncio.run(run())


async def _show(session: Session, common: Common, *, line: bool = False) -> None:
    """The session, not older than what was last seen of it; as a `line` after it was changed."""
    view = await session.show(at_least=session.position)
    if common.json:
        printing.emit({**structs.asdict(view), "receipt": session.receipt} if session.receipt else view)
        return
    if line:
        printing.say(f"{view.session_id}  {view.state}  incarnation {view.incarnation}")
        return
    printing.pairs(
        {
            "session": view.session_id,
            "state": view.state,
            "desired": view.desired,
            "observed": view.observed,
            "incarnation": view.incarnation,
            "machine": _machine(view),
            "host": view.host_id,
            "vm": view.vm_id,
            "checkpoint": view.checkpoint_id,
            "programs": ", ".join(e.exec_id for e in view.execs),
            "falls asleep": view.suspends_at,
            "tried again": view.retries_at,
            "lost since": view.lost_since,
            "requested": view.requested_at,
            "changed": view.changed_at,
            "last event": f"version {view.version}, position {view.position}",
            "metadata": view.metadata,
            "forked from": f"{view.lineage.session_id}, {view.lineage.checkpoint_id}" if view.lineage else None,
            "problem": _problem(view),
            "way out": view.problem.way_out if view.problem else None,
        }
    )


def _machine(view: SessionView) -> str:
    spec = view.machine
    return f"{spec.image}: {spec.vcpus} vcpu, {spec.memory_mib} MiB memory, {spec.disk_mib} MiB disk"


def _problem(view: SessionView) -> str | None:
    return f"{view.problem.code}: {view.problem.detail}" if view.problem else None

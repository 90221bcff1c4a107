"""The scheduler's views: sessions, their programs, their timer, and hosts with what is taken of them.

One projection folds them all, so that what a host has taken is always the sum over the sessions beside it.
"""

from datetime import datetime
from typing import Any, Final, Literal, assert_never, get_args

import msgspec
from msgspec.structs import replace

from torpor_contracts.host import HostEvent, HostRegistered
from torpor_contracts.session import ExecEnded, ExecRequested, ExecStarted, SessionEvent
from torpor_contracts.session_branches import ExecContinued
from torpor_contracts.session_reports import TimerKind
from torpor_eventlog.port import Recorded
from torpor_eventlog.views_port import Table, WritableRows
from torpor_scheduler.domain.folding import evolve
from torpor_scheduler.domain.host import ABSENT_HOST, Host, HostPhase, evolve_host
from torpor_scheduler.domain.placement import HostOffer
from torpor_scheduler.domain.session import INITIAL, Machine, Phase, Session, unstarted
from torpor_scheduler.domain.timers import timer_of

SESSION_EVENTS: Final = get_args(SessionEvent)
HOST_EVENTS: Final = get_args(HostEvent)


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session. `step_*` are of its last event that was not about a program, `position` of its last event.

    `waits_us`: since when a running machine owes the start of a program. `runs_us`: since when it owes any report of a
    program or a checkpoint. Both are None when there is nothing to wait for.
    """

    session_id: str
    tenant_id: str
    phase: str
    host_id: str | None
    step_us: int
    step_position: int
    position: int
    waits_us: int | None
    runs_us: int | None
    folded: Session


class TimerRow(msgspec.Struct, frozen=True, kw_only=True):
    """The timer of a session; `position` is that of the event that set it."""

    session_id: str
    tenant_id: str
    kind: TimerKind
    due_us: int
    incarnation: int
    generation: int
    position: int


class ExecRow(msgspec.Struct, frozen=True, kw_only=True):
    """A program; the key is `<session id>/<exec id>`."""

    key: str
    session_id: str
    exec_id: str
    tenant_id: str
    state: Literal["pending", "started", "ended"]
    requested_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    incarnation: int | None = None
    outcome: Literal["exited", "signaled", "timed-out", "failed", "lost", "cancelled"] | None = None
    exit_code: int | None = None
    detail: str = ""
    output_bytes: int = 0
    position: int


class HostRow(msgspec.Struct, frozen=True, kw_only=True):
    """A host, and the sums over the machines that sessions have on it.

    `step_us` and `position` are of its last event, `boot_position` is that of its last registration.
    """

    host_id: str
    phase: str
    boot_position: int
    position: int
    step_us: int
    vcpus: int
    memory_mib: int
    disk_mib: int
    vms: int
    folded: Host


SESSIONS: Final = Table(
    name="sessions",
    row=SessionRow,
    key="session_id",
    indexed=("tenant_id", "phase", "host_id", "step_us", "waits_us", "runs_us"),
)
TIMERS: Final = Table(name="session_timers", row=TimerRow, key="session_id", indexed=("due_us",))
EXECS: Final = Table(name="execs", row=ExecRow, key="key")
HOSTS: Final = Table(name="hosts", row=HostRow, key="host_id", indexed=("phase",))


class Views:
    """Folds the events of sessions and hosts."""

    name = "scheduler-views"
    tables = (SESSIONS, TIMERS, EXECS, HOSTS)

    async def fold(self, rows: WritableRows, event: Any, recorded: Recorded) -> None:
        """See `Projection.fold`."""
        if isinstance(event, SESSION_EVENTS):
            await _fold_session(rows, event, recorded)
        elif isinstance(event, HOST_EVENTS):
            await _fold_host(rows, event, recorded)


def exec_key(session_id: str, exec_id: str) -> str:
    """The key of a program's row."""
    return f"{session_id}/{exec_id}"


def offer_of(row: HostRow) -> HostOffer:
    """What the host has left, as far as the view knows."""
    host = row.folded
    return HostOffer(
        host_id=host.host_id,
        fingerprint=host.fingerprint,
        lost=host.phase is HostPhase.LOST,
        draining=host.draining,
        vcpus_free=host.capacity.vcpus - row.vcpus,
        memory_mib_free=host.capacity.memory_mib - row.memory_mib,
        disk_mib_free=host.capacity.disk_mib - row.disk_mib,
        vms_free=host.capacity.vms_max - row.vms,
    )


def microseconds(moment: datetime) -> int:
    """Microseconds since the Unix epoch."""
    return round(moment.timestamp() * 1_000_000)


async def _fold_session(rows: WritableRows, event: SessionEvent, recorded: Recorded) -> None:
    row: SessionRow | None = await rows.get(SESSIONS, recorded.stream)
    before = row.folded if row else INITIAL
    after = evolve(before, event)
    stepped = row is None or after.step_version == recorded.version
    await rows.put(
        SESSIONS,
        SessionRow(
            session_id=after.session_id,
            tenant_id=after.tenant_id,
            phase=str(after.phase),
            host_id=None if after.machine is None else after.machine.host_id,
            step_us=recorded.occurred_at_us if stepped or row is None else row.step_us,
            step_position=recorded.position if stepped or row is None else row.step_position,
            position=recorded.position,
            waits_us=_since_us(after, waiting_only=True),
            runs_us=_since_us(after, waiting_only=False),
            folded=after,
        ),
    )
    await _set_timer(rows, after, recorded)
    if isinstance(event, ExecRequested | ExecStarted | ExecEnded | ExecContinued):
        await _fold_exec(rows, event, after, recorded)
    if before.machine is None or after.machine is None or before.machine.host_id != after.machine.host_id:
        await _move_machine(rows, before.machine, after.machine, after)


def _since_us(session: Session, *, waiting_only: bool) -> int | None:
    """From when the present machine owes a report of what waits longest."""
    machine = session.machine
    if session.phase is not Phase.RUNNING or machine is None or machine.started_at is None:
        return None
    programs = unstarted(session) if waiting_only else session.execs
    asked = [program.requested_at for program in programs]
    pending = session.checkpointing
    if pending is not None and pending.retry_at is None and not waiting_only:
        asked.append(pending.requested_at)
    since = min(asked, default=None)
    return None if since is None else microseconds(max(since, machine.started_at))


async def _set_timer(rows: WritableRows, session: Session, recorded: Recorded) -> None:
    timer = timer_of(session)
    if timer is None:
        await rows.delete(TIMERS, session.session_id)
    elif timer.generation == recorded.version:
        await rows.put(
            TIMERS,
            TimerRow(
                session_id=session.session_id,
                tenant_id=session.tenant_id,
                kind=timer.kind,
                due_us=microseconds(timer.due_at),
                incarnation=session.incarnation,
                generation=timer.generation,
                position=recorded.position,
            ),
        )


async def _fold_exec(
    rows: WritableRows,
    event: ExecRequested | ExecStarted | ExecEnded | ExecContinued,
    session: Session,
    recorded: Recorded,
) -> None:
    key = exec_key(session.session_id, event.exec_id)
    row: ExecRow | None = await rows.get(EXECS, key)
    match event:
        case ExecRequested():
            row = ExecRow(
                key=key,
                session_id=session.session_id,
                exec_id=event.exec_id,
                tenant_id=session.tenant_id,
                state="pending",
                requested_at=event.requested_at,
                position=recorded.position,
            )
        case ExecContinued():
            row = ExecRow(
                key=key,
                session_id=session.session_id,
                exec_id=event.exec_id,
                tenant_id=session.tenant_id,
                state="started",
                requested_at=event.observed_at if row is None else row.requested_at,
                started_at=event.observed_at,
                incarnation=event.incarnation,
                position=recorded.position,
            )
        case ExecStarted() if row is not None:
            row = replace(
                row,
                state="started",
                started_at=event.observed_at,
                incarnation=event.incarnation,
                position=recorded.position,
            )
        case ExecEnded() if row is not None:
            row = replace(
                row,
                state="ended",
                ended_at=event.observed_at,
                incarnation=event.incarnation,
                outcome=event.outcome,
                exit_code=event.exit_code,
                detail=event.detail,
                output_bytes=event.output_bytes,
                position=recorded.position,
            )
        case ExecStarted() | ExecEnded():
            return
        case _ as never:
            assert_never(never)
    if row is not None:
        await rows.put(EXECS, row)


async def _move_machine(rows: WritableRows, left: Machine | None, taken: Machine | None, session: Session) -> None:
    if left is not None:
        await _count(rows, left.host_id, session, -1)
    if taken is not None:
        await _count(rows, taken.host_id, session, 1)


async def _count(rows: WritableRows, host_id: str, session: Session, machines: Literal[-1, 1]) -> None:
    row: HostRow | None = await rows.get(HOSTS, host_id)
    if row is None:
        return
    spec = session.spec
    await rows.put(
        HOSTS,
        replace(
            row,
            vcpus=row.vcpus + machines * spec.vcpus,
            memory_mib=row.memory_mib + machines * spec.memory_mib,
            disk_mib=row.disk_mib + machines * spec.disk_mib,
            vms=row.vms + machines,
        ),
    )


async def _fold_host(rows: WritableRows, event: HostEvent, recorded: Recorded) -> None:
    row: HostRow | None = await rows.get(HOSTS, recorded.stream)
    host = evolve_host(row.folded if row else ABSENT_HOST, event)
    if row is None:
        row = HostRow(
            host_id=host.host_id,
            phase=str(host.phase),
            boot_position=recorded.position,
            position=recorded.position,
            step_us=recorded.occurred_at_us,
            vcpus=0,
            memory_mib=0,
            disk_mib=0,
            vms=0,
            folded=host,
        )
    await rows.put(
        HOSTS,
        replace(
            row,
            phase=str(host.phase),
            boot_position=recorded.position if isinstance(event, HostRegistered) else row.boot_position,
            position=recorded.position,
            step_us=recorded.occurred_at_us,
            folded=host,
        ),
    )

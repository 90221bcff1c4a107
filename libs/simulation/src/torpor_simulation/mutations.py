"""The changes that make mutants: each function answers what to put in place of what in production's code."""
# ruff: noqa: SLF001  (to break what is inside is the point)

import asyncio
from collections.abc import Sequence
from typing import Any

from torpor_billing import projections as billing
from torpor_contracts.errors import InvariantViolation, TorporError
from torpor_contracts.replies import Receipt, Refusal, Reply
from torpor_contracts.session import SuspendRequested
from torpor_eventlog import memory, planning
from torpor_eventlog.deciding import Decisions
from torpor_eventlog.followers import ProjectionFollower
from torpor_eventlog.instants import to_us
from torpor_eventlog.port import Commit, EventLog
from torpor_messaging.policy import ConsumerPolicy
from torpor_reaper import handlers as reaping
from torpor_reaper.domain.standing import Nobodys
from torpor_scheduler.domain.session import Session
from torpor_scheduler.domain.session_decisions import reports, waking
from torpor_scheduler.keeping_hosts import HostKeeper
from torpor_scheduler.timing import Timing
from torpor_snapshot_store import handlers as storing
from torpor_snapshot_store.holders import Holders
from torpor_vm_host.bases import Bases
from torpor_vm_host.checkpoints import NotDone, failure_of
from torpor_vm_host.clearing import Clearing
from torpor_vm_host.domain import observations
from torpor_vm_host.domain.vm import Absent, Claim, Running
from torpor_vm_host.handlers import Handlers
from torpor_vm_host.ports import DriverError
from torpor_vm_host.starting import Starting
from torpor_vm_host.suspending import Suspends

Change = Sequence[tuple[Any, str, Any]]
"""(owner, name, what to put there) for each thing that is changed."""


def versions_unchecked() -> Change:
    """The log takes a commit whatever version its streams have."""

    def placed_anywhere(commit: Commit, _now: object, before: planning.Known | None) -> Receipt | TorporError | None:
        if before is not None:
            return planning._answer_again(commit, before)
        return None if commit.events else InvariantViolation("no events")

    return [(planning, "_without_place", placed_anywhere)]


def templates_left_at_home() -> Change:
    """What checkpoints build on stays on its host: nobody else can load them."""

    async def not_kept(_self: Bases, _base: object) -> None:
        return

    return [(Bases, "_keep", not_kept)]


def acknowledged_before_append() -> Change:
    """A command is acknowledged when it arrives, not when it is done."""
    attempt = ConsumerPolicy._attempt

    async def hasty(self: ConsumerPolicy, delivery: Any, handle: Any, reply_to: Any) -> Any:
        await delivery.ack()
        return await attempt(self, delivery, handle, reply_to)

    return [(ConsumerPolicy, "_attempt", hasty)]


class _LaterLog:
    """Answers a receipt at once, and appends a moment later."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append(self, commit: Commit) -> Receipt:
        """Foretell the receipt."""
        own = commit.events[0].stream
        after = sum(event.stream == own for event in commit.events)
        asyncio.get_running_loop().call_later(0.05, self._append, commit)
        return Receipt(
            command_id=commit.command_id,
            stream=own,
            version=commit.expected[own] + after,
            position=(await self._log.head()).position + len(commit.events),
            digest="",
        )

    def _append(self, commit: Commit) -> None:
        self._appending = asyncio.ensure_future(self._log.append(commit))


def answered_before_append() -> Change:
    """A receipt is given for what is about to be appended."""
    begin = Decisions.__init__

    def hasty(self: Decisions[Any], log: EventLog, *rest: Any, **named: Any) -> None:
        begin(self, _LaterLog(log), *rest, **named)

    return [(Decisions, "__init__", hasty)]


def started_twice() -> Change:
    """A start that comes again starts the machine again."""
    start = Starting.start

    async def again(self: Starting, incoming: Any, vm_id: Any) -> Any:
        state = await self._ledger.state(vm_id)
        if isinstance(state, Running):
            await self._driver.destroy(vm_id)
            await self._driver.start(self._spec(state.claim), None)
        return await start(self, incoming, vm_id)

    return [(Starting, "start", again)]


def acquired_before_claim() -> Change:
    """A machine is started, and claimed afterwards."""
    start = Starting.start

    async def eager(self: Starting, incoming: Any, vm_id: Any) -> Any:
        command = incoming.command
        if isinstance(await self._ledger.state(vm_id), Absent) and command.checkpoint_id is None:
            claim = Claim(
                vm_id=vm_id,
                host_id=self._host_id,
                tenant_id=incoming.tenant_id,
                session_id=command.session_id,
                incarnation=command.incarnation,
                machine=command.machine,
                checkpoint_id=None,
            )
            await self._workspace.create(vm_id)
            await self._driver.start(self._spec(claim), None)
        return await start(self, incoming, vm_id)

    return [(Starting, "start", eager)]


def incarnation_ignored() -> Change:
    """What was observed of any machine of a session is taken for the present one's."""
    return [(reports, "_is", lambda _machine, _vm_id, _incarnation: True)]


def incarnation_reused() -> Change:
    """Another try to start a session is made under the incarnation of the one before."""

    def same(session: Session) -> int:
        return session.incarnation or 1

    return [(waking, "next_incarnation", same)]


def cursor_forgotten() -> Change:
    """A projection that is started again begins at the log's end."""
    start = ProjectionFollower._start

    async def at_the_end(self: ProjectionFollower) -> int:
        await start(self)
        feed: Any = self._feed
        last: int = (await feed._log.head()).position
        async with self._store.writing(self.name) as write:
            write.move_to(max(last, write.position))
        self._progress.move_to(last)
        return last

    return [(ProjectionFollower, "_start", at_the_end)]


def position_before_rows() -> Change:
    """A projection moves on in one transaction, and folds in the next."""

    async def torn(self: ProjectionFollower, rows: Any) -> Any:
        before = await self._store.position(self.name)
        async with self._store.writing(self.name) as write:
            write.move_to(max(before, rows[-1].position))
        async with self._store.writing(self.name) as write:
            for row in rows:
                if row.position > before:
                    await self._projection.fold(write, self._codec.decode(row), row)
        self._progress.move_to(max(before, rows[-1].position))

    return [(ProjectionFollower, "_fold_together", torn)]


def exec_unrecorded() -> Change:
    """A program is begun whenever it is asked for, without a record."""

    async def begin(self: Handlers, incoming: Any, vm_id: Any) -> None:
        command = incoming.command
        state = await self._hosting.ledger.state(vm_id)
        if isinstance(state, Running) and command.exec_id not in self._hosting.programs.following(vm_id):
            self._hosting.programs.intend(vm_id, command.exec_id)
            self._hosting.programs.begin(state.claim, command.exec_id, command.program)

    return [(Handlers, "_exec", begin)]


def destroyed_before_registered() -> Change:
    """A suspended machine is destroyed before the store has its checkpoint on record."""

    async def finish(self: Suspends, about: Any, state: Any) -> None:
        vm_id, suspend = state.claim.vm_id, state.suspend
        await self._programs.detach(vm_id)
        try:
            manifest = await self._checkpoint(state)
            gone = await self._ended(state)
            await self._checkpoints.register(about, suspend.checkpoint_id, manifest, suspend.deadline_at)
        except (DriverError, NotDone) as error:
            await self._run_on(about, state, failure_of(error))
            return
        await self._ledger.observe(
            about, vm_id, lambda now, place: observations.suspended(now, place, manifest.fingerprint, 1, gone)
        )

    return [(Suspends, "finish", finish)]


def released_unseen() -> Change:
    """What was to be given back is said to be gone without a look."""

    async def clear(_self: Clearing, _vm_id: Any, held: Any) -> Any:
        return list(held)

    return [(Clearing, "clear", clear), (Clearing, "end", clear)]


def hosts_never_lost() -> Change:
    """No host is ever declared lost."""

    async def wait(_self: HostKeeper, _row: Any) -> None:
        return

    return [(HostKeeper, "_declare_lost", wait)]


def timers_without_backstop() -> Change:
    """Nobody looks for timers that the bus has lost."""

    async def nothing(_self: Timing, _now: Any) -> list[Any]:
        return []

    return [(Timing, "overdue", nothing)]


def billed_by_request() -> Change:
    """Running time ends when a suspend is asked for."""
    fold = billing.Meters.fold

    async def early(self: billing.Meters, rows: Any, event: Any, recorded: Any) -> None:
        if isinstance(event, SuspendRequested):
            await billing._end(rows, event.vm_id, to_us(event.requested_at), recorded.position, "vm-suspended")
        await fold(self, rows, event, recorded)

    return [(billing.Meters, "fold", early)]


def reaped_without_recheck() -> Change:
    """The reaper takes the word of a view, which knows nothing yet, and does not read the log."""

    async def nothing(_self: reaping.Heartbeats, _field: str, _host_id: str) -> list[Any]:
        return []

    def nobodys(*_: object) -> Nobodys:
        return Nobodys(reason="superseded", evidence="it looked like nobody's", position=None)

    return [(reaping.Heartbeats, "_rows", nothing), (reaping, "judge", nobodys)]


def receipts_forgotten() -> Change:
    """A command that comes again is decided again."""
    plan = planning.plan

    async def unknown(_self: Decisions[Any], _cause: Any) -> None:
        return None

    def forgetful(batch: Any, end: Any, versions: Any, _known: Any) -> Any:
        return plan(batch, end, versions, {})

    return [(Decisions, "_known", unknown), (memory, "plan", forgetful)]


def refusal_told_too_soon() -> Change:
    """A refusal is told before the server has forgotten the command."""

    async def tell(self: ConsumerPolicy, delivery: Any, reply_to: Any, refusal: Refusal) -> None:
        await self._reply(reply_to, Reply(refusal=refusal))
        await delivery.ack()

    return [(ConsumerPolicy, "_turn_down", tell)]


def referenced_freed() -> Change:
    """A checkpoint is freed although sessions rest on it."""

    async def none_rest(_self: Holders, _checkpoint_id: Any) -> set[str]:
        return set()

    return [(storing, "session_pin", lambda *_: None), (Holders, "sessions", none_rest)]

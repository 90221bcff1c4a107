"""Sessions brought to where an example begins, by the production's own decisions; and reports of their machines."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Self

import msgspec
import pytest

from tests.support.histories import ACME, NOON
from torpor_contracts.errors import Rejected
from torpor_contracts.ids import CheckpointId, ExecId, HostId, SessionId, TenantId, VmId
from torpor_contracts.session import (
    CreateSession,
    ExecSession,
    ExecSpec,
    SessionRequested,
    SessionSuspended,
    SuspendSession,
)
from torpor_contracts.session_branches import CheckpointSession, ForkSession, Lineage, SessionCheckpointed
from torpor_contracts.session_reports import (
    ContinuedExec,
    FireSessionTimer,
    ReportExecEnded,
    ReportExecStarted,
    ReportHostDraining,
    ReportHostLost,
    ReportVmCheckpointed,
    ReportVmCheckpointFailed,
    ReportVmStarted,
    ReportVmStartFailed,
    ReportVmStopped,
    ReportVmSuspended,
    ReportVmSuspendFailed,
)
from torpor_scheduler.domain.folding import evolve
from torpor_scheduler.domain.placement import HostOffer
from torpor_scheduler.domain.session import INITIAL, Machine, Session
from torpor_scheduler.domain.session_decisions import (
    Addressee,
    CheckpointFacts,
    CheckpointNeeded,
    Context,
    Decided,
    LookedUp,
    Rules,
    Seed,
    SeedsNeeded,
    decide,
)
from torpor_scheduler.domain.timers import timer_of

SESSION = SessionId("s-1")


def offer(host_id: str = "host-a", **changes: Any) -> HostOffer:
    """A host with room for eight machines of the default size, unless said otherwise."""
    whole = HostOffer(
        host_id=HostId(host_id),
        fingerprint="simulated-1",
        lost=False,
        draining=False,
        vcpus_free=8,
        memory_mib_free=2048,
        disk_mib_free=8192,
        vms_free=8,
    )
    return msgspec.structs.replace(whole, **changes)


class Story:
    """A session, the moment, and what happened last. Every step decides and folds as production does."""

    def __init__(self, hosts: Sequence[HostOffer] | None = None, rules: Rules | None = None) -> None:
        self.session: Session = INITIAL
        self.hosts = (offer(),) if hosts is None else tuple(hosts)
        self.rules = rules or Rules()
        self.now: datetime = NOON
        self.last: list[Any] = []
        self.all: list[Any] = []
        self.made: Mapping[SessionId, list[Any]] = {}
        self.checkpoints: dict[CheckpointId, LookedUp] = {}
        self.seeds: dict[SessionId, Seed] = {}
        self._made = 0

    def passes(self, seconds: float) -> Self:
        """Time passes."""
        self.now += timedelta(seconds=seconds)
        return self

    def when(self, command: Any, *, tenant: TenantId = ACME, exec_known: bool | None = False) -> Self:
        """A command comes; a refusal is raised. What the decision asks for is looked up for it."""
        self._made += 1
        context = Context(
            now=self.now,
            vm_id=VmId(f"vm-{self._made}"),
            checkpoint_id=CheckpointId(f"ckp-{self._made}"),
            offers=self.hosts,
            exec_known=exec_known,
            rules=self.rules,
        )
        decided = self._decided(command, Addressee(session_id=SESSION, tenant_id=tenant), context)
        self.last, self.made = decided.events, decided.made
        for event in self.last:
            self.happens(event)
        return self

    def happens(self, event: Any) -> Self:
        """An event of the session happened, whoever decided it."""
        self.session = evolve(self.session, event)
        self.all.append(event)
        match event:
            case SessionSuspended() | SessionCheckpointed():
                self.keeps(event.checkpoint_id, event.incarnation, event.fingerprint)
            case SessionRequested() if event.lineage is not None:
                self.keeps(event.lineage.checkpoint_id, 0, event.lineage.fingerprint)
            case _:
                pass
        return self

    def keeps(self, checkpoint_id: str, incarnation: int = 1, fingerprint: str = "simulated-1", **changes: Any) -> Self:
        """The log has a checkpoint of the session's tree."""
        facts = CheckpointFacts(
            checkpoint_id=CheckpointId(checkpoint_id),
            incarnation=incarnation,
            fingerprint=fingerprint,
            log_position=40 + len(self.checkpoints),
            recorded_at=self.now,
            kept=True,
        )
        found = LookedUp(version=1, facts=msgspec.structs.replace(facts, **changes))
        self.checkpoints.setdefault(facts.checkpoint_id, found)
        return self

    def _decided(self, command: Any, addressee: Addressee, context: Context) -> Decided:
        """Decide as the handler does: what a decision needs is looked up, and it is decided again."""
        for _ in range(6):
            try:
                return decide(self.session, command, addressee, context)
            except CheckpointNeeded as needed:
                found = self.checkpoints.get(needed.checkpoint_id, LookedUp(version=0, facts=None))
                known = {**context.checkpoints, needed.checkpoint_id: found}
                context = msgspec.structs.replace(context, checkpoints=known)
            except SeedsNeeded as needed:
                seeds = {
                    made: self.seeds.get(made, Seed(session=INITIAL, vm_id=VmId(f"vm-of-{made}")))
                    for made in needed.session_ids
                }
                context = msgspec.structs.replace(context, seeds=seeds)
        raise AssertionError("the decision is never satisfied")

    def then(self, *kinds: type) -> Self:
        """Exactly these events happened in the last step."""
        assert [type(event) for event in self.last] == list(kinds)
        return self

    def nothing_happens(self, command: Any, *, tenant: TenantId = ACME) -> Self:
        """The command is ignored."""
        return self.when(command, tenant=tenant).then()

    def refused(self, command: Any, code: str, *, tenant: TenantId = ACME, exec_known: bool | None = False) -> Rejected:
        """The command is refused with this code, and with advice."""
        with pytest.raises(Rejected) as caught:
            self.when(command, tenant=tenant, exec_known=exec_known)
        assert caught.value.code == code
        assert caught.value.advice
        return caught.value

    @property
    def machine(self) -> Machine:
        """The session's machine; it must have one."""
        assert self.session.machine is not None
        return self.session.machine

    # --- reports of the present machine, or of the one given ---------------------------------------------------

    def started(self, machine: Machine | None = None, *execs: str) -> ReportVmStarted:
        one = machine or self.machine
        came = [ContinuedExec(exec_id=ExecId(exec_id), remaining_s=60.0) for exec_id in execs]
        return ReportVmStarted(
            vm_id=one.vm_id, incarnation=one.incarnation, observed_at=self.now, position=1, execs=came
        )

    def start_failed(
        self, machine: Machine | None = None, *, code: str = "agent-silent", retryable: bool = True
    ) -> ReportVmStartFailed:
        one = machine or self.machine
        return ReportVmStartFailed(
            vm_id=one.vm_id,
            incarnation=one.incarnation,
            code=code,
            detail="the guest agent did not answer",
            retryable=retryable,
            position=1,
        )

    def suspended(
        self, machine: Machine | None = None, *, checkpoint_id: str | None = None, fingerprint: str = ""
    ) -> ReportVmSuspended:
        one = machine or self.machine
        suspending = self.session.suspending
        wanted = suspending.checkpoint_id if suspending else CheckpointId("ckp-unasked")
        return ReportVmSuspended(
            vm_id=one.vm_id,
            incarnation=one.incarnation,
            checkpoint_id=CheckpointId(checkpoint_id or wanted),
            fingerprint=fingerprint,
            observed_at=self.now,
            position=1,
        )

    def checkpointed(
        self, machine: Machine | None = None, *, checkpoint_id: str | None = None, **changes: Any
    ) -> ReportVmCheckpointed:
        one, pending = machine or self.machine, self.session.checkpointing
        wanted = pending.checkpoint_id if pending else CheckpointId("ckp-unasked")
        report = ReportVmCheckpointed(
            vm_id=one.vm_id,
            incarnation=one.incarnation,
            checkpoint_id=CheckpointId(checkpoint_id or wanted),
            fingerprint="",
            pause_ms=12.5,
            log_position=7,
            taken_at=self.now,
            observed_at=self.now,
            position=1,
        )
        return msgspec.structs.replace(report, **changes)

    def checkpoint_failed(
        self, machine: Machine | None = None, *, checkpoint_id: str | None = None, retryable: bool = False
    ) -> ReportVmCheckpointFailed:
        one, pending = machine or self.machine, self.session.checkpointing
        wanted = pending.checkpoint_id if pending else CheckpointId("ckp-unasked")
        return ReportVmCheckpointFailed(
            vm_id=one.vm_id,
            incarnation=one.incarnation,
            checkpoint_id=CheckpointId(checkpoint_id or wanted),
            code="no-space",
            detail="the store has no room",
            retryable=retryable,
            position=1,
        )

    def suspend_failed(self, *, checkpoint_id: str | None = None, code: str = "disk-full") -> ReportVmSuspendFailed:
        suspending = self.session.suspending
        wanted = suspending.checkpoint_id if suspending else CheckpointId("ckp-unasked")
        return ReportVmSuspendFailed(
            vm_id=self.machine.vm_id,
            incarnation=self.machine.incarnation,
            checkpoint_id=CheckpointId(checkpoint_id or wanted),
            code=code,
            detail="the store has no room",
            position=1,
        )

    def stopped(self, machine: Machine | None = None, *, expected: bool = False) -> ReportVmStopped:
        one = machine or self.machine
        return ReportVmStopped(
            vm_id=one.vm_id,
            incarnation=one.incarnation,
            expected=expected,
            cause="the guest's kernel panicked",
            observed_at=self.now,
            position=1,
        )

    def exec_started(self, exec_id: str, machine: Machine | None = None) -> ReportExecStarted:
        one = machine or self.machine
        return ReportExecStarted(
            vm_id=one.vm_id,
            incarnation=one.incarnation,
            exec_id=ExecId(exec_id),
            observed_at=self.now,
            position=1,
        )

    def exec_ended(
        self, exec_id: str, machine: Machine | None = None, *, failed: bool = False, exit_code: int = 0
    ) -> ReportExecEnded:
        one = machine or self.machine
        return ReportExecEnded(
            vm_id=one.vm_id,
            incarnation=one.incarnation,
            exec_id=ExecId(exec_id),
            outcome="failed" if failed else "exited",
            exit_code=None if failed else exit_code,
            detail="",
            output_bytes=12,
            observed_at=self.now,
            position=1,
        )

    def host_lost(self, machine: Machine | None = None) -> ReportHostLost:
        one = machine or self.machine
        return ReportHostLost(host_id=one.host_id, incarnation=one.incarnation, last_seen_at=self.now, position=1)

    def host_draining(self) -> ReportHostDraining:
        return ReportHostDraining(host_id=self.machine.host_id, incarnation=self.machine.incarnation, position=1)

    def timer(self) -> FireSessionTimer:
        """The session's timer as it is now."""
        timer = timer_of(self.session)
        assert timer is not None
        return FireSessionTimer(kind=timer.kind, incarnation=self.session.incarnation, generation=timer.generation)

    def timer_comes(self) -> Self:
        """Time passes until the session's timer is due, and it fires."""
        timer = timer_of(self.session)
        assert timer is not None
        self.now = max(self.now, timer.due_at)
        return self.when(self.timer())


def program(exec_id: str = "e-1", *argv: str, timeout_s: float = 3600.0, incarnation: int | None = None) -> ExecSession:
    """A request to run a program."""
    return ExecSession(
        exec_id=ExecId(exec_id),
        program=ExecSpec(argv=list(argv) or ["echo", "hello"], timeout_s=timeout_s),
        incarnation=incarnation,
    )


def starting(create: CreateSession | None = None, **kwargs: Any) -> Story:
    """A session whose first machine was asked for."""
    return Story(**kwargs).when(create or CreateSession())


def placing(create: CreateSession | None = None) -> Story:
    """A session for which there is no host."""
    return Story(hosts=()).when(create or CreateSession())


def running(create: CreateSession | None = None, **kwargs: Any) -> Story:
    """A session whose first machine was seen running, one second after it was asked for."""
    story = starting(create, **kwargs).passes(1)
    return story.when(story.started())


def suspending(create: CreateSession | None = None) -> Story:
    """A session that its client is suspending."""
    return running(create).passes(1).when(SuspendSession())


def suspended(create: CreateSession | None = None) -> Story:
    """A session that sleeps."""
    story = suspending(create).passes(1)
    return story.when(story.suspended())


def checkpointing(create: CreateSession | None = None, label: str = "") -> Story:
    """A session of which a checkpoint is being taken while it runs."""
    return running(create).passes(1).when(CheckpointSession(label=label))


def checkpointed(create: CreateSession | None = None) -> Story:
    """A session that runs, and has a checkpoint."""
    story = checkpointing(create).passes(1)
    return story.when(story.checkpointed())


def forking(*session_ids: str) -> Story:
    """A running session that waits for the checkpoint in which others are to begin."""
    wanted = [SessionId(session_id) for session_id in session_ids or ("s-2", "s-3")]
    return running().passes(1).when(ForkSession(session_ids=wanted))


def forked(hosts: Sequence[HostOffer] | None = None) -> Story:
    """A session that was made by a fork of `s-0`, and has asked for its first machine if there is a host."""
    lineage = Lineage(
        session_id=SessionId("s-0"),
        checkpoint_id=CheckpointId("ckp-0"),
        fingerprint="simulated-1",
        made_on=HostId("host-a"),
        log_position=7,
    )
    story = Story(hosts=hosts)
    source = running()
    source.hosts, story.now = story.hosts, source.now
    source.keeps(lineage.checkpoint_id, log_position=lineage.log_position)
    source.when(ForkSession(session_ids=[SessionId("s-2")], checkpoint_id=lineage.checkpoint_id))
    for event in source.made[SessionId("s-2")]:
        given = {"session_id": SESSION} | ({"lineage": lineage} if isinstance(event, SessionRequested) else {})
        has = {name: value for name, value in given.items() if hasattr(event, name)}
        story.happens(msgspec.structs.replace(event, **has))
    return story


def lost(create: CreateSession | None = None) -> Story:
    """A session whose machine went away without ever having been checkpointed."""
    story = running(create).passes(5)
    return story.when(story.stopped())


def failed(create: CreateSession | None = None) -> Story:
    """A session that could not be started at all."""
    story = starting(create)
    return story.when(story.start_failed(retryable=False, code="image-unknown"))

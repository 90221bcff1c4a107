"""Any commands and reports, in any order, late and repeated: no invariant breaks, and nobody waits for ever."""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.sessions import Story, forked, offer, program, running
from torpor_contracts.errors import InvariantViolation, Rejected
from torpor_contracts.ids import CheckpointId, ExecId, SessionId
from torpor_contracts.scheduling import SessionState
from torpor_contracts.session import (
    CreateSession,
    ExecEnded,
    ExecRequested,
    ResumeSession,
    RetryRule,
    SessionLost,
    SessionStarted,
    SessionTerminated,
    SuspendSession,
    TerminateSession,
    VmStartRequested,
)
from torpor_contracts.session_branches import CheckpointSession, ExecContinued, ForkSession, RollbackSession
from torpor_contracts.vm import IN_USE
from torpor_scheduler.diagram import diagram
from torpor_scheduler.domain.folding import evolve
from torpor_scheduler.domain.session import INITIAL, TRANSITIONS, Machine, Phase
from torpor_scheduler.domain.timers import timer_of

HOSTS = (
    (),
    (offer("host-a"),),
    (offer("host-a", lost=True), offer("host-b")),
    (offer("host-a", draining=True),),
    (offer("host-c", fingerprint="qemu-9"),),
)
RESTING = (Phase.RUNNING, Phase.SUSPENDED, Phase.LOST, Phase.TERMINATED, Phase.FAILED)


class Life:
    """A story whose every step is one of the things that can come to a session; machines of the past report too."""

    def __init__(self, story: Story | None = None) -> None:
        self.story = story or Story(hosts=HOSTS[1])
        self.machines: list[Machine] = []
        self.reached: set[tuple[Phase, type]] = set()
        self._programs = 0
        self._forks = 0

    def do(self, command: Any) -> None:
        """One step; refusals are answers."""
        story, before = self.story, self.story.session
        try:
            story.when(command)
        except Rejected as refusal:
            if not (refusal.code and refusal.advice):
                raise
            return
        for event in story.last:
            self.reached.add((before.phase, type(event)))
            before = evolve(before, event)
            if before.machine is not None and before.machine not in self.machines:
                self.machines.append(before.machine)

    def new_program(self) -> Any:
        self._programs += 1
        return program(f"e-{self._programs}", timeout_s=5.0)

    def branches(self) -> list[Callable[[], Any]]:
        """What a client could ask that makes the session branch."""
        known = list(self.story.checkpoints) or [CheckpointId("ckp-none")]
        self._forks += 2
        wanted = [SessionId(f"s-{100 + self._forks}"), SessionId(f"s-{101 + self._forks}")]
        return [
            CheckpointSession,
            lambda: ForkSession(session_ids=wanted),
            lambda: ForkSession(session_ids=wanted, checkpoint_id=known[0]),
            lambda: RollbackSession(checkpoint_id=known[0]),
            lambda: RollbackSession(checkpoint_id=known[-1]),
        ]

    def reports(self, machine: Machine) -> list[Callable[[], Any]]:
        """Everything a host could say of a machine."""
        story = self.story
        execs = [one.exec_id for one in story.session.execs] or [*story.session.recent_execs[-1:], ExecId("e-0")]
        return [
            lambda: story.started(machine),
            lambda: story.started(machine, *story.session.recent_execs[-2:], *execs[:1]),
            lambda: story.checkpointed(machine),
            lambda: story.checkpoint_failed(machine),
            lambda: story.checkpoint_failed(machine, retryable=True),
            lambda: story.start_failed(machine),
            lambda: story.start_failed(machine, retryable=False),
            lambda: story.suspended(machine),
            lambda: story.stopped(machine),
            lambda: story.host_lost(machine),
            lambda: story.exec_started(execs[0], machine),
            lambda: story.exec_ended(execs[-1], machine),
            lambda: story.exec_ended(execs[0], machine, failed=True),
        ]

    def present_reports(self) -> list[Callable[[], Any]]:
        """What only the host of the present machine could say."""
        if self.story.session.machine is None:
            return []
        in_use: Callable[[], Any] = lambda: self.story.suspend_failed(code=IN_USE)  # noqa: E731  (typed here)
        return [self.story.suspend_failed, in_use, self.story.host_draining]

    def check(self) -> None:
        """What holds after every step, whatever came before."""
        story = self.story
        given = [event.incarnation for event in story.all if isinstance(event, VmStartRequested)]
        assert given == sorted(set(given)), "an incarnation was given twice"
        begun = Counter(event.exec_id for event in story.all if isinstance(event, ExecRequested | ExecContinued))
        begun.subtract(event.exec_id for event in story.all if isinstance(event, ExecEnded))
        assert all(count in (0, 1) for count in begun.values()), "a program ended twice, or goes on twice"
        in_flight = {exec_id for exec_id, count in begun.items() if count}
        assert in_flight == {one.exec_id for one in story.session.execs}, "a program was forgotten"
        waits = story.session.checkpointing is not None or story.session.fork is not None
        assert not waits or story.session.phase is Phase.RUNNING, "a checkpoint is waited for of no machine"
        if waits or story.session.phase not in (*RESTING, Phase.ABSENT):
            assert timer_of(story.session) is not None, "somebody waits without an end"
        refolded = INITIAL
        for event in story.all:
            refolded = evolve(refolded, event)
        assert refolded == story.session
        assert msgspec.json.decode(msgspec.json.encode(refolded), type=type(refolded)) == refolded

    def settle(self) -> None:
        """With nobody left to report, timers alone must bring the session to rest, and every program to an end."""
        for _ in range(200):
            if timer_of(self.story.session) is None:
                break
            timer = timer_of(self.story.session)
            assert timer is not None
            self.story.now = max(self.story.now, timer.due_at)
            self.do(self.story.timer())
            assert self.story.last, "a timer that was due did nothing"
            self.check()
        assert self.story.session.phase in RESTING
        if self.story.session.phase is not Phase.SUSPENDED:
            assert not self.story.session.execs


CREATE = CreateSession(
    idle_after_s=20.0, start_retry=RetryRule(attempts_max=2, backoff_s=1.0, backoff_s_max=4.0, deadline_s=60.0)
)


class AnyLife(RuleBasedStateMachine):
    """Hypothesis looks for the order of things that breaks an invariant."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Life()

    @initialize(hosts=st.sampled_from(HOSTS))
    def create(self, hosts: Any) -> None:
        self.life.story.hosts = hosts
        self.life.do(CREATE)

    @rule(hosts=st.sampled_from(HOSTS))
    def hosts_change(self, hosts: Any) -> None:
        self.life.story.hosts = hosts

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.life.story.now += timedelta(seconds=seconds)

    @rule()
    def exec(self) -> None:
        self.life.do(self.life.new_program())

    @rule(data=st.data())
    def branch(self, data: st.DataObject) -> None:
        self.life.do(data.draw(st.sampled_from(self.life.branches()))())

    @rule(command=st.sampled_from([SuspendSession(), ResumeSession(), SuspendSession(incarnation=2), CREATE]))
    def client(self, command: Any) -> None:
        self.life.do(command)

    @precondition(lambda self: len(self.life.story.all) > 12)
    @rule()
    def terminate(self) -> None:
        self.life.do(TerminateSession())

    @precondition(lambda self: self.life.machines)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        machine = data.draw(st.sampled_from([self.life.machines[-1], *self.life.machines]))
        self.life.do(data.draw(st.sampled_from(self.life.reports(machine)))())

    @precondition(lambda self: self.life.story.session.machine is not None)
    @rule(data=st.data())
    def present_report(self, data: st.DataObject) -> None:
        self.life.do(data.draw(st.sampled_from(self.life.present_reports()))())

    @precondition(lambda self: timer_of(self.life.story.session) is not None)
    @rule()
    def timer(self) -> None:
        due = timer_of(self.life.story.session)
        assert due is not None
        self.life.story.now = max(self.life.story.now, due.due_at)
        self.life.do(self.life.story.timer())

    @invariant()
    def holds(self) -> None:
        self.life.check()

    def teardown(self) -> None:
        self.life.settle()


AnyLife.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestAnyLife = AnyLife.TestCase


def wander(seed: int, steps: int) -> set[tuple[Phase, type]]:
    """A random life, told by its seed; the transitions it went through."""
    chance = Random(seed)
    hosts = HOSTS[chance.randrange(2)]
    life = Life(forked(hosts) if seed % 4 == 0 else Story(hosts=hosts))
    if life.story.session.phase is Phase.ABSENT:
        life.do(CREATE)
    elif life.story.session.machine is not None:
        life.machines.append(life.story.machine)
    for _ in range(steps):
        if chance.random() < 0.1:
            life.story.hosts = chance.choice(HOSTS)
        life.story.now += timedelta(seconds=chance.choice((0.0, 0.1, 1.0, 30.0)))
        possible: list[Callable[[], Any]] = [life.new_program, SuspendSession, ResumeSession, *life.branches()]
        if chance.random() < 0.1:
            possible.append(TerminateSession)
        for machine in life.machines[-2:]:
            possible += chance.choices(life.reports(machine), k=6)
        possible += life.present_reports()
        if timer_of(life.story.session) is not None:
            possible += [life.story.timer, life.story.timer]
        life.do(chance.choice(possible)())
    life.check()
    return life.reached


def test_every_transition_of_the_table_is_reached() -> None:
    table = {(phase, event) for phase, after in TRANSITIONS.items() for event in after}
    reached: set[tuple[Phase, type]] = set()
    for seed in range(4000):
        reached |= wander(seed, 30)
        if reached == table:
            break
    assert {(phase.value, event.__name__) for phase, event in table - reached} == set()


@pytest.mark.parametrize("event", [SessionStarted, SessionTerminated, SessionLost])
def test_what_the_table_does_not_allow_breaks_the_invariant(event: type) -> None:
    happened: Any = next((one for one in _examples() if isinstance(one, event)), None)
    assert happened is not None
    with pytest.raises(InvariantViolation, match="cannot happen in phase absent"):
        evolve(INITIAL, happened)


def test_an_incarnation_given_twice_breaks_the_invariant() -> None:
    story = running()
    again = next(event for event in story.all if isinstance(event, VmStartRequested))
    waking = story.when(SuspendSession()).when(story.suspended()).when(ResumeSession())
    waking.when(waking.start_failed())
    with pytest.raises(InvariantViolation, match="would be given twice"):
        evolve(waking.session, again)


def test_the_published_names_of_phases_are_those_of_the_table() -> None:
    assert {str(phase) for phase in Phase} - {"absent"} == set(SessionState.__args__)  # type: ignore[attr-defined]


def test_the_diagram_shows_every_transition_of_the_table() -> None:
    drawn = diagram()
    for phase, after in TRANSITIONS.items():
        for event, target in after.items():
            tag = str(event.__struct_config__.tag).partition(".")[0]
            arrow = next(line for line in drawn.splitlines() if line.startswith(f"    {phase} --> {target}:"))
            assert tag in arrow.partition(": ")[2].split(", ")


def _examples() -> list[Any]:
    story = running()
    story.when(story.stopped()).when(ResumeSession()).when(story.started())
    story.when(TerminateSession()).when(story.stopped(expected=True))
    return story.all

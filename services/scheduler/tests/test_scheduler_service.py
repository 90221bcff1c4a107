"""The scheduler as a whole, with hosts that do what they are asked: sessions live, sleep, wake and end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tests.support.histories import ACME
from tests.support.scheduler_world import CAPACITY, SchedulerWorld
from tests.support.sessions import program
from torpor_contracts.errors import Poison, Rejected
from torpor_contracts.host import RegisterHost
from torpor_contracts.ids import SYSTEM_TENANT, TenantId
from torpor_contracts.session import (
    CreateSession,
    MachineSpec,
    ResumeSession,
    RetryRule,
    SuspendSession,
    TerminateSession,
)
from torpor_contracts.vm import ExecVm, StartVm, StopVm, SuspendVm
from torpor_eventlog.codec import decode_event
from torpor_scheduler.domain.folding import RECENT_EXECS_MAX

QUICK = CreateSession(idle_after_s=20.0)


def world(check: Callable[[SchedulerWorld], Awaitable[None]], **settings: Any) -> None:
    """Run a check in a world with one host."""

    async def main() -> None:
        one = SchedulerWorld(**settings)
        await one.host()
        await check(one)

    asyncio.run(main())


def test_a_session_is_created_runs_sleeps_wakes_and_ends() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        assert (await one.show()).state == "running"
        await one.command("s-1", program("e-1"))
        await one.settle()
        done = await one.ask("exec", "s-1", exec_id="e-1")
        assert (done.state, done.outcome, done.exit_code, done.output_bytes) == ("ended", "exited", 0, 6)
        await one.command("s-1", SuspendSession())
        await one.settle()
        asleep = await one.show()
        assert (asleep.state, asleep.observed, asleep.vm_id) == ("suspended", "suspended", None)
        await one.command("s-1", ResumeSession())
        await one.settle()
        awake = await one.show()
        assert (awake.state, awake.incarnation, awake.checkpoint_id) == ("running", 2, asleep.checkpoint_id)
        await one.command("s-1", TerminateSession(reason="done"))
        await one.settle()
        gone = await one.show()
        assert (gone.state, gone.desired, gone.observed) == ("terminated", "terminated", "gone")
        assert [type(command) for command in one.hosts["host-a"].asked] == [
            StartVm,
            ExecVm,
            SuspendVm,
            StartVm,
            StopVm,
        ]
        assert not one.hosts["host-a"].machines
        assert not one.refusals

    world(check)


def test_work_wakes_what_idleness_put_to_sleep() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create(create=QUICK)
        await one.passes(21)
        assert (await one.show()).state == "suspended"
        await one.command("s-1", program("e-1"))
        await one.settle()
        assert (await one.ask("exec", "s-1", exec_id="e-1")).outcome == "exited"
        assert (await one.show()).incarnation == 2

    world(check)


def test_every_program_puts_the_timer_off() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create(create=QUICK)
        for number in range(3):
            await one.passes(15)
            await one.command("s-1", program(f"e-{number}"))
            await one.settle()
        ((due_at, _),) = one.outside.timers.due.values()
        assert (due_at - one.outside.clock.now()).total_seconds() == 20.0
        assert (await one.show()).suspends_at == due_at
        await one.passes(20)
        assert (await one.show()).state == "suspended"

    world(check)


def test_idleness_is_found_by_the_sweeper_when_the_bus_lost_the_timer() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create(create=QUICK)
        one.outside.timers.due.clear()
        await one.passes(24)
        assert (await one.show()).state == "suspended"

    world(check)


def test_a_timer_that_comes_twice_and_late_changes_nothing() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create(create=QUICK)
        ((_, _, kind, target), (_, data)) = next(iter(one.outside.timers.due.items()))
        one.outside.clock.pass_by(30)
        for _ in range(2):
            await one.service.timers[0].handle(ACME, kind, target, data)
            await one.settle()
        before = await one.events()
        await one.command("s-1", ResumeSession())
        await one.settle()
        await one.service.timers[0].handle(ACME, kind, target, data)
        await one.settle()
        assert before.count("suspend-requested") == 1
        assert (await one.show()).state == "running"

    world(check)


def test_a_timer_that_is_not_ours_is_buried() -> None:
    async def check(one: SchedulerWorld) -> None:
        with pytest.raises(Poison):
            await one.service.timers[0].handle(ACME, "lunch", "s-1", b"{}")
        with pytest.raises(Poison):
            await one.service.timers[0].handle(ACME, "session", "s-1", b"{]")

    world(check)


def test_the_same_command_id_answers_the_first_receipt() -> None:
    async def check(one: SchedulerWorld) -> None:
        first = await one.command("s-1", CreateSession(), command_id="c-1")
        await one.settle()
        again = await one.command("s-1", CreateSession(), command_id="c-1")
        assert first == again
        with pytest.raises(Rejected, match="command-id-reused"):
            await one.command("s-1", CreateSession(idle_after_s=9.0), command_id="c-1")
        with pytest.raises(Rejected, match="session-exists"):
            await one.command("s-1", CreateSession(), command_id="c-2")

    world(check)


def test_fifty_resumes_at_once_make_one_machine() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        await one.command("s-1", SuspendSession())
        await one.settle()
        answers = await asyncio.gather(
            *(one.command("s-1", ResumeSession()) for _ in range(50)), return_exceptions=True
        )
        await one.settle()
        assert sum(not isinstance(answer, Exception) for answer in answers) == 1
        assert {getattr(answer, "code", "") for answer in answers} == {"", "already-resuming"}
        assert len(one.hosts["host-a"].machines) == 1

    world(check)


def test_a_program_asked_for_before_a_suspend_reaches_the_host_before_it() -> None:
    async def check(one: SchedulerWorld) -> None:
        one.hosts["host-a"].runs = False
        await one.create()
        await one.command("s-1", program("e-1"))
        await one.command("s-1", SuspendSession())
        await one.settle()
        assert [type(command) for command in one.hosts["host-a"].asked] == [StartVm, ExecVm, SuspendVm]
        assert (await one.show()).state == "suspended"

    world(check)


def test_programs_that_waited_are_sent_once_each_when_the_machine_runs() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.command("s-1", CreateSession())
        await one.command("s-1", program("e-1", "echo", "one"))
        await one.command("s-1", program("e-2", "echo", "two"))
        await one.settle()
        sent = [command for command in one.hosts["host-a"].asked if isinstance(command, ExecVm)]
        assert [command.program.argv for command in sent] == [["echo", "one"], ["echo", "two"]]

    world(check)


def test_an_exec_id_is_remembered_for_ever() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        for number in range(RECENT_EXECS_MAX + 3):
            await one.command("s-1", program(f"e-{number}"))
            await one.settle()
        with pytest.raises(Rejected, match="exec-exists"):
            await one.command("s-1", program("e-0"))
        assert await one.command("s-1", program("e-new")) is not None

    world(check)


def test_a_machine_whose_time_was_over_is_stopped_when_it_comes_up_after_all() -> None:
    async def check(one: SchedulerWorld) -> None:
        one.drops = lambda message: isinstance(message.command, StopVm)
        slow = one.hosts["host-a"]
        slow.silent = True
        await one.command("s-1", CreateSession(start_retry=RetryRule(attempts_max=1)))
        await one.settle()
        start = next(row for row in await one.outside.log.read(0, 100) if row.tag == "vm-start-requested.v1")
        asked = msgspec.json.decode(start.data)
        await one.passes(70, beating=False, hearing=False)
        assert (await one.show()).state == "failed"
        one.drops = lambda _: False
        slow.silent = False
        late = StartVm(
            session_id=asked["session_id"],
            incarnation=1,
            machine=MachineSpec(),
            checkpoint_id=None,
            deadline_at=one.outside.clock.now(),
        )
        await one._obey(slow, asked["vm_id"], late, ACME)
        assert slow.machines
        await one.settle()
        assert not slow.machines
        assert (await one.show()).state == "failed"

    world(check)


def test_a_start_that_fails_is_tried_again_and_then_given_up() -> None:
    async def check(one: SchedulerWorld) -> None:
        one.hosts["host-a"].start_fails = True
        await one.create()
        await one.passes(10)
        view = await one.show()
        assert view.state == "failed"
        assert view.problem is not None
        assert view.problem.way_out
        incarnations = [command.incarnation for command in one.hosts["host-a"].asked]
        assert incarnations == [1, 2, 3]

    world(check)


def test_sessions_are_spread_over_hosts_and_no_host_is_overfilled_before_the_view_catches_up() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.host("host-b")
        big = CreateSession(machine=MachineSpec(vcpus=4, memory_mib=1024))
        for number in range(4):
            await one.command(f"s-{number}", big)
        with_five = await one.command("s-5", big)
        assert with_five is not None
        await one.settle()
        hosts = [(await one.show(f"s-{number}")).host_id for number in range(4)]
        assert sorted(str(host) for host in hosts) == ["host-a", "host-a", "host-b", "host-b"]
        assert (await one.show("s-5")).state == "placing"
        await one.command("s-0", TerminateSession())
        await one.passes(5)
        assert (await one.show("s-5")).state == "running"

    world(check)


@pytest.mark.parametrize("target", ["host-a", "vm-1", "ckp-1", "UPPER"])
def test_a_session_cannot_take_the_name_of_something_else(target: str) -> None:
    async def check(one: SchedulerWorld) -> None:
        with pytest.raises(Rejected, match="illegal-session-id"):
            await one.command(target, CreateSession())
        with pytest.raises(Rejected, match=r"id-taken|session-not-found"):
            await one.command(target, SuspendSession())

    world(check)


def test_a_report_about_something_that_is_no_session_is_refused_and_harmless() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        machine = next(iter(one.hosts["host-a"].machines))
        with pytest.raises(Rejected, match="id-taken"):
            await one.command(machine, SuspendSession())
        assert (await one.show()).state == "running"

    world(check)


@pytest.mark.parametrize(
    ("tenant", "target", "code"), [(ACME, "host-b", "operators-only"), (SYSTEM_TENANT, "b", "illegal-host-id")]
)
def test_hosts_are_the_operators(tenant: TenantId, target: str, code: str) -> None:
    async def check(one: SchedulerWorld) -> None:
        command = RegisterHost(boot_id="boot-1", driver="simulated", fingerprint="x", capacity=CAPACITY)
        with pytest.raises(Rejected, match=code):
            await one.command(target, command, tenant=tenant)

    world(check)


def test_a_reaction_that_happens_again_sends_the_same_command() -> None:
    async def check(one: SchedulerWorld) -> None:
        receipt = await one.command("s-1", CreateSession())
        assert receipt is not None
        for recorded in 2 * await one.outside.log.read(one.reacted, 10):
            await one.service.reactors[0].react(decode_event(recorded), recorded)
        first, again = one.outside.bus.sent
        assert first == again
        assert first.command_id == f"scheduler-{receipt.position}"
        assert first.correlation_id == "goal"

    world(check)


def test_a_reaction_that_comes_late_does_not_ask_for_something_else_under_its_id() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.command("s-1", CreateSession())
        await one.command("s-1", TerminateSession())
        for recorded in await one.outside.log.read(one.reacted, 10):
            await one.service.reactors[0].react(decode_event(recorded), recorded)
        assert [type(sent.command) for sent in one.outside.bus.sent] == [StopVm]
        assert await one.events() == [
            "session-requested",
            "vm-start-requested",
            "terminate-requested",
        ]

    world(check)

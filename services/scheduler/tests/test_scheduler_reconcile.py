"""Expected and observed are brought together again: messages that got lost, machines that went or that stayed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tests.support.scheduler_world import FakeHost, SchedulerWorld
from tests.support.sessions import program
from torpor_contracts.ids import VmId
from torpor_contracts.session import CreateSession, ResumeSession, SuspendSession, TerminateSession
from torpor_contracts.session_reports import (
    ReportExecEnded,
    ReportExecStarted,
    ReportVmStarted,
    ReportVmSuspended,
)
from torpor_contracts.vm import ExecVm, StartVm, StopVm, SuspendVm, VmStopped
from torpor_messaging.ports import OutgoingCommand
from torpor_scheduler.spacing import Spacing
from torpor_scheduler.strays import STOPS_MAX


def world(check: Callable[[SchedulerWorld], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        one = SchedulerWorld(**settings)
        await one.host()
        await check(one)

    asyncio.run(main())


class LosesAll:
    """A bus that loses every message of a kind, and keeps them for a test to look at."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self.lost: list[OutgoingCommand] = []

    def __call__(self, message: OutgoingCommand) -> bool:
        if isinstance(message.command, self._kind):
            self.lost.append(message)
            return True
        return False


def loses_first(*kinds: type) -> Callable[[OutgoingCommand], bool]:
    """A bus that loses the first message of each of these kinds, as when its streams are wiped."""
    left = set(kinds)

    def drop(message: OutgoingCommand) -> bool:
        if type(message.command) in left:
            left.remove(type(message.command))
            return True
        return False

    return drop


async def asleep(one: SchedulerWorld) -> None:
    await one.command("s-1", SuspendSession())
    await one.settle()


@pytest.mark.parametrize("lost", [StartVm, ReportVmStarted])
def test_a_start_goes_on_when_its_command_or_its_report_got_lost(lost: type) -> None:
    async def check(one: SchedulerWorld) -> None:
        one.drops = loses_first(lost)
        await one.create()
        assert (await one.show()).state == "starting"
        await one.passes(15)
        view = await one.show()
        assert (view.state, view.incarnation) == ("running", 1)
        assert len(one.hosts["host-a"].machines) == 1

    world(check)


@pytest.mark.parametrize("lost", [SuspendVm, ReportVmSuspended])
def test_a_suspend_goes_on_when_its_command_or_its_report_got_lost(lost: type) -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        one.drops = loses_first(lost)
        await asleep(one)
        assert (await one.show()).state == "suspending"
        await one.passes(20)
        view = await one.show()
        assert (view.state, view.problem) == ("suspended", None)

    world(check)


def test_a_stop_goes_on_when_its_command_got_lost() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        one.drops = loses_first(StopVm)
        await one.command("s-1", TerminateSession())
        await one.passes(10)
        assert (await one.show()).state == "terminated"
        assert not one.hosts["host-a"].machines

    world(check)


@pytest.mark.parametrize("lost", [ExecVm, ReportExecStarted, ReportExecEnded])
def test_a_program_goes_on_when_its_command_or_its_reports_got_lost(lost: type) -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        one.drops = loses_first(lost)
        await one.command("s-1", program("e-1"))
        await one.passes(20)
        done = await one.ask("exec", "s-1", exec_id="e-1")
        assert (done.outcome, done.exit_code) == ("exited", 0)

    world(check)


@pytest.mark.parametrize("end", [SuspendSession(), None])
def test_an_end_of_a_program_that_got_lost_is_told_before_the_end_of_its_machine(end: SuspendSession | None) -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        one.drops = loses_first(ReportExecEnded)
        await one.command("s-1", program("e-1"))
        await one.settle()
        assert (await one.show()).execs
        if end is not None:
            await one.command("s-1", end)
        else:
            host = one.hosts["host-a"]
            vm_id, start = host.machines.popitem()
            stopped = VmStopped(
                vm_id=vm_id,
                host_id=host.host_id,
                session_id=start.session_id,
                incarnation=1,
                expected=False,
                cause="kernel panic",
                observed_at=one.outside.clock.now(),
            )
            await one.happened(vm_id, stopped)
        await one.settle()
        assert not (await one.show()).execs
        assert (await one.ask("exec", "s-1", exec_id="e-1")).outcome == "exited"

    world(check)


def test_repeats_of_a_command_are_spaced_out_and_end_with_the_deadline() -> None:
    async def check(one: SchedulerWorld) -> None:
        one.drops = starts = LosesAll(StartVm)
        await one.command("s-1", CreateSession())
        await one.passes(600)
        assert (await one.show()).state == "failed"
        first = [message.command_id for message in starts.lost if message.command.incarnation == 1]  # type: ignore[attr-defined]
        assert len(first) == len(set(first)) == 1 + 4
        assert len(starts.lost) <= 3 * 5

    world(check)


def test_a_machine_that_is_gone_without_a_word_is_a_loss_that_is_noticed() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        await one.passes(10)
        one.hosts["host-a"].machines.clear()
        await one.passes(15)
        view = await one.show()
        assert view.state == "lost"
        assert view.problem is not None
        assert "does not have it any more" in view.problem.detail

    world(check)


def test_one_inventory_without_the_machine_is_no_proof() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        await one.passes(10)
        host = one.hosts["host-a"]
        machines, host.machines = host.machines, {}
        await one.beat(host)
        await one.service.background[-1].run()
        await one.settle()
        host.machines = machines
        await one.beat(host)
        await one.service.background[-1].run()
        await one.settle()
        assert (await one.show()).state == "running"

    world(check)


def test_that_a_machine_stopped_is_found_in_its_own_stream_when_the_report_got_lost() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        await one.passes(10)
        host = one.hosts["host-a"]
        vm_id, start = host.machines.popitem()
        stopped = VmStopped(
            vm_id=vm_id,
            host_id=host.host_id,
            session_id=start.session_id,
            incarnation=1,
            expected=False,
            cause="kernel panic",
            observed_at=one.outside.clock.now(),
        )
        position = len(await one.outside.log.read(0, 1_000)) + 1
        one.drops = lambda message: message.command_id == f"scheduler-{position}"
        await one.happened(vm_id, stopped)
        await one.settle()
        assert (await one.show()).state == "running"
        await one.passes(15)
        view = await one.show()
        assert view.problem is not None
        assert view.problem.detail == "kernel panic"

    world(check)


def test_a_machine_that_its_session_left_behind_is_stopped() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        host = one.hosts["host-a"]
        (left_behind,) = host.machines.items()
        await asleep(one)
        host.machines[left_behind[0]] = left_behind[1]
        await one.passes(20)
        assert not host.machines
        assert (await one.show()).state == "suspended"

    world(check)


def test_a_machine_that_does_not_stop_is_left_to_the_reaper() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        host = one.hosts["host-a"]
        (left_behind,) = host.machines.items()
        await asleep(one)
        host.machines[left_behind[0]] = left_behind[1]
        one.drops = stops = LosesAll(StopVm)
        await one.passes(3_600, beat_s=5.0)
        asked = [message.command_id for message in stops.lost]
        assert len(asked) == len(set(asked)) == STOPS_MAX

    world(check, host_lost_after_s=60)


def test_a_machine_nobody_knows_is_left_to_the_reaper() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        host: FakeHost = one.hosts["host-a"]
        (known,) = host.machines.values()
        await one.passes(10)
        asked = len(host.asked)
        host.machines[VmId("vm-stray")] = StartVm(
            session_id="s-unknown",  # type: ignore[arg-type]
            incarnation=1,
            machine=known.machine,
            checkpoint_id=None,
            deadline_at=known.deadline_at,
        )
        await one.passes(60)
        assert len(host.asked) == asked

    world(check)


def test_a_machine_just_asked_for_is_not_taken_for_a_stray_by_a_view_that_is_behind() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        await asleep(one)
        host = one.hosts["host-a"]
        await one.command("s-1", ResumeSession())
        rows = await one.outside.log.read(one.reacted, 10)
        assert rows
        # The host starts it at once, while the view still shows the session asleep.
        machine = next(row for row in reversed(rows) if row.tag == "vm-start-requested.v1")
        fields: dict[str, Any] = msgspec.json.decode(machine.data)
        host.machines[VmId(fields["vm_id"])] = StartVm(
            session_id=fields["session_id"],
            incarnation=2,
            machine=CreateSession().machine,
            checkpoint_id=None,
            deadline_at=one.outside.clock.now(),
        )
        for _ in range(3):
            one.outside.clock.pass_by(10)
            await one.beat(host)
            await one.service.background[-1].run()
        stops = [message for message in one.outside.bus.sent if isinstance(message.command, StopVm)]
        assert not stops

    world(check)


def test_spacing_doubles_up_to_its_longest_and_forgets_within_a_bound() -> None:
    spacing = Spacing(5.0, longest_s=40.0)
    due = [age for age in range(200) if spacing.due("a", float(age)) is not None]
    assert due == [5, 10, 20, 40, 80, 120, 160]
    assert spacing.due("a", 199.0) is None
    assert spacing.due("b", 199.0) == 6


def test_a_repeat_found_by_two_schedulers_has_the_same_number() -> None:
    assert Spacing(5.0).due("a", 33.0) == Spacing(5.0).due("a", 39.0) == 2

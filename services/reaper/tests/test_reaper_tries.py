"""How often a host is asked, and what happens at the end; and claims whose machine has ended."""

from tests.support.histories import at, session_over
from tests.support.reaper_world import FIRST, RUNS, World, given, kinds
from torpor_contracts.cleanup import CleanupCarriedOut, CleanupConfirmed, CleanupGivenUp, CleanupProposed
from torpor_contracts.vm import QuarantineVm, ReapVm, StopVm

# --- bounded tries -------------------------------------------------------------------------------------------------


def test_a_host_that_does_not_freeze_the_machine_is_asked_three_times_and_then_no_more() -> None:
    async def check(world: World) -> None:
        for second in range(100, 600, 5):
            await world.beat(second, FIRST.vm_id)
        steps = await world.steps()
        assert kinds(steps) == [CleanupProposed, CleanupProposed, CleanupProposed, CleanupGivenUp]
        assert [step.proposed_at for step in steps if isinstance(step, CleanupProposed)] == [at(105), at(115), at(135)]
        (given_up,) = [step for step in steps if isinstance(step, CleanupGivenUp)]
        assert (given_up.attempts, given_up.given_up_at) == (3, at(175))
        assert "restart" in given_up.way_out
        assert len({command.command_id for command in world.sent}) == 3

    given()(check)


def test_a_host_that_does_not_destroy_the_machine_is_asked_three_times_and_then_no_more() -> None:
    async def check(world: World) -> None:
        await world.beat(100, FIRST.vm_id)
        await world.beat(105, FIRST.vm_id)
        await world.happened(FIRST.quarantined(106))
        for second in range(110, 900, 5):
            await world.beat(second, FIRST.vm_id)
        assert world.commands() == [QuarantineVm, ReapVm, ReapVm, ReapVm]
        assert kinds(await world.steps())[-1] is CleanupGivenUp

    given()(check)


def test_what_was_given_up_begins_anew_with_another_boot_of_the_host() -> None:
    async def check(world: World) -> None:
        for second in range(100, 600, 5):
            await world.beat(second, FIRST.vm_id)
        before = len(await world.steps())
        await world.beat(700, FIRST.vm_id, boot="boot-2")
        await world.beat(706, FIRST.vm_id, boot="boot-2")
        again = (await world.steps())[before:]
        assert kinds(again) == [CleanupProposed]
        assert isinstance(again[0], CleanupProposed)
        assert again[0].attempt == 1

    given()(check)


def test_a_silent_host_has_not_failed() -> None:
    async def check(world: World) -> None:
        await world.beat(100, FIRST.vm_id)
        await world.beat(105, FIRST.vm_id)
        await world.beat(5000, FIRST.vm_id)
        await world.beat(5006, FIRST.vm_id)
        steps = await world.steps()
        assert [step.attempt for step in steps if isinstance(step, CleanupProposed)] == [1, 1]
        assert len(steps) == 2

    given()(check)


# --- claims whose machine has ended --------------------------------------------------------------------------------


def test_claims_left_by_an_ended_machine_are_asked_for_until_they_are_released() -> None:
    async def check(world: World) -> None:
        await world.beat(100)
        assert await world.steps() == []
        await world.beat(106)
        (proposed,) = await world.steps()
        assert isinstance(proposed, CleanupProposed)
        assert (proposed.action, proposed.reason, proposed.evidence_position) == ("release", "unreleased", 4)
        (asked,) = world.sent
        assert isinstance(asked.command, StopVm)
        assert (asked.command.session_id, asked.command.incarnation, asked.target) == ("s-1", 1, "host-a.vm-1")
        await world.happened(FIRST.released(120))
        await world.beat(121)
        assert kinds(await world.steps()) == [CleanupProposed, CleanupCarriedOut]

    given(*RUNS, FIRST.stopped(50), FIRST.released(51, "process"))(check)


def test_claims_that_are_never_released_are_given_up() -> None:
    async def check(world: World) -> None:
        for second in range(100, 600, 5):
            await world.beat(second)
        assert world.commands() == [StopVm, StopVm, StopVm]
        assert kinds(await world.steps())[-1] is CleanupGivenUp

    given(*RUNS, FIRST.stopped(50))(check)


def test_a_machine_that_ended_and_released_all_needs_no_clean_up() -> None:
    async def check(world: World) -> None:
        for second in range(100, 200, 10):
            await world.beat(second)
        assert (await world.steps(), world.sent) == ([], [])

    given(*RUNS, FIRST.suspended(50), FIRST.released(51))(check)


def test_claims_left_by_a_reaped_machine_are_cleaned_up_after_it() -> None:
    async def check(world: World) -> None:
        await world.beat(100, FIRST.vm_id)
        await world.beat(105, FIRST.vm_id)
        await world.happened(FIRST.quarantined(106))
        await world.beat(140, FIRST.vm_id)
        await world.happened(FIRST.reaped(141))
        for second in (142, 148, 155):
            await world.beat(second)
        await world.happened(FIRST.released(156))
        await world.beat(160)
        assert kinds(await world.steps()) == [
            CleanupProposed,
            CleanupConfirmed,
            CleanupCarriedOut,
            CleanupProposed,
            CleanupCarriedOut,
        ]

    given(*RUNS, ("s-1", session_over(60)))(check)

"""Checkpoints, forks and rollbacks through the whole scheduler: streams across, lookups, races, what gets lost."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.support.histories import ACME
from tests.support.scheduler_world import SchedulerWorld
from torpor_contracts.checkpoint import CheckpointFreeStarted
from torpor_contracts.errors import Rejected
from torpor_contracts.ids import CheckpointId, SessionId, TenantId
from torpor_contracts.session import CreateSession, ResumeSession, SuspendSession, TerminateSession
from torpor_contracts.session_branches import (
    CheckpointSession,
    ForkSession,
    RollbackSession,
    SessionCheckpointed,
    SessionForked,
)
from torpor_contracts.session_reports import ReportVmCheckpointed
from torpor_contracts.vm import CheckpointVm, StartVm, StopVm
from torpor_eventlog.codec import decode_event
from torpor_messaging.ports import OutgoingCommand

OTHER = TenantId("other")


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


async def world_with(session_id: str = "s-1") -> SchedulerWorld:
    world = SchedulerWorld()
    await world.host()
    await world.create(session_id)
    return world


async def checkpointed(world: SchedulerWorld, session_id: str = "s-1") -> CheckpointId:
    """Checkpoint a session while it runs."""
    await world.command(session_id, CheckpointSession())
    await world.settle()
    taken: SessionCheckpointed = await found(world, session_id, SessionCheckpointed)
    return taken.checkpoint_id


async def found(world: SchedulerWorld, stream: str, kind: type[Any]) -> Any:
    """The newest event of a kind."""
    events = [decode_event(row) for row in await world.outside.log.load(stream)]
    return [event for event in events if isinstance(event, kind)][-1]


async def refused(work: Coroutine[Any, Any, Any]) -> str:
    with pytest.raises(Rejected) as caught:
        await work
    return caught.value.code


def test_a_checkpoint_is_asked_of_the_host_and_the_session_runs_on() -> None:
    async def scenario() -> None:
        world = await world_with()
        wanted = await checkpointed(world)
        (asked,) = [one for one in world.hosts["host-a"].asked if isinstance(one, CheckpointVm)]
        assert (asked.checkpoint_id, asked.parent_id, asked.incarnation) == (wanted, None, 1)
        view = await world.show()
        assert (view.state, view.checkpoint_id, view.checkpointing_id) == ("running", wanted, None)

    run(scenario())


def test_a_fork_makes_all_sessions_in_one_commit_and_they_start() -> None:
    async def scenario() -> None:
        world = await world_with()
        wanted = [SessionId(f"f-{number}") for number in range(4)]
        receipt = await world.command("s-1", ForkSession(session_ids=wanted))
        await world.settle()
        assert receipt is not None
        assert receipt.stream == "s-1"
        rows = await world.outside.log.read(0, 1000)
        made = [row for row in rows if row.tag == "session-requested.v1" and row.stream != "s-1"]
        forks = [row for row in rows if row.tag == "session-forked.v1"]
        assert len(made) == len(wanted)
        assert len({row.command_id for row in [*made, *forks]}) == 1, "they were not made together"
        forked = await found(world, "s-1", SessionForked)
        for session_id in wanted:
            view = await world.show(session_id)
            assert (view.state, view.incarnation) == ("running", 1)
            assert view.lineage is not None
            assert (view.lineage.session_id, view.lineage.checkpoint_id) == ("s-1", forked.checkpoint_id)
        starts = [one for one in world.hosts["host-a"].asked if isinstance(one, StartVm) and one.checkpoint_id]
        assert {one.checkpoint_id for one in starts} == {forked.checkpoint_id}
        assert (await world.show()).state == "running"

    run(scenario())


def test_a_fork_of_a_number_makes_ids_and_a_repeat_answers_the_same_receipt() -> None:
    async def scenario() -> None:
        world = await world_with()
        first = await world.command("s-1", ForkSession(count=3), command_id="twice")
        again = await world.command("s-1", ForkSession(count=3), command_id="twice")
        await world.settle()
        assert first == again
        forked = await found(world, "s-1", SessionForked)
        assert len(set(forked.session_ids)) == 3
        assert await refused(world.command("s-1", ForkSession(count=101))) == "illegal-fork"

    run(scenario())


def test_a_sleeping_session_is_forked_without_being_woken() -> None:
    async def scenario() -> None:
        world = await world_with()
        await world.command("s-1", SuspendSession())
        await world.settle()
        await world.command("s-1", ForkSession(session_ids=[SessionId("f-1")]))
        await world.settle()
        assert (await world.show()).state == "suspended"
        assert (await world.show("f-1")).state == "running"

    run(scenario())


def test_an_id_that_is_taken_refuses_the_fork_whole() -> None:
    async def scenario() -> None:
        world = await world_with()
        await world.command("s-1", SuspendSession())
        await world.create("f-2")
        wanted = [SessionId("f-1"), SessionId("f-2")]
        assert await refused(world.command("s-1", ForkSession(session_ids=wanted))) == "session-exists"
        assert await world.outside.log.load("f-1") == []

    run(scenario())


def test_an_id_that_is_taken_while_the_checkpoint_is_made_fails_the_fork_whole() -> None:
    async def scenario() -> None:
        world = await world_with()
        wanted = [SessionId("f-1"), SessionId("f-2")]
        await world.command("s-1", ForkSession(session_ids=wanted))
        await world.command("f-2", CreateSession())
        await world.settle()
        assert "fork-failed" in await world.events("s-1")
        assert await world.outside.log.load("f-1") == []

    run(scenario())


def test_a_checkpoint_of_another_tenant_does_not_exist() -> None:
    async def scenario() -> None:
        world = await world_with()
        theirs = await checkpointed(world)
        await world.command("o-1", CreateSession(), tenant=OTHER)
        await world.settle()
        for command in (
            RollbackSession(checkpoint_id=theirs),
            ForkSession(session_ids=[SessionId("o-2")], checkpoint_id=theirs),
        ):
            assert await refused(world.command("o-1", command, tenant=OTHER)) == "checkpoint-not-found"
        chosen = CheckpointSession(checkpoint_id=theirs)
        assert await refused(world.command("o-1", chosen, tenant=OTHER)) == "checkpoint-exists"

    run(scenario())


def test_a_session_uses_checkpoints_of_its_own_tree_and_no_others() -> None:
    async def scenario() -> None:
        world = await world_with()
        first = await checkpointed(world)
        await world.passes(1)
        second = await checkpointed(world)
        await world.command("s-1", ForkSession(session_ids=[SessionId("f-1")], checkpoint_id=second))
        await world.settle()
        await world.passes(1)
        third = await checkpointed(world)
        own = await checkpointed(world, "f-1")
        for checkpoint_id in (second, first, own):
            await world.command("f-1", RollbackSession(checkpoint_id=checkpoint_id))
            await world.settle()
            assert (await world.show("f-1")).state == "running"
        assert (await world.show("f-1")).incarnation == 4
        assert await refused(world.command("f-1", RollbackSession(checkpoint_id=third))) == "checkpoint-not-found"
        assert await refused(world.command("s-1", RollbackSession(checkpoint_id=own))) == "checkpoint-not-found"

    run(scenario())


def test_a_rollback_stops_the_machine_and_starts_the_next_incarnation() -> None:
    async def scenario() -> None:
        world = await world_with()
        back_to = await checkpointed(world)
        await world.command("s-1", RollbackSession(checkpoint_id=back_to))
        await world.settle()
        kinds = [type(one) for one in world.hosts["host-a"].asked]
        assert kinds == [StartVm, CheckpointVm, StopVm, StartVm]
        view = await world.show()
        assert (view.state, view.incarnation, view.checkpoint_id) == ("running", 2, back_to)
        assert len(world.hosts["host-a"].machines) == 1

    run(scenario())


def test_a_checkpoint_that_is_freed_meanwhile_is_not_forked_from() -> None:
    """The decision rests on the checkpoint's stream: it is made again when that has changed."""

    async def scenario() -> None:
        world = await world_with()
        old = await checkpointed(world)
        await world.passes(1)
        await checkpointed(world)
        log = world.outside.log
        plain = log.append

        async def freed_first(commit: Any) -> Any:
            log.append = plain  # type: ignore[method-assign]
            started = CheckpointFreeStarted(checkpoint_id=old, reason="", started_at=world.outside.clock.now())
            await world.happened(old, started)
            return await plain(commit)

        log.append = freed_first  # type: ignore[method-assign]
        command = ForkSession(session_ids=[SessionId("f-1")], checkpoint_id=old)
        assert await refused(world.command("s-1", command)) == "checkpoint-freed"
        assert await log.load("f-1") == []

    run(scenario())


def test_an_order_for_a_checkpoint_that_got_lost_is_sent_again() -> None:
    async def scenario() -> None:
        world = await world_with()
        world.drops = _first(CheckpointVm)
        await world.command("s-1", CheckpointSession())
        await world.settle()
        assert (await world.show()).checkpointing_id is not None
        await world.passes(20)
        assert (await world.show()).checkpoint_id is not None

    run(scenario())


def test_a_report_of_a_checkpoint_that_got_lost_is_found_again() -> None:
    async def scenario() -> None:
        world = await world_with()
        world.drops = _first(ReportVmCheckpointed)
        await world.command("s-1", ForkSession(session_ids=[SessionId("f-1")]))
        await world.settle()
        assert (await world.show()).checkpointing_id is not None
        await world.passes(20)
        assert (await world.show("f-1")).state == "running"

    run(scenario())


def test_an_order_to_stop_for_a_rollback_that_got_lost_is_sent_again() -> None:
    async def scenario() -> None:
        world = await world_with()
        back_to = await checkpointed(world)
        world.drops = _first(StopVm)
        await world.command("s-1", RollbackSession(checkpoint_id=back_to))
        await world.settle()
        assert (await world.show()).state == "rolling-back"
        await world.passes(20)
        assert (await world.show()).state == "running"

    run(scenario())


def test_a_host_that_is_lost_during_a_rollback_does_not_hold_it_up_for_ever() -> None:
    async def scenario() -> None:
        world = await world_with()
        back_to = await checkpointed(world)
        await world.host("host-b")
        world.hosts["host-a"].silent = True
        await world.command("s-1", RollbackSession(checkpoint_id=back_to))
        await world.passes(60)
        view = await world.show()
        assert (view.state, view.host_id, view.incarnation) == ("running", "host-b", 2)

    run(scenario())


def test_a_failed_checkpoint_fails_the_fork_and_leaves_the_session_as_it_was() -> None:
    async def scenario() -> None:
        world = await world_with()
        world.hosts["host-a"].checkpoints = False
        await world.command("s-1", ForkSession(count=2))
        await world.settle()
        assert (await world.events())[-2:] == ["checkpoint-failed", "fork-failed"]
        view = await world.show()
        assert (view.state, view.problem and view.problem.code) == ("running", "no-space")

    run(scenario())


def test_a_fork_whose_source_is_over_lives_on() -> None:
    async def scenario() -> None:
        world = await world_with()
        await world.command("s-1", ForkSession(session_ids=[SessionId("f-1")]))
        await world.settle()
        await world.command("s-1", TerminateSession())
        await world.settle()
        await world.command("f-1", SuspendSession())
        await world.settle()
        await world.command("f-1", ResumeSession())
        await world.settle()
        assert (await world.show("f-1")).state == "running"

    run(scenario())


def test_a_tenant_reaches_no_session_of_another_by_forking() -> None:
    async def scenario() -> None:
        world = await world_with()
        command = ForkSession(session_ids=[SessionId("o-1")])
        assert await refused(world.command("s-1", command, tenant=OTHER)) == "session-not-found"
        await world.command("o-1", CreateSession(), tenant=OTHER)
        await world.settle()
        await world.command("s-1", SuspendSession(), tenant=ACME)
        await world.settle()
        assert await refused(world.command("s-1", command)) == "session-exists"

    run(scenario())


def _first(kind: type[Any]) -> Any:
    """Drops the first command of a kind."""
    dropped: list[OutgoingCommand] = []

    def drops(message: OutgoingCommand) -> bool:
        hit = isinstance(message.command, kind) and not dropped
        if hit:
            dropped.append(message)
        return hit

    return drops

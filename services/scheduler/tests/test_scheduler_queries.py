"""Reads: what a session looks like to its owner and the operator, page by page, and never to anybody else."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.histories import fold_into
from tests.support.scheduler_world import SchedulerWorld
from tests.support.sessions import Story, failed, lost, placing, program, running, starting, suspended, suspending
from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.ids import SYSTEM_TENANT, TenantId
from torpor_contracts.registry import QUERIES
from torpor_contracts.session import CreateSession, ResumeSession, SuspendSession, TerminateSession
from torpor_eventlog.codec import decode_event
from torpor_eventlog.views_memory import MemoryViewStore
from torpor_scheduler.domain.folding import evolve
from torpor_scheduler.domain.session import INITIAL, Session
from torpor_scheduler.projections import SESSIONS, SessionRow, Views
from torpor_scheduler.queries import DESIRED, observed

RIVAL = TenantId("rival")


def world(check: Callable[[SchedulerWorld], Awaitable[None]]) -> None:
    async def main() -> None:
        one = SchedulerWorld()
        await one.host()
        await check(one)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("story", "desired", "seen"),
    [
        (placing, "running", "none"),
        (starting, "running", "none"),
        (running, "running", "running"),
        (suspending, "suspended", "running"),
        (suspended, "suspended", "suspended"),
        (lambda: suspended().when(ResumeSession()), "running", "suspended"),
        (lost, "running", "lost"),
        (lambda: lost().when(ResumeSession()), "running", "lost"),
        (failed, "running", "none"),
        (lambda: running().when(TerminateSession()), "terminated", "running"),
        (lambda: suspended().when(TerminateSession()), "terminated", "gone"),
    ],
)
def test_what_is_wanted_and_what_is_seen_stand_apart(story: Callable[[], Story], desired: str, seen: str) -> None:
    session = story().session
    assert (DESIRED[session.phase], observed(session)) == (desired, seen)


def test_a_session_shows_its_machine_its_programs_and_its_times() -> None:
    async def check(one: SchedulerWorld) -> None:
        one.hosts["host-a"].runs = False
        await one.create(create=CreateSession(idle_after_s=60.0, metadata={"team": "blue"}))
        idle = await one.show()
        assert idle.suspends_at is not None
        assert (idle.suspends_at - idle.requested_at).total_seconds() == 60.0
        await one.command("s-1", program("e-1"))
        await one.settle()
        view = await one.show()
        assert (view.host_id, view.metadata, view.suspends_at) == ("host-a", {"team": "blue"}, None)
        assert [(flight.exec_id, flight.started_at is not None) for flight in view.execs] == [("e-1", True)]
        assert view.position == (await one.outside.log.load("s-1"))[-1].position
        assert view.version == len(await one.outside.log.load("s-1"))

    world(check)


def test_a_session_that_waits_for_a_host_shows_why_and_until_when() -> None:
    async def main() -> None:
        one = SchedulerWorld()
        await one.create()
        view = await one.show()
        assert view.state == "placing"
        assert view.problem is not None
        assert view.problem.detail == "no host is registered"
        assert view.retries_at is not None

    asyncio.run(main())


def test_a_tenant_sees_its_own_and_the_operator_sees_all() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create("s-1")
        await one.command("s-2", CreateSession(), tenant=RIVAL)
        await one.settle()
        assert [row.session_id for row in (await one.ask("sessions")).sessions] == ["s-1"]
        assert [row.session_id for row in (await one.ask("sessions", tenant=RIVAL)).sessions] == ["s-2"]
        everything = await one.ask("sessions", tenant=SYSTEM_TENANT)
        assert [row.session_id for row in everything.sessions] == ["s-1", "s-2"]
        assert (await one.ask("session", "s-2", tenant=SYSTEM_TENANT)).tenant_id == RIVAL
        with pytest.raises(Rejected, match="session-not-found"):
            await one.ask("session", "s-2")
        with pytest.raises(Rejected, match="session-not-found"):
            await one.ask("exec", "s-2", exec_id="e-1")
        with pytest.raises(Rejected, match="operators-only"):
            await one.ask("hosts")

    world(check)


def test_sessions_are_paged_and_filtered_by_state() -> None:
    async def check(one: SchedulerWorld) -> None:
        for number in range(5):
            await one.create(f"s-{number}")
        await one.command("s-3", SuspendSession())
        await one.settle()
        first = await one.ask("sessions", limit=2)
        second = await one.ask("sessions", limit=2, after=first.next)
        third = await one.ask("sessions", limit=2, after=second.next)
        ids = [row.session_id for page in (first, second, third) for row in page.sessions]
        assert ids == [f"s-{number}" for number in range(5)]
        assert third.next is None
        asleep = await one.ask("sessions", state="suspended")
        assert [row.session_id for row in asleep.sessions] == ["s-3"]

    world(check)


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("sessions", {"limit": 0}),
        ("sessions", {"limit": 1_001}),
        ("sessions", {"state": "happy"}),
        ("sessions", {"colour": "blue"}),
        ("exec", {}),
        ("session", {"at_least": "soon"}),
    ],
)
def test_illegal_parameters_are_refused(kind: str, parameters: dict[str, Any]) -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        with pytest.raises(Rejected, match="illegal-parameters"):
            await one.ask(kind, "s-1", **parameters)

    world(check)


def test_an_answer_waits_for_the_position_its_asker_knows_of_but_not_for_ever() -> None:
    async def check(one: SchedulerWorld) -> None:
        receipt = await one.command("s-1", CreateSession())
        assert receipt is not None
        with pytest.raises(Transient, match="not yet at"):
            await one.ask("session", "s-1", at_least=receipt.position)
        await one.settle()
        assert (await one.ask("session", "s-1", at_least=receipt.position)).position >= receipt.position

    world(check)


def test_a_program_that_nobody_asked_for_is_not_found() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        with pytest.raises(Rejected, match="exec-not-found"):
            await one.ask("exec", "s-1", exec_id="e-9")

    world(check)


def test_every_published_query_is_answered_with_the_published_type() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create()
        await one.command("s-1", program("e-1"))
        await one.settle()
        asked = {
            "session": await one.ask("session", "s-1"),
            "sessions": await one.ask("sessions"),
            "exec": await one.ask("exec", "s-1", exec_id="e-1"),
            "hosts": await one.ask("hosts", tenant=SYSTEM_TENANT),
        }
        assert {kind: type(answer) for kind, answer in asked.items()} == {
            kind: shape.answer for kind, shape in QUERIES["scheduler"].items()
        }

    world(check)


def test_the_view_is_what_refolding_the_log_gives() -> None:
    async def check(one: SchedulerWorld) -> None:
        await one.create("s-1", CreateSession(idle_after_s=5.0))
        await one.create("s-2")
        await one.command("s-2", program("e-1"))
        await one.passes(30)
        await one.command("s-1", TerminateSession())
        await one.settle()
        refolded = MemoryViewStore()
        await fold_into(refolded, Views(), one.outside.log)
        for table in Views.tables:
            async with one.outside.views.reading() as rows, refolded.reading() as again:
                assert list(await rows.find(table)) == list(await again.find(table))
        async with refolded.reading() as again:
            kept: list[SessionRow] = list(await again.find(SESSIONS))
        assert [row.folded for row in kept] == [await _folded(one, row.session_id) for row in kept]

    world(check)


async def _folded(one: SchedulerWorld, stream: str) -> Session:
    session = INITIAL
    for recorded in await one.outside.log.load(stream):
        session = evolve(session, decode_event(recorded))
    return session

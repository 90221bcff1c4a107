"""The `resources` view and its queries: given events, then these claims, candidates and reasons."""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import msgspec
import pytest

from tests.support.fakes import Outside
from tests.support.histories import (
    Machine,
    append,
    at,
    fold_into,
    session_over,
    stream_of,
    written,
)
from torpor_contracts.cleanup import CandidatesAnswer, ResourcesAnswer
from torpor_contracts.errors import Rejected
from torpor_contracts.host import HostHeartbeat, VmObservation
from torpor_contracts.ids import SYSTEM_TENANT, HostId, TenantId, VmId
from torpor_eventlog.codec import decode_event
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.views_memory import MemoryViewStore
from torpor_messaging.service import Service
from torpor_reaper.assembly import build
from torpor_reaper.projections import MACHINES, RESOURCES, SESSIONS, Resources
from torpor_reaper.settings import ReaperSettings

FIRST = Machine()
SECOND = Machine(vm_id=VmId("vm-2"), host_id=HostId("host-b"), incarnation=2)
ACME = TenantId("acme")
SETTINGS = ReaperSettings(grace_s=30, notice_s=5, silent_after_s=30)
RUNS = (("s-1", FIRST.asked_for(0)), FIRST.claimed(1), FIRST.started(2))


class Asked:
    """The reaper over a log, its view caught up, asked by a tenant."""

    def __init__(self, outside: Outside, service: Service) -> None:
        self.outside = outside
        self._service = service

    async def beat(self, second: float, *vms: VmId, host: str = "host-a") -> None:
        """A heartbeat of a host arrives, and what follows from it is folded."""
        self.outside.clock.time = at(second)
        heartbeat = HostHeartbeat(
            host_id=HostId(host),
            boot_id="boot-1",
            observed_at=at(second),
            vms=[VmObservation(vm_id=vm_id, session_id=None, incarnation=None, state="running") for vm_id in vms],
        )
        (route,) = self._service.observations
        await route.handle(f"obs.system.vm-host.heartbeat.{host}", msgspec.json.encode(heartbeat))
        await fold_into(self.outside.views, Resources(), self.outside.log)

    async def resources(self, target: str = "-", tenant: TenantId = ACME, **parameters: Any) -> ResourcesAnswer:
        answer = await self._service.queries[0].handle(tenant, target, parameters)
        assert isinstance(answer, ResourcesAnswer)
        return answer

    async def candidates(self, tenant: TenantId = ACME, **parameters: Any) -> CandidatesAnswer:
        answer = await self._service.queries[1].handle(tenant, "-", parameters)
        assert isinstance(answer, CandidatesAnswer)
        return answer


def given(*events: msgspec.Struct | tuple[str, msgspec.Struct]) -> Callable[[Callable[[Asked], Awaitable[None]]], None]:
    def run(check: Callable[[Asked], Awaitable[None]]) -> None:
        async def main() -> None:
            outside = Outside(await written(*events))
            outside.clock.time = at(100)
            asked = Asked(outside, build(SETTINGS, outside.ports()))
            await fold_into(outside.views, Resources(), outside.log)
            await check(asked)

        asyncio.run(main())

    return run


def test_every_claim_names_its_holder_and_its_position() -> None:
    async def check(asked: Asked) -> None:
        await asked.beat(100, FIRST.vm_id)
        answer = await asked.resources("s-1")
        assert [(claim.kind, claim.name) for claim in answer.resources] == [
            ("overlay", "disk.overlay"),
            ("process", "vmm"),
        ]
        claim = answer.resources[0]
        assert (claim.claimed_at, claim.claimed_position, claim.released_at) == (at(1), 2, None)
        assert claim.holder == "incarnation 1 of session s-1"
        assert claim.why_not_yet == "in use by incarnation 1 of session s-1"
        assert (answer.position, answer.next) == (3, None)

    given(*RUNS)(check)


def test_a_released_claim_keeps_its_history_and_waits_for_nothing() -> None:
    async def check(asked: Asked) -> None:
        answer = await asked.resources("s-1")
        assert {(claim.released_at, claim.released_position, claim.why_not_yet) for claim in answer.resources} == {
            (at(51), 5, None)
        }
        assert (await asked.resources("s-1", held_only=True)).resources == []
        assert (await asked.candidates()).candidates == []

    given(*RUNS, FIRST.suspended(50), FIRST.released(51))(check)


def test_claims_left_by_an_ended_machine_are_candidates_with_evidence() -> None:
    async def check(asked: Asked) -> None:
        (candidate,) = (await asked.candidates()).candidates
        assert (candidate.reason, candidate.state, candidate.unreleased) == ("unreleased", "noticed", 1)
        assert (candidate.evidence, candidate.evidence_position) == ("vm-stopped at position 4", 4)
        assert candidate.why_not_yet.startswith("host-a has not been heard since the reaper started")
        await asked.beat(100)
        (candidate,) = (await asked.candidates()).candidates
        assert "asked to let go" in candidate.why_not_yet
        (claim,) = (await asked.resources("s-1", held_only=True)).resources
        assert (claim.kind, claim.holder) == ("overlay", "nobody: vm-stopped at position 4")

    given(*RUNS, FIRST.stopped(50), FIRST.released(51, "process"))(check)


def test_each_stage_of_a_clean_up_says_what_it_waits_for() -> None:
    async def check(asked: Asked) -> None:
        seen: list[tuple[str, int, str]] = []

        async def look() -> None:
            (candidate,) = (await asked.candidates()).candidates
            seen.append((candidate.state, candidate.attempts, candidate.why_not_yet))

        await asked.beat(100, FIRST.vm_id)
        await look()
        await asked.beat(106, FIRST.vm_id)
        await look()
        await append(asked.outside.log, FIRST.quarantined(107), FIRST.vm_id)
        await asked.beat(108, FIRST.vm_id)
        await look()
        await asked.beat(140, FIRST.vm_id)
        await look()
        asked.outside.clock.time = at(500)
        await look()
        assert [stage[:2] for stage in seen] == [
            ("noticed", 0),
            ("proposed", 1),
            ("quarantined", 1),
            ("confirmed", 1),
            ("confirmed", 1),
        ]
        reasons = [stage[2] for stage in seen]
        assert "proposed once host-a is seen to have it" in reasons[0]
        assert "asked to freeze it (try 1 of 5)" in reasons[1]
        assert f"frozen at position 6; left alone until {at(137).isoformat()}" in reasons[2]
        assert "asked to destroy it (try 1 of 5)" in reasons[3]
        assert f"host-a has not been heard since {at(140).isoformat()}" in reasons[4]

    given(*RUNS, ("s-1", session_over(60)))(check)


def test_a_machine_that_was_cleaned_up_is_a_candidate_no_more() -> None:
    async def check(asked: Asked) -> None:
        await asked.beat(100, FIRST.vm_id)
        await asked.beat(106, FIRST.vm_id)
        for event in (FIRST.quarantined(107), FIRST.reaped(140), FIRST.released(140)):
            await append(asked.outside.log, event, FIRST.vm_id)
        await asked.beat(141)
        assert (await asked.candidates()).candidates == []

    given(*RUNS, ("s-1", session_over(60)))(check)


def test_a_tenant_sees_its_own_claims_and_the_operator_those_of_all() -> None:
    async def check(asked: Asked) -> None:
        other = TenantId("other")
        assert (await asked.resources("s-1", tenant=other)).resources == []
        assert (await asked.candidates(other)).candidates == []
        assert len((await asked.resources("-", tenant=SYSTEM_TENANT)).resources) == 2
        assert len((await asked.candidates(SYSTEM_TENANT)).candidates) == 1

    given(*RUNS, ("s-1", session_over(60)))(check)


def test_the_operator_is_shown_machines_no_command_can_reach() -> None:
    async def check(asked: Asked) -> None:
        for second in (100, 110):
            await asked.beat(second, FIRST.vm_id, VmId("Not An Id"), host="host-b")
        shown = (await asked.candidates(SYSTEM_TENANT)).candidates
        assert {(candidate.vm_id, candidate.reason, candidate.host_id) for candidate in shown} == {
            ("vm-1", "misplaced", "host-b"),
            ("Not An Id", "unclaimed", "host-b"),
        }
        assert all("an operator must look" in candidate.why_not_yet for candidate in shown)
        assert (await asked.candidates()).candidates == []

    given(*RUNS)(check)


def test_pages_hold_every_claim_once() -> None:
    machines = [Machine(vm_id=VmId(f"vm-{n:02}"), incarnation=n) for n in range(12)]

    async def check(asked: Asked) -> None:
        seen: list[tuple[str, str]] = []
        after: str | None = None
        for _ in range(4):
            answer = await asked.resources("s-1", limit=10, after=after)
            seen += [(claim.vm_id, claim.kind) for claim in answer.resources]
            after = answer.next
            if after is None:
                break
        assert after is None
        assert len(seen) == len(set(seen)) == 24

    given(*(machine.claimed(0) for machine in machines))(check)


@pytest.mark.parametrize("parameters", [{"limit": 0}, {"limit": 501}, {"held": True}, {"after": 3}, {"limit": "many"}])
def test_parameters_it_cannot_take_are_refused(parameters: dict[str, Any]) -> None:
    async def check(asked: Asked) -> None:
        for ask in (asked.resources, asked.candidates):
            with pytest.raises(Rejected) as refused:
                await ask(**parameters)
            assert refused.value.code == "illegal-query"

    given(*RUNS)(check)


# --- the view ------------------------------------------------------------------------------------------------------


def _event(chance: Random, machine: Machine) -> tuple[str, msgspec.Struct]:
    second = chance.randint(0, 50)
    event = chance.choice(
        [
            machine.asked_for(second),
            machine.claimed(second),
            machine.claimed(second),
            machine.started(second),
            machine.suspended(second),
            machine.stopped(second),
            machine.released(second),
            machine.released(second, "process"),
            machine.quarantined(second),
            machine.reaped(second),
            machine.start_given_up(second),
            machine.lost(second),
            session_over(second),
        ]
    )
    in_session = type(event).__name__.startswith("Session") or event == machine.asked_for(second)
    return (machine.session_id if in_session else stream_of(event)), event


async def _random_history(seed: int) -> MemoryLog:
    chance, log = Random(seed), MemoryLog()
    for _ in range(chance.randint(3, 20)):
        stream, event = _event(chance, chance.choice((FIRST, SECOND)))
        await append(log, event, stream)
    return log


async def _held_by_hand(log: MemoryLog) -> set[tuple[str, str, str]]:
    """What is claimed and not released, straight from the log."""
    held: set[tuple[str, str, str]] = set()
    for recorded in await log.read(0, 10_000):
        event = decode_event(recorded)
        named = {(recorded.stream, one.kind, one.name) for one in getattr(event, "resources", [])}
        held = held | named if recorded.tag == "vm-claimed.v1" else held - named
    return held


@pytest.mark.parametrize("hundred", range(3))
def test_refolding_gives_the_view_and_the_view_gives_what_the_log_says(hundred: int) -> None:
    """Whatever is reported in whatever order: histories 100 * hundred and following."""

    async def check(seed: int) -> None:
        log = await _random_history(seed)
        piecewise, afresh = MemoryViewStore(), MemoryViewStore()
        await fold_into(piecewise, Resources(), log, until=seed % 9)
        await fold_into(piecewise, Resources(), log)
        await fold_into(afresh, Resources(), log)
        async with piecewise.reading() as one, afresh.reading() as other:
            for table in (RESOURCES, MACHINES, SESSIONS):
                assert await one.find(table, limit=1000) == await other.find(table, limit=1000), f"history {seed}"
            held = {(row.vm_id, row.kind, row.name) for row in await one.find(RESOURCES, {"held": 1}, limit=1000)}
        assert held == await _held_by_hand(log), f"history {seed}"

    for seed in range(100 * hundred, 100 * hundred + 100):
        asyncio.run(check(seed))

"""Meters: given what was observed, then these intervals."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest

from tests.support.histories import (
    Machine,
    append,
    at,
    checkpoint_freed,
    checkpoint_recorded,
    fold_into,
    host_lost,
    session_over,
    stream_of,
    written,
)
from torpor_billing.domain.meters import Meter
from torpor_billing.projections import METERS, TENURES, Meters
from torpor_contracts.ids import HostId, SessionId, VmId
from torpor_eventlog.instants import to_us
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.views_memory import MemoryViewStore

FIRST = Machine()
SECOND = Machine(vm_id=VmId("vm-2"), host_id=HostId("host-b"), incarnation=2)

Given = msgspec.Struct | tuple[str, msgspec.Struct]


async def rows_of(log: MemoryLog) -> list[Meter]:
    views = MemoryViewStore()
    await fold_into(views, Meters(), log)
    return await all_meters(views)


async def all_meters(views: MemoryViewStore) -> list[Meter]:
    async with views.reading() as rows:
        found = await rows.find(METERS, limit=10_000)
    return sorted((row.meter for row in found), key=lambda meter: meter.opened_position)


def meters_of(*events: Given) -> list[Meter]:
    return asyncio.run(_meters_of(events))


async def _meters_of(events: tuple[Given, ...]) -> list[Meter]:
    return await rows_of(await written(*events))


def seconds(meter: Meter) -> tuple[float, float | None]:
    noon = to_us(at(0))
    closed = None if meter.closed_us is None else (meter.closed_us - noon) / 1e6
    return (meter.opened_us - noon) / 1e6, closed


def charged(meter: Meter, now: float) -> float:
    return (meter.charged_until_us(to_us(at(now))) - meter.opened_us) / 1e6


def test_running_time_is_between_the_observed_start_and_the_observed_end() -> None:
    (meter,) = meters_of(FIRST.claimed(0), FIRST.started(2), FIRST.suspended(62))
    assert seconds(meter) == (2, 62)
    assert (meter.opened_position, meter.closed_position, meter.closed_cause) == (2, 3, "vm-suspended")
    assert (meter.tenant_id, meter.session_id, meter.vcpus, meter.memory_mib) == ("acme", "s-1", 1, 256)


def test_nothing_runs_before_a_start_was_observed() -> None:
    assert meters_of(("s-1", FIRST.asked_for(0)), FIRST.claimed(1), FIRST.start_failed(60)) == []


def test_an_open_meter_is_charged_up_to_now() -> None:
    (meter,) = meters_of(FIRST.started(2))
    assert meter.is_open
    assert charged(meter, now=12) == 10


def test_a_machine_that_came_up_and_vanished_is_charged_until_it_was_seen_gone() -> None:
    (meter,) = meters_of(FIRST.started(0), FIRST.stopped(30, expected=False))
    assert (seconds(meter), meter.closed_cause) == ((0, 30), "vm-stopped")


def test_the_first_observed_end_stands() -> None:
    (meter,) = meters_of(FIRST.started(0), FIRST.quarantined(20), FIRST.reaped(80))
    assert (seconds(meter), meter.closed_cause) == ((0, 20), "vm-quarantined")


def test_an_end_before_the_start_makes_an_interval_of_no_length() -> None:
    (meter,) = meters_of(FIRST.started(10), FIRST.stopped(8))
    assert seconds(meter) == (10, 10)


def test_the_same_start_reported_twice_is_one_interval() -> None:
    (meter,) = meters_of(FIRST.started(0), FIRST.started(5), FIRST.stopped(9))
    assert seconds(meter) == (0, 9)


# --- lost hosts --------------------------------------------------------------------------------------------------


def test_a_lost_host_closes_its_machines_at_its_last_heartbeat() -> None:
    other = replace(FIRST, vm_id=VmId("vm-9"), host_id=HostId("host-b"), session_id=SessionId("s-9"))
    lost, kept = meters_of(FIRST.started(0), other.started(0), host_lost(45))
    assert (seconds(lost), lost.closed_cause, lost.closed_position) == ((0, 45), "host-lost", 3)
    assert kept.is_open


def test_a_lost_host_closes_every_one_of_many_machines() -> None:
    many = [replace(FIRST, vm_id=VmId(f"vm-{n}"), session_id=SessionId(f"s-{n}")) for n in range(1203)]
    found = meters_of(*(machine.started(0) for machine in many), host_lost(7))
    assert {seconds(meter) for meter in found} == {(0.0, 7.0)}


def test_a_machine_first_seen_after_the_last_heartbeat_is_not_charged_for_the_time_before() -> None:
    (meter,) = meters_of(FIRST.started(50), host_lost(45))
    assert seconds(meter) == (50, 50)


def test_a_later_end_from_a_host_that_came_back_is_noted_and_not_charged() -> None:
    (meter,) = meters_of(FIRST.started(0), host_lost(45), FIRST.stopped(300, expected=False))
    assert seconds(meter) == (0, 45)
    assert (meter.late_end_us, meter.late_end_position) == (to_us(at(300)), 3)


def test_an_earlier_end_from_a_host_that_came_back_shortens_the_interval() -> None:
    (meter,) = meters_of(FIRST.started(0), host_lost(45), FIRST.stopped(40))
    assert (seconds(meter), meter.closed_cause, meter.closed_position) == ((0, 40), "vm-stopped", 3)


def test_a_machine_found_again_is_not_charged_for_the_time_nobody_saw_it() -> None:
    before, after = meters_of(
        FIRST.started(0),
        host_lost(45),
        ("s-1", FIRST.lost(75)),
        ("s-1", FIRST.found_again(100)),
        FIRST.stopped(130),
    )
    assert [seconds(before), seconds(after)] == [(0, 45), (100, 130)]
    assert (after.vm_id, after.closed_cause) == ("vm-1", "vm-stopped")


def test_a_machine_whose_end_is_known_does_not_run_again() -> None:
    (meter,) = meters_of(
        FIRST.started(0), host_lost(45), FIRST.stopped(60), ("s-1", FIRST.found_again(70)), host_lost(90)
    )
    assert seconds(meter) == (0, 45)


# --- sessions that hold the machine no more -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["terminated", "failed"])
def test_an_open_meter_of_a_session_that_is_over_is_an_alarm_and_costs_no_more(how: Any) -> None:
    (meter,) = meters_of(("s-1", FIRST.asked_for(0)), FIRST.started(1), ("s-1", session_over(31, how)))
    assert meter.is_alarm
    assert (meter.given_up_cause, meter.given_up_position) == (f"session-{how}", 3)
    assert charged(meter, now=100_000) == 30


def test_the_alarm_ends_with_the_observed_end_and_the_charge_stays() -> None:
    (meter,) = meters_of(("s-1", FIRST.asked_for(0)), FIRST.started(1), ("s-1", session_over(31)), FIRST.stopped(5000))
    assert not meter.is_alarm
    assert seconds(meter) == (1, 31)


def test_a_session_pays_for_one_machine_at_a_time() -> None:
    old, new = meters_of(
        ("s-1", FIRST.asked_for(0)),
        FIRST.started(1),
        ("s-1", FIRST.lost(20)),
        ("s-1", SECOND.asked_for(21)),
        SECOND.started(25),
        FIRST.stopped(500),
    )
    assert [seconds(old), seconds(new)] == [(1, 20), (25, None)]


def test_a_machine_replaced_without_a_word_is_charged_until_the_new_one_runs() -> None:
    old, new = meters_of(
        ("s-1", FIRST.asked_for(0)), FIRST.started(1), ("s-1", SECOND.asked_for(20)), SECOND.started(25)
    )
    assert (old.is_alarm, old.given_up_cause, charged(old, now=900)) == (True, "superseded", 24)
    assert (new.is_alarm, charged(new, now=900)) == (False, 875)


def test_a_new_machine_on_a_host_whose_clock_is_behind_starts_when_the_old_one_ended() -> None:
    old, new = meters_of(
        ("s-1", FIRST.asked_for(0)), FIRST.started(1), FIRST.suspended(60), ("s-1", SECOND.asked_for(60)),
        SECOND.started(55), SECOND.stopped(58),
    )  # fmt: skip
    assert [seconds(old), seconds(new)] == [(1, 60), (60, 60)]


def test_a_machine_that_comes_up_after_it_was_given_up_costs_nothing() -> None:
    (late,) = meters_of(("s-1", FIRST.asked_for(0)), ("s-1", FIRST.start_given_up()), FIRST.started(70))
    assert (late.is_alarm, late.given_up_cause, charged(late, now=900)) == (True, "start-given-up", 0)


def test_a_machine_that_its_session_never_lost_after_all_is_charged_on() -> None:
    (meter,) = meters_of(
        ("s-1", FIRST.asked_for(0)), FIRST.started(0), ("s-1", FIRST.lost(20)), ("s-1", FIRST.found_again(30))
    )
    assert (meter.is_alarm, charged(meter, now=100)) == (False, 100)


def test_an_open_meter_whose_process_is_gone_is_an_alarm() -> None:
    (meter,) = meters_of(FIRST.started(0), FIRST.released(40, "process"))
    assert (meter.is_alarm, meter.given_up_cause, charged(meter, now=900)) == (True, "vm-released", 40)


def test_a_release_that_leaves_the_process_is_no_alarm() -> None:
    (meter,) = meters_of(FIRST.started(0), FIRST.released(40, "overlay"))
    assert not meter.is_alarm


# --- stored time --------------------------------------------------------------------------------------------------


def test_stored_time_is_between_recorded_and_freed() -> None:
    (meter,) = meters_of(checkpoint_recorded(10, 4096), checkpoint_freed(110))
    assert (meter.kind, seconds(meter), meter.stored_bytes, meter.closed_cause) == ("stored", (10, 110), 4096, "freed")


def test_a_lost_host_or_an_ended_session_does_not_stop_storage() -> None:
    (meter,) = meters_of(checkpoint_recorded(10, 4096), host_lost(20), ("s-1", session_over(30)))
    assert meter.is_open
    assert not meter.is_alarm


def test_freeing_what_was_never_recorded_changes_nothing() -> None:
    assert meters_of(checkpoint_freed(1)) == []


# --- the view ------------------------------------------------------------------------------------------------------

KINDS = (
    "asked",
    "started",
    "started",
    "suspended",
    "stopped",
    "lost",
    "host-lost",
    "over",
    "again",
    "given-up",
    "released",
)


def _event(kind: str, machine: Machine, second: int) -> tuple[str, msgspec.Struct]:
    in_session: dict[str, msgspec.Struct] = {
        "asked": machine.asked_for(second),
        "lost": machine.lost(second),
        "over": session_over(second),
        "again": machine.found_again(second),
        "given-up": machine.start_given_up(second),
    }
    if kind in in_session:
        return machine.session_id, in_session[kind]
    of_machine: dict[str, msgspec.Struct] = {
        "started": machine.started(second),
        "suspended": machine.suspended(second),
        "stopped": machine.stopped(second),
        "host-lost": host_lost(second, host=machine.host_id),
        "released": machine.released(second),
    }
    return stream_of(of_machine[kind]), of_machine[kind]


async def _random_history(seed: int) -> MemoryLog:
    chance, log = Random(seed), MemoryLog()
    for _ in range(chance.randint(3, 14)):
        machine = chance.choice((FIRST, SECOND))
        stream, event = _event(chance.choice(KINDS), machine, chance.randint(0, 50))
        await append(log, event, stream)
    return log


@pytest.mark.parametrize("hundred", range(4))
def test_refolding_gives_the_view_and_charged_time_never_overlaps(hundred: int) -> None:
    """Whatever is reported, in whatever order and with whatever clocks: histories 100 * hundred and following."""

    async def check(seed: int) -> None:
        log = await _random_history(seed)
        piecewise, afresh = MemoryViewStore(), MemoryViewStore()
        await fold_into(piecewise, Meters(), log, until=seed % 7)
        await fold_into(piecewise, Meters(), log)
        await fold_into(afresh, Meters(), log)
        async with piecewise.reading() as one, afresh.reading() as other:
            for table in (METERS, TENURES):
                assert await one.find(table, limit=1000) == await other.find(table, limit=1000), f"history {seed}"
        now_us = to_us(at(60))
        found = [(meter.opened_us, meter.charged_until_us(now_us)) for meter in await all_meters(afresh)]
        for earlier, later in pairwise(sorted(span for span in found if span[0] < span[1])):
            assert earlier[1] <= later[0], f"history {seed} charges a moment twice"

    for seed in range(100 * hundred, 100 * hundred + 100):
        asyncio.run(check(seed))

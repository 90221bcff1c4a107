"""CreateSession: given a session, when one is asked for, then it happens or is refused."""

import pytest

from tests.support.sessions import SESSION, Story, offer, placing, running, starting
from torpor_contracts.ids import TenantId
from torpor_contracts.session import (
    CreateSession,
    MachineSpec,
    PlacementDeferred,
    RetryRule,
    SessionRequested,
    VmStartRequested,
)
from torpor_scheduler.domain.session import Phase
from torpor_scheduler.domain.session_decisions import Addressee, Context, decide


def test_happens_and_asks_a_host_at_once() -> None:
    story = Story().when(CreateSession(metadata={"team": "blue"})).then(SessionRequested, VmStartRequested)
    requested, start = story.last
    assert requested.metadata == {"team": "blue"}
    assert (start.host_id, start.incarnation, start.attempt, start.checkpoint_id) == ("host-a", 1, 1, None)
    assert start.deadline_at > start.requested_at
    assert story.session.phase is Phase.STARTING


def test_happens_without_a_host_and_says_when_it_looks_again() -> None:
    story = placing().then(SessionRequested, PlacementDeferred)
    deferred = story.last[1]
    assert deferred.reason == "no host is registered"
    assert (deferred.retry_at - story.now).total_seconds() == 1.0
    assert (deferred.give_up_at - story.now).total_seconds() == 120.0
    assert story.session.phase is Phase.PLACING


def test_happens_on_the_host_with_the_most_memory_left() -> None:
    hosts = [offer("host-a", memory_mib_free=300), offer("host-b", memory_mib_free=600)]
    assert starting(hosts=hosts).machine.host_id == "host-b"


def test_refused_when_the_id_is_taken() -> None:
    assert SESSION in running().refused(CreateSession(), "session-exists").message


def test_refused_for_another_tenant_too() -> None:
    running().refused(CreateSession(), "session-exists", tenant=TenantId("rival"))


@pytest.mark.parametrize("session_id", ["", "UPPER", "a.b", "-a", "a" * 64, "vm-1", "host-a", "ckp-9", "cleanup-vm-1"])
def test_refused_for_an_id_that_is_no_token_or_is_reserved(session_id: str) -> None:
    story = Story()
    context = Context(now=story.now, vm_id="vm-1", checkpoint_id="ckp-1")  # type: ignore[arg-type]
    addressee = Addressee(session_id=session_id, tenant_id="acme")  # type: ignore[arg-type]
    with pytest.raises(Exception, match="illegal-session-id"):
        decide(story.session, CreateSession(), addressee, context)


def test_refused_for_the_operators_tenant() -> None:
    Story().refused(CreateSession(), "illegal-tenant", tenant=TenantId("system"))


@pytest.mark.parametrize(
    "machine",
    [
        MachineSpec(vcpus=0),
        MachineSpec(vcpus=33),
        MachineSpec(memory_mib=15),
        MachineSpec(memory_mib=131_073),
        MachineSpec(disk_mib=0),
        MachineSpec(disk_mib=1_048_577),
        MachineSpec(image=""),
        MachineSpec(image="../secret"),
        MachineSpec(image="a" * 129),
    ],
)
def test_refused_for_a_machine_beyond_the_limits(machine: MachineSpec) -> None:
    Story().refused(CreateSession(machine=machine), "illegal-machine")


@pytest.mark.parametrize("idle_after_s", [0.0, -1.0, 0.05, 2_592_001.0, float("inf"), float("nan")])
def test_refused_for_an_idle_time_out_of_range(idle_after_s: float) -> None:
    Story().refused(CreateSession(idle_after_s=idle_after_s), "illegal-idle-time")


def test_happens_without_an_idle_time() -> None:
    story = running(CreateSession(idle_after_s=None))
    assert story.session.idle_after_s is None


@pytest.mark.parametrize(
    "rule",
    [
        RetryRule(attempts_max=0),
        RetryRule(attempts_max=11),
        RetryRule(backoff_s=0.0),
        RetryRule(backoff_s=301.0),
        RetryRule(backoff_s=5.0, backoff_s_max=4.0),
        RetryRule(backoff_s_max=float("inf")),
        RetryRule(deadline_s=0.5),
        RetryRule(deadline_s=3_601.0),
    ],
)
def test_refused_for_a_retry_rule_without_bounds(rule: RetryRule) -> None:
    Story().refused(CreateSession(start_retry=rule), "illegal-retry-rule")


def test_refused_for_too_much_metadata() -> None:
    Story().refused(CreateSession(metadata={str(n): "" for n in range(33)}), "metadata-too-large")
    Story().refused(CreateSession(metadata={"note": "ü" * 2_100}), "metadata-too-large")


def test_a_session_without_a_host_is_placed_once_there_is_one() -> None:
    story = placing()
    story.hosts = (offer(),)
    assert story.timer_comes().then(VmStartRequested).session.phase is Phase.STARTING


def test_a_session_that_finds_no_host_fails_in_bounded_time_and_says_the_way_out() -> None:
    story = placing()
    looks = 0
    while story.session.phase is Phase.PLACING:
        story.timer_comes()
        looks += 1
        assert looks < 100
    assert story.session.phase is Phase.FAILED
    assert (story.now - story.all[0].requested_at).total_seconds() == 120.0
    assert story.last[-1].code == "not-placed"
    assert "terminate it" in story.last[-1].way_out
    assert looks < 20

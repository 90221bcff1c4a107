"""The transition table of a clean-up: what it allows is what `evolve` does, and nothing else."""

from typing import get_args

import msgspec
import pytest

from tests.support.histories import at
from torpor_contracts.cleanup import (
    CleanupCarriedOut,
    CleanupConfirmed,
    CleanupEvent,
    CleanupGivenUp,
    CleanupProposed,
    CleanupWithdrawn,
)
from torpor_contracts.errors import InvariantViolation
from torpor_contracts.ids import HostId, TenantId, VmId
from torpor_contracts.session import RetryRule
from torpor_reaper.domain.cleanup import IDLE, TRANSITIONS, CleanupState, evolve

VM, HOST = VmId("vm-1"), HostId("host-a")

PROPOSED = CleanupProposed(
    vm_id=VM,
    host_id=HOST,
    boot_id="boot-1",
    tenant_id=TenantId("acme"),
    session_id=None,
    incarnation=None,
    reason="unclaimed",
    action="reap",
    attempt=1,
    evidence="no event of the log claims it",
    evidence_position=None,
    checked_position=0,
    grace_s=30,
    retry=RetryRule(),
    proposed_at=at(0),
)
EXAMPLES: dict[type[msgspec.Struct], CleanupEvent] = {
    CleanupProposed: PROPOSED,
    CleanupConfirmed: CleanupConfirmed(
        vm_id=VM, host_id=HOST, attempt=1, evidence="nobody's", checked_position=3, confirmed_at=at(31)
    ),
    CleanupWithdrawn: CleanupWithdrawn(vm_id=VM, host_id=HOST, cause="gone", checked_position=3, withdrawn_at=at(32)),
    CleanupCarriedOut: CleanupCarriedOut(vm_id=VM, host_id=HOST, evidence_position=4, observed_at=at(33)),
    CleanupGivenUp: CleanupGivenUp(
        vm_id=VM, host_id=HOST, boot_id="boot-1", attempts=3, cause="deaf", way_out="restart it", given_up_at=at(34)
    ),
}
PATHS: dict[str, list[type[msgspec.Struct]]] = {
    "idle": [],
    "proposed": [CleanupProposed],
    "confirmed": [CleanupProposed, CleanupConfirmed],
    "settled": [CleanupProposed, CleanupWithdrawn],
    "given-up": [CleanupProposed, CleanupGivenUp],
}


def state_named(name: str) -> CleanupState:
    state: CleanupState = IDLE
    for kind in PATHS[name]:
        state = evolve(state, EXAMPLES[kind])
    return state


def test_every_event_has_an_example_and_every_state_a_way_to_it() -> None:
    assert set(EXAMPLES) == set(get_args(CleanupEvent))
    assert set(PATHS) == set(TRANSITIONS)
    assert {state_named(name).__struct_config__.tag for name in PATHS} == set(TRANSITIONS)


@pytest.mark.parametrize("name", sorted(PATHS))
@pytest.mark.parametrize("kind", sorted(EXAMPLES, key=repr))
def test_the_table_is_what_happens(name: str, kind: type[msgspec.Struct]) -> None:
    state = state_named(name)
    if kind in TRANSITIONS[name]:
        assert evolve(state, EXAMPLES[kind]).__struct_config__.tag == TRANSITIONS[name][kind]
    else:
        with pytest.raises(InvariantViolation, match=kind.__name__):
            evolve(state, EXAMPLES[kind])

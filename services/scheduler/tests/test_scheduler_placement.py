"""Placement: which host gets a machine, and why none does."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sessions import offer
from torpor_contracts.ids import HostId
from torpor_contracts.session import MachineSpec
from torpor_scheduler.domain.placement import HostOffer, Need, choose, fits, why_none

SPEC = MachineSpec(vcpus=2, memory_mib=512, disk_mib=1024)
NEED = Need(spec=SPEC)


@pytest.mark.parametrize(
    "change",
    [
        {"lost": True},
        {"draining": True},
        {"vcpus_free": 1},
        {"memory_mib_free": 511},
        {"disk_mib_free": 1023},
        {"vms_free": 0},
    ],
)
def test_a_host_without_room_or_out_of_service_is_not_chosen(change: dict[str, Any]) -> None:
    assert choose([offer(**change)], NEED) is None
    assert choose([offer(**change), offer("host-b")], NEED) == offer("host-b")


def test_a_host_filled_to_the_last_bit_is_chosen() -> None:
    exact = offer(vcpus_free=2, memory_mib_free=512, disk_mib_free=1024, vms_free=1)
    assert choose([exact], NEED) == exact


def test_a_checkpoint_needs_a_host_of_its_fingerprint() -> None:
    need = Need(spec=SPEC, fingerprint="qemu-9")
    assert choose([offer()], need) is None
    assert choose([offer(), offer("host-q", fingerprint="qemu-9")], need) == offer("host-q", fingerprint="qemu-9")


def test_near_is_better_than_roomy_but_not_than_possible() -> None:
    near = Need(spec=SPEC, near=HostId("host-a"))
    assert choose([offer("host-b", memory_mib_free=9_999), offer("host-a")], near) == offer("host-a")
    assert choose([offer("host-b"), offer("host-a", draining=True)], near) == offer("host-b")


def test_among_equals_the_choice_is_always_the_same() -> None:
    assert choose([offer("host-b"), offer("host-a")], NEED) == choose([offer("host-a"), offer("host-b")], NEED)


@pytest.mark.parametrize(
    ("offers", "need", "reason"),
    [
        ([], NEED, "no host is registered"),
        ([offer(lost=True), offer(draining=True)], NEED, "each of the 2 hosts is lost or drains"),
        ([offer()], Need(spec=SPEC, fingerprint="qemu-9"), "none of 1 hosts can load a checkpoint of qemu-9"),
        ([offer(vms_free=0)], NEED, "none of 1 hosts has room for 2 vCPU, 512 MiB memory and 1024 MiB disk"),
    ],
)
def test_why_no_host_is_chosen(offers: list[HostOffer], need: Need, reason: str) -> None:
    assert why_none(offers, need) == reason


OFFERS = st.lists(
    st.builds(
        offer,
        st.sampled_from(["host-a", "host-b", "host-c", "host-d"]),
        lost=st.booleans(),
        draining=st.booleans(),
        memory_mib_free=st.integers(-512, 1024),
        fingerprint=st.sampled_from(["simulated-1", "qemu-9"]),
    ),
    max_size=4,
    unique_by=lambda one: one.host_id,
)


@given(OFFERS, st.sampled_from([None, "qemu-9"]), st.sampled_from([None, "host-b"]))
def test_a_host_is_chosen_exactly_when_one_fits(offers: list[HostOffer], fingerprint: Any, near: Any) -> None:
    need = Need(spec=SPEC, fingerprint=fingerprint, near=near)
    chosen = choose(offers, need)
    if chosen is None:
        assert not any(fits(one, need) for one in offers)
        assert why_none(offers, need)
    else:
        assert chosen in offers
        assert fits(chosen, need)

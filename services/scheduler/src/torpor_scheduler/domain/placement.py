"""Chooses the host of a machine; pure: it sees what hosts offer, and claims nothing."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from torpor_contracts.ids import HostId
from torpor_contracts.session import MachineSpec


class HostOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A host and what it has left for machines; sizes in MiB. A host that is lost or drains takes no machine."""

    host_id: HostId
    fingerprint: str
    lost: bool
    draining: bool
    vcpus_free: int
    memory_mib_free: int
    disk_mib_free: int
    vms_free: int


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine needs. `fingerprint`: of the checkpoint that must be loaded, None for a start from the image.

    `near`: the host where the checkpoint was made, which spares moving it.
    """

    spec: MachineSpec
    fingerprint: str | None = None
    near: HostId | None = None


def choose(offers: Sequence[HostOffer], need: Need) -> HostOffer | None:
    """The host to start on: the near one if it fits, else the one with the most memory left; ties go by id."""
    fitting = [offer for offer in offers if fits(offer, need)]
    return min(fitting, key=lambda o: (o.host_id != need.near, -o.memory_mib_free, o.host_id), default=None)


def fits(offer: HostOffer, need: Need) -> bool:
    """Whether the host can take the machine now."""
    return (
        not (offer.lost or offer.draining)
        and (need.fingerprint is None or offer.fingerprint == need.fingerprint)
        and _has_room(offer, need.spec)
    )


def taken(offer: HostOffer, spec: MachineSpec) -> HostOffer:
    """What the host has left once it has taken a machine."""
    return replace(
        offer,
        vcpus_free=offer.vcpus_free - spec.vcpus,
        memory_mib_free=offer.memory_mib_free - spec.memory_mib,
        disk_mib_free=offer.disk_mib_free - spec.disk_mib,
        vms_free=offer.vms_free - 1,
    )


def loads(offers: Sequence[HostOffer], fingerprint: str) -> bool:
    """Whether there is a host that can load checkpoints of this fingerprint, room or not."""
    return any(offer.fingerprint == fingerprint for offer in offers if not offer.lost)


def why_none(offers: Sequence[HostOffer], need: Need) -> str:
    """Why no host fits, for people."""
    if not offers:
        return "no host is registered"
    taking = [offer for offer in offers if not (offer.lost or offer.draining)]
    if not taking:
        return f"each of the {len(offers)} hosts is lost or drains"
    loading = [offer for offer in taking if need.fingerprint in (None, offer.fingerprint)]
    if not loading:
        return f"none of {len(taking)} hosts can load a checkpoint of {need.fingerprint}"
    spec = need.spec
    return (
        f"none of {len(loading)} hosts has room for {spec.vcpus} vCPU, {spec.memory_mib} MiB memory and "
        f"{spec.disk_mib} MiB disk"
    )


def _has_room(offer: HostOffer, spec: MachineSpec) -> bool:
    return (
        offer.vms_free >= 1
        and offer.vcpus_free >= spec.vcpus
        and offer.memory_mib_free >= spec.memory_mib
        and offer.disk_mib_free >= spec.disk_mib
    )

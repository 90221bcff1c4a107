"""Commands and events of a host; stream `<host id>`, owned by the scheduler; subjects under tenant `system`."""

from datetime import datetime
from typing import Literal

import msgspec

from torpor_contracts.ids import HostId, SessionId, VmId


class HostCapacity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a host offers to machines in all; sizes in MiB."""

    vcpus: int
    memory_mib: int
    disk_mib: int
    vms_max: int


class RegisterHost(msgspec.Struct, frozen=True, kw_only=True, tag="register-host.v1", forbid_unknown_fields=True):
    """A vm-host process is up. `boot_id` is new with each process; `fingerprint` says which checkpoints it can load."""

    boot_id: str
    driver: str
    fingerprint: str
    capacity: HostCapacity


class DrainHost(msgspec.Struct, frozen=True, kw_only=True, tag="drain-host.v1", forbid_unknown_fields=True):
    """Take no new machines; suspend those that run."""

    reason: str = ""


class UndrainHost(msgspec.Struct, frozen=True, kw_only=True, tag="undrain-host.v1", forbid_unknown_fields=True):
    """Take new machines again."""


class DeclareHostLost(
    msgspec.Struct, frozen=True, kw_only=True, tag="declare-host-lost.v1", forbid_unknown_fields=True
):
    """No heartbeat of this `boot_id` came for the stated time."""

    boot_id: str
    last_seen_at: datetime


HostCommand = RegisterHost | DrainHost | UndrainHost | DeclareHostLost


class HostRegistered(msgspec.Struct, frozen=True, kw_only=True, tag="host-registered.v1"):
    """A host is there and takes machines (also: again, after a restart or after it was lost)."""

    host_id: HostId
    boot_id: str
    driver: str
    fingerprint: str
    capacity: HostCapacity
    registered_at: datetime


class HostDraining(msgspec.Struct, frozen=True, kw_only=True, tag="host-draining.v1"):
    """A host takes no new machines."""

    host_id: HostId
    reason: str
    requested_at: datetime


class HostUndrained(msgspec.Struct, frozen=True, kw_only=True, tag="host-undrained.v1"):
    """A host takes new machines again."""

    host_id: HostId
    requested_at: datetime


class HostLost(msgspec.Struct, frozen=True, kw_only=True, tag="host-lost.v1"):
    """A host was declared lost; `last_seen_at` is its last heartbeat."""

    host_id: HostId
    boot_id: str
    last_seen_at: datetime
    declared_at: datetime


HostEvent = HostRegistered | HostDraining | HostUndrained | HostLost


class VmObservation(msgspec.Struct, frozen=True, kw_only=True):
    """One machine as its host sees it now; `session_id` and `incarnation` as the claim said, None when unknown."""

    vm_id: VmId
    session_id: SessionId | None
    incarnation: int | None
    state: Literal["starting", "running", "suspending", "quarantined", "unknown"]


class HostHeartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="host-heartbeat.v1"):
    """`obs.system.vm-host.heartbeat.<host id>`: a sign of life with the whole inventory; never an event of the log."""

    host_id: HostId
    boot_id: str
    observed_at: datetime
    vms: list[VmObservation]

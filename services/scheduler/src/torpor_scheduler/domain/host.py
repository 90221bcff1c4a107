"""A host's life: its states, transitions and decisions; pure."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Final, assert_never

import msgspec
from msgspec.structs import replace

from torpor_contracts.errors import InvariantViolation, Rejected
from torpor_contracts.host import (
    DeclareHostLost,
    DrainHost,
    HostCapacity,
    HostCommand,
    HostDraining,
    HostEvent,
    HostLost,
    HostRegistered,
    HostUndrained,
    RegisterHost,
    UndrainHost,
)
from torpor_contracts.ids import HostId, is_token

CAPACITY_MAX: Final = 2**31
"""More than any machine offers, and less than what a view's sums can hold."""


class HostPhase(StrEnum):
    """Whether anybody hears of the host."""

    ABSENT = "absent"
    UP = "up"
    LOST = "lost"


H = HostPhase

HOST_TRANSITIONS: Final[Mapping[HostPhase, Mapping[type[msgspec.Struct], HostPhase]]] = {
    H.ABSENT: {HostRegistered: H.UP},
    H.UP: {HostRegistered: H.UP, HostDraining: H.UP, HostUndrained: H.UP, HostLost: H.LOST},
    H.LOST: {HostRegistered: H.UP, HostDraining: H.LOST, HostUndrained: H.LOST},
}
"""Phase -> type of event -> the phase after it; what is not here cannot happen."""


class Host(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A host as folded from its events. It drains until told otherwise, also after a restart."""

    phase: HostPhase = HostPhase.ABSENT
    host_id: HostId = HostId("")
    version: int = 0
    boot_id: str = ""
    driver: str = ""
    fingerprint: str = ""
    capacity: HostCapacity = HostCapacity(vcpus=0, memory_mib=0, disk_mib=0, vms_max=0)
    draining: bool = False
    registered_at: datetime | None = None


ABSENT_HOST: Final = Host()
"""The state of a host nobody has heard of."""


class HostContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision needs beside the state. `seen_at`: the last heartbeat of the host's present boot, if any."""

    now: datetime
    seen_at: datetime | None


def evolve_host(host: Host, event: HostEvent) -> Host:
    """The state after `event`; raises `InvariantViolation` for what the table does not allow."""
    phase = HOST_TRANSITIONS[host.phase].get(type(event))
    if phase is None:
        raise InvariantViolation(f"host {host.host_id or '?'}: {type(event).__name__} cannot happen when {host.phase}")
    host = replace(host, phase=phase, version=host.version + 1)
    match event:
        case HostRegistered():
            return replace(
                host,
                host_id=event.host_id,
                boot_id=event.boot_id,
                driver=event.driver,
                fingerprint=event.fingerprint,
                capacity=event.capacity,
                registered_at=event.registered_at,
            )
        case HostDraining():
            return replace(host, draining=True)
        case HostUndrained():
            return replace(host, draining=False)
        case HostLost():
            return host
        case _ as never:
            assert_never(never)


def decide_host(host: Host, command: HostCommand, host_id: HostId, context: HostContext) -> list[HostEvent]:
    """What a command makes happen to a host; nothing when it is a repeat or out of date."""
    match command:
        case RegisterHost():
            return _register(host, command, host_id, context.now)
        case DrainHost():
            _require_known(host, host_id)
            if host.draining:
                raise Rejected("already-draining", f"host {host_id} drains already", "nothing is left to do")
            return [HostDraining(host_id=host_id, reason=command.reason, requested_at=context.now)]
        case UndrainHost():
            _require_known(host, host_id)
            if not host.draining:
                raise Rejected("not-draining", f"host {host_id} does not drain", "nothing is left to do")
            return [HostUndrained(host_id=host_id, requested_at=context.now)]
        case DeclareHostLost():
            return _declare_lost(host, command, host_id, context)
        case _ as never:
            assert_never(never)


def _register(host: Host, command: RegisterHost, host_id: HostId, now: datetime) -> list[HostEvent]:
    _check_registration(command)
    offered = (command.boot_id, command.driver, command.fingerprint, command.capacity)
    if host.phase is HostPhase.UP and offered == (host.boot_id, host.driver, host.fingerprint, host.capacity):
        return []
    return [
        HostRegistered(
            host_id=host_id,
            boot_id=command.boot_id,
            driver=command.driver,
            fingerprint=command.fingerprint,
            capacity=command.capacity,
            registered_at=now,
        )
    ]


def _check_registration(command: RegisterHost) -> None:
    capacity = command.capacity
    sizes = (capacity.vcpus, capacity.memory_mib, capacity.disk_mib, capacity.vms_max)
    if any(not 1 <= size <= CAPACITY_MAX for size in sizes):
        raise Rejected(
            "illegal-capacity", "every size of a host is between 1 and 2^31", "set the host's capacity in its settings"
        )
    if not (is_token(command.boot_id) and command.driver and command.fingerprint):
        raise Rejected(
            "illegal-registration", "a boot id is a token; driver and fingerprint are not empty", "correct the host"
        )


def _declare_lost(host: Host, command: DeclareHostLost, host_id: HostId, context: HostContext) -> list[HostEvent]:
    """A heartbeat that came between the watcher's look and this decision keeps the host."""
    if host.phase is not HostPhase.UP or host.boot_id != command.boot_id:
        return []
    if context.seen_at is not None and context.seen_at > command.last_seen_at:
        return []
    return [
        HostLost(
            host_id=host_id,
            boot_id=command.boot_id,
            last_seen_at=command.last_seen_at,
            declared_at=context.now,
        )
    ]


def _require_known(host: Host, host_id: HostId) -> None:
    if host.phase is HostPhase.ABSENT:
        raise Rejected("host-not-found", f"no host {host_id} has registered", "see the list of hosts")

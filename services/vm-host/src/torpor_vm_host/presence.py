"""Tells the scheduler that this host is there: registers it, and sends a sign of life with the whole inventory."""

import logging
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from torpor_contracts.errors import Transient
from torpor_contracts.host import HostHeartbeat, HostLost, HostRegistered, RegisterHost, VmObservation
from torpor_contracts.ids import SYSTEM_TENANT, CommandId
from torpor_contracts.replies import Reply
from torpor_eventlog.port import Recorded
from torpor_messaging import subjects
from torpor_messaging.ports import OutgoingCommand
from torpor_messaging.service_ports import ServicePorts
from torpor_vm_host.domain.vm import Claimed, Quarantined, Running, Suspending, VmState, claim_of
from torpor_vm_host.hosting import Hosting
from torpor_vm_host.ports import DriverError, PresentVm

CALL_S: Final = 5.0
KNOWN_ALREADY: Final = "ignored"
"""The code with which a registration is answered that changes nothing."""

REPLACED_PAUSE_S_MAX: Final = 60.0
PAUSE_S: Final = 0.25
PAUSE_S_MAX: Final = 15.0

_log: Final = logging.getLogger(__name__)


class Presence:
    """Registers the host until that is accepted, then sends heartbeats."""

    def __init__(self, hosting: Hosting, fingerprint: str, ports: ServicePorts) -> None:
        self._hosting = hosting
        self._fingerprint = fingerprint
        self._ports = ports
        self.registered = False
        """Whether the scheduler has accepted this boot, and has not called it lost since."""
        self._registration = f"register-{hosting.host.boot_id}"
        self._registered_at = 0
        self._other_at = 0
        self._replaced = 0
        self._tries = 0
        self._next_try_s = 0.0

    async def register(self) -> None:
        """Ask to be registered, if the host is not and it is time to ask again."""
        clock = self._ports.clock
        if self.registered or clock.monotonic_s() < self._next_try_s:
            return
        why = await self._refused()
        if why is None:
            self.registered, self._tries = True, 0
            _log.info("registered as %s, boot %s", self._hosting.host.host_id, self._hosting.host.boot_id)
            if self._registered_at < self._other_at:
                self._replace()  # the answer came after the news
            return
        pause_s = min(PAUSE_S * 2.0**self._tries, PAUSE_S_MAX)
        self._tries = min(self._tries + 1, 16)
        self._next_try_s = clock.monotonic_s() + pause_s
        _log.warning("not registered, asked again in %g s: %s", pause_s, why)

    async def heard(self, event: Any, recorded: Recorded) -> None:
        """What the log says of this host: given up although it is there, or registered under another boot since.

        That is an earlier process's command that came late, or another host under the same id: so it is answered
        less and less often.
        """
        host = self._hosting.host
        if event.host_id != host.host_id or recorded.position <= self._registered_at:
            return
        if isinstance(event, HostLost) and event.boot_id == host.boot_id:
            _log.warning("declared lost while alive; registering again")
            self._register_again(recorded.position, 0.0)
        elif isinstance(event, HostRegistered) and event.boot_id != host.boot_id:
            self._other_at = recorded.position
            if self.registered:
                self._replace()

    def _replace(self) -> None:
        pause_s = min(PAUSE_S * 4.0**self._replaced, REPLACED_PAUSE_S_MAX)
        self._replaced = min(self._replaced + 1, 16)
        _log.warning(
            "%s was registered under another boot after this one; registering again in %g s. If that goes on, two "
            "hosts have the same TORPOR_VM_HOST_HOST_ID: give each its own",
            self._hosting.host.host_id,
            pause_s,
        )
        self._register_again(self._other_at, pause_s)

    def _register_again(self, position: int, pause_s: float) -> None:
        self._registration = f"register-{self._hosting.host.boot_id}-{position}"
        self.registered, self._next_try_s = False, self._ports.clock.monotonic_s() + pause_s

    async def heartbeat(self) -> None:
        """Say what is here, once the host is registered. Nobody answers; the next one is soon."""
        if not self.registered:
            return
        host, clock = self._hosting.host, self._ports.clock
        try:
            present = await self._hosting.driver.machines()
        except DriverError as error:
            # Without an inventory there is no sign of life: a host that cannot see its machines is not well.
            _log.warning("no heartbeat, the machines cannot be looked at: %s", error)
            return
        beat = HostHeartbeat(
            host_id=host.host_id, boot_id=host.boot_id, observed_at=clock.now(), vms=self._inventory(present)
        )
        subject = subjects.observation(SYSTEM_TENANT, "vm-host", "heartbeat", host.host_id)
        try:
            await self._ports.bus.publish(subject, msgspec.json.encode(beat))
        except Transient as error:
            _log.warning("no heartbeat: %s", error)

    async def _refused(self) -> str | None:
        """Why the host is not registered; None when it is."""
        host = self._hosting.host
        command = OutgoingCommand(
            tenant_id=SYSTEM_TENANT,
            service="scheduler",
            target=host.host_id,
            command=RegisterHost(
                boot_id=host.boot_id,
                driver=self._hosting.driver.name,
                fingerprint=self._fingerprint,
                capacity=self._hosting.capacity,
            ),
            command_id=CommandId(self._registration),
        )
        try:
            reply = msgspec.json.decode(await self._ports.bus.call(command, CALL_S), type=Reply)
        except Transient as error:
            return str(error)
        except msgspec.MsgspecError as error:
            return f"the answer is no reply: {error}"
        if reply.receipt is not None:
            self._registered_at = reply.receipt.position
        if reply.refusal is not None and reply.refusal.code != KNOWN_ALREADY:
            return f"{reply.refusal.code}: {reply.refusal.message} ({reply.refusal.advice})"
        return None

    def _inventory(self, present: list[PresentVm]) -> list[VmObservation]:
        known = self._hosting.ledger.known
        here = {one.vm_id: one for one in present}
        waiting = [vm_id for vm_id, state in known.items() if isinstance(state, Claimed | Suspending)]
        return [
            _observation(known[vm_id], here.get(vm_id)) if vm_id in known else _unknown(here[vm_id])
            for vm_id in sorted({*here, *waiting})
        ]


def _unknown(vm: PresentVm) -> VmObservation:
    return VmObservation(vm_id=vm.vm_id, session_id=vm.session_id, incarnation=vm.incarnation, state="unknown")


def _observation(state: VmState, present: PresentVm | None) -> VmObservation:
    """A machine that the log knows; one that is over for the log is nobody's while it is still here."""
    claim, name = claim_of(state), _NAMES.get(type(state))
    if claim is not None and name is not None:
        return VmObservation(vm_id=claim.vm_id, session_id=claim.session_id, incarnation=claim.incarnation, state=name)
    assert present is not None, "what is not here is listed only while it starts or is suspended"
    unknown = _unknown(present)
    return unknown if name is None else msgspec.structs.replace(unknown, state=name)


_NAMES: Final[Mapping[type[msgspec.Struct], Literal["starting", "running", "suspending", "quarantined"]]] = {
    Claimed: "starting",
    Running: "running",
    Suspending: "suspending",
    Quarantined: "quarantined",
}

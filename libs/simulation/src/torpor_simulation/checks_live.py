"""Laws that must hold at every moment: checked at each commit, and at everything that happens to a machine."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from torpor_chunks.memory import MemoryChunks
from torpor_contracts.checkpoint import CheckpointFreed, CheckpointRecorded
from torpor_contracts.host import HostLost, HostRegistered
from torpor_contracts.ids import SYSTEM_TENANT, CheckpointId, VmId
from torpor_contracts.session import SessionLost
from torpor_contracts.vm import ResourceRef, VmClaimed, VmReaped, VmReleased, VmStarted, VmStopped, VmSuspended
from torpor_eventlog.port import Recorded
from torpor_scheduler.domain.session import Phase
from torpor_simulation.history import Violation
from torpor_simulation.hypervisor import Host, Sighting
from torpor_simulation.sessions import Sessions
from torpor_vm_host.adapters.simulated.bases import FILE
from torpor_vm_host.adapters.simulated.parts import Devices
from torpor_vm_host.bases import label_of


class LiveChecks:
    """Compares, at each step, what the log says of machines with what they are."""

    def __init__(
        self,
        hosts: Mapping[str, Host],
        chunks: MemoryChunks,
        sessions: Sessions,
        violated: Callable[[Violation], None],
    ) -> None:
        self._sessions = sessions
        self._hosts = hosts
        self._chunks = chunks
        self._violated = violated
        self.held: dict[tuple[VmId, str], set[ResourceRef]] = {}
        """What is claimed and not released, by machine and host."""
        self.hosts_up: dict[str, bool] = {}
        """Whether each host that ever registered is there, as the log has it."""
        self._checkpoints: dict[CheckpointId, CheckpointRecorded] = {}
        self._machines: dict[VmId, Sighting] = {}
        self._spawned: set[tuple[str, str]] = set()
        self._died: set[VmId] = set()
        self._existed: set[VmId] = set()

    @property
    def machines(self) -> Mapping[VmId, Sighting]:
        """The machines that exist now, on all hosts."""
        return self._machines

    def seen(self, sighting: Sighting) -> None:
        """Look at what has just happened to a machine."""
        match sighting.what:
            case "created":
                self._created(sighting)
            case "planted":
                self._machines[sighting.vm_id] = sighting
            case "deleted":
                self._machines.pop(sighting.vm_id, None)
            case "died" | "ruined":
                self._died.add(sighting.vm_id)
                if sighting.what == "died":
                    self._machines.pop(sighting.vm_id, None)
            case "spawned":
                self._spawn(sighting)
            case _:
                raise AssertionError(f"nobody knows what {sighting.what!r} is")

    def _created(self, sighting: Sighting) -> None:
        if not self.held.get((sighting.vm_id, sighting.host_id)):
            self._violate("claimed-first", f"{sighting.vm_id} exists on {sighting.host_id} and is not claimed there")
        for other in self._machines.values():
            if (other.session_id, other.incarnation) == (sighting.session_id, sighting.incarnation):
                self._violate(
                    "one-live-vm",
                    f"{sighting.vm_id} and {other.vm_id} are both {sighting.session_id}/{sighting.incarnation}",
                )
        self._machines[sighting.vm_id] = sighting
        self._existed.add(sighting.vm_id)

    def _spawn(self, sighting: Sighting) -> None:
        key = (str(sighting.session_id), str(sighting.exec_id))
        if key in self._spawned:
            self._violate("exec-once", f"{key} was started in a guest for the second time, in {sighting.vm_id}")
        self._spawned.add(key)

    def committed(self, row: Recorded, event: Any) -> None:
        """Look at an event that has just been committed."""
        match event:
            case VmClaimed():
                self.held.setdefault((event.vm_id, event.host_id), set()).update(event.resources)
            case VmStarted():
                # It may have died while the event was on its way: what was seen did happen.
                if event.vm_id not in self._existed:
                    self._violate("observed", f"{event.vm_id} is said to run at {row.position} and never existed")
            case VmStopped() | VmReaped() | VmSuspended():
                self._ended(event, row)
            case VmReleased():
                self._released(event, row)
            case HostRegistered() | HostLost():
                self.hosts_up[event.host_id] = isinstance(event, HostRegistered)
            case CheckpointRecorded() | CheckpointFreed():
                self._stored(event)
            case SessionLost():
                self._lost(event, row)
            case _:
                pass

    def _stored(self, event: CheckpointRecorded | CheckpointFreed) -> None:
        if isinstance(event, CheckpointRecorded):
            self._checkpoints[event.checkpoint_id] = event
            self._loadable_elsewhere(event)
        else:
            self._checkpoints.pop(event.checkpoint_id, None)

    def _loadable_elsewhere(self, event: CheckpointRecorded) -> None:
        """What the checkpoint builds on is in the store: its own host may burn down the next moment."""
        devices = self._chunks.content(event.tenant_id, event.manifest.packs[0].address, "devices")
        if devices is None:
            return  # it was damaged, or freed already; others look at that
        base = msgspec.json.decode(devices, type=Devices).base
        address = self._chunks.labels.get((SYSTEM_TENANT, label_of(base)))
        if address is None or self._chunks.content(SYSTEM_TENANT, address, FILE) is None:
            self._violate("loadable-elsewhere", f"{event.checkpoint_id} builds on {base}, which is not in the store")

    def _lost(self, event: SessionLost, row: Recorded) -> None:
        alive = event.vm_id in self._machines and event.vm_id not in self._died
        if alive and self.hosts_up.get(event.host_id) and "host" not in event.cause:
            self._violate(
                "lost-truly", f"{row.stream} is called lost at {row.position}: {event.cause}; its machine runs"
            )

    def _ended(self, event: VmStopped | VmReaped | VmSuspended, row: Recorded) -> None:
        if event.vm_id in self._machines:
            self._violate("observed", f"{event.vm_id} is said to be gone at {row.position} and exists")
        match event:
            case VmSuspended():
                self._restorable(event, row)
            case VmReaped():
                self._nobodys(event, row)
            case VmStopped() if not event.expected and event.vm_id not in self._died:
                self._violate("unasked", f"{event.vm_id} was ended by its host at {row.position}, nobody asked")
            case _:
                pass

    def _nobodys(self, event: VmReaped, row: Recorded) -> None:
        for session_id, session in self._sessions.folded.items():
            machine = session.machine
            if machine is not None and machine.vm_id == event.vm_id and session.phase is not Phase.TERMINATING:
                self._violate("nobodys", f"{event.vm_id} was reaped at {row.position} and is {session_id}'s")

    def _restorable(self, event: VmSuspended, row: Recorded) -> None:
        recorded = self._checkpoints.get(event.checkpoint_id)
        if recorded is None:
            self._violate(
                "restorable", f"{event.checkpoint_id} is not registered, its machine is gone at {row.position}"
            )
            return
        address = recorded.manifest.packs[0].address
        missing = [
            part.kind
            for part in recorded.manifest.parts
            if self._chunks.content(recorded.tenant_id, address, part.kind) is None
        ]
        if missing:
            self._violate("restorable", f"{event.checkpoint_id} has no {missing} in the store at {row.position}")

    def _released(self, event: VmReleased, row: Recorded) -> None:
        host = self._hosts[event.host_id]
        for resource in event.resources:
            name = resource.name
            if name.startswith("machines/") and VmId(name.removeprefix("machines/")) in host.machines.kept:
                self._violate("released-after", f"{name} is said to be released at {row.position} and exists")
            if resource.kind == "directory" and (host.root / name).exists():
                self._violate("released-after", f"{name} is said to be released at {row.position} and exists")
        self.held.get((event.vm_id, event.host_id), set()).difference_update(event.resources)

    def _violate(self, checker: str, detail: str) -> None:
        self._violated(Violation(checker, detail))

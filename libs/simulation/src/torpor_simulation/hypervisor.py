"""Simulated hosts: machines that outlive the vm-host that drives them, and what may go wrong with driving them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from torpor_chunks.memory import MemoryChunks
from torpor_chunks.port import Inspected, NoSpace, PackAddress, PartSource, PresentPack, Stored, WantedPart
from torpor_contracts.checkpoint import CheckpointManifest
from torpor_contracts.errors import Rejected
from torpor_contracts.host import HostCapacity
from torpor_contracts.ids import CheckpointId, ExecId, SessionId, TenantId, VmId
from torpor_contracts.session import ExecSpec
from torpor_contracts.vm import ResourceRef
from torpor_messaging.ports import Clock
from torpor_simulation.process import Process
from torpor_simulation.surroundings import Surroundings
from torpor_vm_host.adapters.simulated.bases import HostBases
from torpor_vm_host.adapters.simulated.driver import SimulatedDriver, Timing
from torpor_vm_host.adapters.simulated.machine import Machine
from torpor_vm_host.adapters.simulated.stores import MemoryMachines
from torpor_vm_host.adapters.workspace import DirectoryWorkspace
from torpor_vm_host.ports import (
    CheckpointFiles,
    DriverError,
    ExecOutcome,
    LiveCheckpoint,
    OnOutput,
    OnPause,
    PartFile,
    TakenCheckpoint,
    VmSpec,
)

T = TypeVar("T")


@dataclass
class DriverFaults:
    """How often a driver, or the store of checkpoint parts, fails. Probabilities are per call."""

    start_failed: float = 0.0
    checkpoint_failed: float = 0.0
    destroy_failed: float = 0.0
    no_space: float = 0.0

    def calm(self) -> None:
        """Stop failing."""
        self.start_failed = self.checkpoint_failed = self.destroy_failed = self.no_space = 0.0


@dataclass
class Sighting:
    """What happened to a machine: `created`, `planted`, `deleted`, `died`, `ruined`, or it `spawned` a program."""

    what: str
    host_id: str
    vm_id: VmId
    session_id: SessionId | None = None
    incarnation: int | None = None
    exec_id: ExecId | None = None


class HostMachines(MemoryMachines):
    """The machines of one host as they really are; `seen` is told of everything that happens to them."""

    def __init__(self, host_id: str, seen: Callable[[Sighting], None]) -> None:
        super().__init__()
        self.host_id = host_id
        self._seen = seen
        self._programs: dict[VmId, set[ExecId]] = {}

    async def create(self, machine: Machine) -> None:
        """Keep a new machine; programs it has already came with its checkpoint."""
        self._seen(Sighting("created", self.host_id, machine.vm_id, machine.session_id, machine.incarnation))
        self._programs[machine.vm_id] = set(machine.processes)
        await super().create(machine)

    async def save(self, machine: Machine) -> None:
        """Keep its state; a program that was not there before has just been started in the guest."""
        await super().save(machine)
        known = self._programs.setdefault(machine.vm_id, set())
        for exec_id in machine.processes:
            if exec_id not in known:
                self._seen(
                    Sighting("spawned", self.host_id, machine.vm_id, machine.session_id, machine.incarnation, exec_id)
                )
        self._programs[machine.vm_id] = set(machine.processes)

    async def delete(self, vm_id: VmId) -> None:
        """The machine is no more."""
        if self.kept.pop(vm_id, None) is not None:
            self._seen(Sighting("deleted", self.host_id, vm_id))

    def vanish(self, vm_id: VmId) -> None:
        """End a machine without anybody having asked."""
        if self.kept.pop(vm_id, None) is not None:
            self._seen(Sighting("died", self.host_id, vm_id))

    def vanish_all(self) -> None:
        """End every machine at once."""
        for vm_id in sorted(self.kept):
            self.vanish(vm_id)

    def plant(self, machine: Machine) -> None:
        """Let a machine be there that no driver has started."""
        self.kept[machine.vm_id] = msgspec.json.encode(machine)
        self._seen(Sighting("planted", self.host_id, machine.vm_id, machine.session_id, machine.incarnation))

    def ruin(self, vm_id: VmId) -> None:
        """Leave a machine that can never run again."""
        if vm_id in self.kept:
            self.kept[vm_id] = b"ruined"
            self._seen(Sighting("ruined", self.host_id, vm_id))


@dataclass
class Host:
    """A machine that runs machines. `lock` is the process that works on its disk now."""

    host_id: str
    root: Path
    machines: HostMachines
    lock: list[Process] = field(default_factory=list)


class LivingMachines:
    """A host's machines for one vm-host process: a dead one can do nothing to them any more."""

    def __init__(self, machines: HostMachines, process: Process) -> None:
        self._machines = machines
        self._process = process

    async def create(self, machine: Machine) -> None:
        """See `Machines.create`."""
        self._process.check()
        await self._machines.create(machine)

    async def save(self, machine: Machine) -> None:
        """See `Machines.save`."""
        self._process.check()
        await self._machines.save(machine)

    async def load(self, vm_id: VmId) -> Machine:
        """See `Machines.load`."""
        self._process.check()
        return await self._machines.load(vm_id)

    async def delete(self, vm_id: VmId) -> None:
        """See `Machines.delete`."""
        self._process.check()
        await self._machines.delete(vm_id)

    async def exists(self, vm_id: VmId) -> bool:
        """See `Machines.exists`."""
        self._process.check()
        return await self._machines.exists(vm_id)

    async def ids(self) -> set[VmId]:
        """See `Machines.ids`."""
        self._process.check()
        return await self._machines.ids()


class FaultyDriver(SimulatedDriver):
    """Production's simulated driver, with a fault point before and after each call that changes something."""

    def __init__(
        self, host: Host, clock: Clock, around: Surroundings, faults: DriverFaults, capacity: HostCapacity
    ) -> None:
        super().__init__(
            LivingMachines(host.machines, around.process),
            clock,
            timing=Timing(start_s=0.05, checkpoint_s=0.05),
            capacity=capacity,
            offload=living(around.process),
            bases=HostBases(host.root / "bases", host.host_id.encode()),
        )
        self._around = around
        self._faults = faults

    async def start(self, spec: VmSpec, checkpoint: CheckpointFiles | None) -> None:
        """Start, or fail before anything was acquired, or after."""
        self._strike("driver.start")
        self._fail("boot-failed", self._faults.start_failed / 2)
        await super().start(spec, checkpoint)
        self._fail("agent-silent", self._faults.start_failed / 2)
        self._strike("driver.started")

    async def receive(self, name: str, directory: Path) -> None:
        """Have what another host's checkpoints build on."""
        self._strike("driver.receive")
        await super().receive(name, directory)
        self._strike("driver.received")

    async def checkpoint(self, vm_id: VmId, directory: Path) -> list[PartFile]:
        """Write the checkpoint, or fail before or after the machine was paused."""
        self._strike("driver.checkpoint")
        self._fail("checkpoint-failed", self._faults.checkpoint_failed / 2)
        parts = await super().checkpoint(vm_id, directory)
        self._fail("checkpoint-failed", self._faults.checkpoint_failed / 2)
        self._strike("driver.checkpointed")
        return parts

    async def checkpoint_live(self, vm_id: VmId, directory: Path, at_pause: OnPause) -> LiveCheckpoint:
        """Capture the machine while it runs, or fail before or after that, or die while it stands still."""

        async def struck() -> None:
            self._strike("driver.paused")
            await at_pause()

        self._strike("driver.checkpoint-live")
        self._fail("checkpoint-failed", self._faults.checkpoint_failed / 2)
        live = await super().checkpoint_live(vm_id, directory, struck)
        self._fail("checkpoint-failed", self._faults.checkpoint_failed / 2)
        self._strike("driver.captured")
        return live

    async def destroy(self, vm_id: VmId) -> None:
        """End the machine."""
        self._strike("driver.destroy")
        self._fail("destroy-failed", self._faults.destroy_failed)
        await super().destroy(vm_id)
        self._strike("driver.destroyed")

    async def resume(self, vm_id: VmId) -> None:
        """Let it run on."""
        self._strike("driver.resume")
        await super().resume(vm_id)
        self._strike("driver.resumed")

    async def freeze(self, vm_id: VmId) -> None:
        """Freeze it."""
        self._strike("driver.freeze")
        await super().freeze(vm_id)
        self._strike("driver.frozen")

    async def exec(self, vm_id: VmId, exec_id: ExecId, program: ExecSpec, on_output: OnOutput) -> ExecOutcome:
        """Run a program."""
        self._strike("driver.exec")
        outcome = await super().exec(vm_id, exec_id, program, on_output)
        self._strike("driver.exec-ended")
        return outcome

    def _strike(self, point: str) -> None:
        self._around.faults.strike(self._around.process, point)

    def _fail(self, code: str, probability: float) -> None:
        if self._around.network.chance(probability):
            self._around.note("driver-fault", code)
            raise DriverError(code, "a fault of the simulated world", retryable=True)


class HostWorkspace(DirectoryWorkspace):
    """Production's workspace on a real directory, without a thread, locked by a process of the world."""

    def __init__(self, host: Host, process: Process) -> None:
        super().__init__(host.root, offload=living(process))
        self._host = host
        self._process = process

    async def lock(self) -> None:
        """See `Workspace.lock`: the lock of a dead process is nobody's."""
        self._process.check()
        if any(holder.alive and holder is not self._process for holder in self._host.lock):
            raise Rejected("host-busy", f"another vm-host works on {self._host.host_id}", "stop it first")
        self._host.lock[:] = [self._process]

    async def unlock(self) -> None:
        """See `Workspace.unlock`."""
        if self._process in self._host.lock:
            self._host.lock.clear()

    async def write_manifest(self, vm_id: VmId, checkpoint_id: CheckpointId, manifest: CheckpointManifest) -> None:
        """See `Workspace.write_manifest`."""
        self._process.check()
        await super().write_manifest(vm_id, checkpoint_id, manifest)

    async def write_taken(self, vm_id: VmId, checkpoint_id: CheckpointId, taken: TakenCheckpoint) -> None:
        """See `Workspace.write_taken`."""
        self._process.check()
        await super().write_taken(vm_id, checkpoint_id, taken)

    async def remaining(self, resources: Sequence[ResourceRef]) -> list[ResourceRef]:
        """See `Workspace.remaining`."""
        self._process.check()
        return await super().remaining(resources)


class FaultyChunks:
    """The world's one chunk store, for one process."""

    def __init__(self, durable: MemoryChunks, around: Surroundings, faults: DriverFaults) -> None:
        self._durable = durable
        self._around = around
        self._faults = faults

    async def put(self, tenant_id: TenantId, parts: Sequence[PartSource], *, onto: PackAddress | None = None) -> Stored:
        """See `ChunkStore.put`; the disk may be full."""
        self._around.faults.strike(self._around.process, "chunks.put")
        if self._around.network.chance(self._faults.no_space):
            raise NoSpace("the simulated disk is full")
        stored = await self._durable.put(tenant_id, parts, onto=onto)
        self._around.faults.strike(self._around.process, "chunks.stored")
        return stored

    async def fetch(self, tenant_id: TenantId, address: str, wanted: Sequence[WantedPart]) -> None:
        """See `ChunkStore.fetch`."""
        self._around.faults.strike(self._around.process, "chunks.fetch")
        await self._durable.fetch(tenant_id, address, wanted)

    async def inspect(self, tenant_id: TenantId, address: str) -> Inspected:
        """See `ChunkStore.inspect`."""
        self._around.process.check()
        return await self._durable.inspect(tenant_id, address)

    async def verify(self, tenant_id: TenantId, address: str) -> Stored:
        """See `ChunkStore.verify`."""
        self._around.process.check()
        return await self._durable.verify(tenant_id, address)

    async def delete(self, tenant_id: TenantId, address: str) -> bool:
        """See `ChunkStore.delete`."""
        self._around.faults.strike(self._around.process, "chunks.delete")
        was_there = await self._durable.delete(tenant_id, address)
        self._around.faults.strike(self._around.process, "chunks.deleted")
        return was_there

    async def present(self, tenant_id: TenantId, shard: int) -> list[PresentPack]:
        """See `ChunkStore.present`."""
        self._around.process.check()
        return await self._durable.present(tenant_id, shard)

    async def label(self, tenant_id: TenantId, name: str) -> PackAddress | None:
        """See `ChunkStore.label`."""
        self._around.process.check()
        return await self._durable.label(tenant_id, name)

    async def set_label(self, tenant_id: TenantId, name: str, address: PackAddress) -> PackAddress:
        """See `ChunkStore.set_label`."""
        self._around.process.check()
        return await self._durable.set_label(tenant_id, name, address)

    async def labelled(self, tenant_id: TenantId) -> set[PackAddress]:
        """See `ChunkStore.labelled`."""
        self._around.process.check()
        return await self._durable.labelled(tenant_id)

    async def tenants(self) -> list[TenantId]:
        """See `ChunkStore.tenants`."""
        self._around.process.check()
        return await self._durable.tenants()


class living:  # noqa: N801  (reads as what it is: file work of a living process)
    """Runs file work at once, without a thread, and none for a dead process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def __call__(self, work: Callable[[], T]) -> T:
        """The result of `work`."""
        self._process.check()
        return work()

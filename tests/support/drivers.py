"""Drivers for the contract suite: how each is made, and what its guest calls the few programs the suite needs."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torpor_chunks.offload import in_thread, inline
from torpor_contracts.ids import CheckpointId, ExecId, SessionId, TenantId, VmId
from torpor_contracts.session import ExecSpec, MachineSpec
from torpor_messaging.system import SystemClock, SystemIds
from torpor_vm_host.adapters.simulated.bases import HostBases
from torpor_vm_host.adapters.simulated.driver import SimulatedDriver, Timing
from torpor_vm_host.adapters.simulated.stores import DirectoryMachines, Machines, MemoryMachines
from torpor_vm_host.ports import CheckpointFiles, Driver, DriverError, ExecOutcome, Output, PartFile, PresentVm, VmSpec


class DriverKit:
    """One kind of driver on one host. Every `driver()` is a new object over the same host."""

    name = "simulated on memory"
    start_s_max = 5.0
    machine = MachineSpec()
    not_shown: ClassVar[Mapping[str, str]] = {}
    """Tests of the suite that this kit cannot run, and why."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ids = SystemIds()
        self.apart = False
        self._machines: Machines = MemoryMachines()

    def driver(self) -> Driver:
        """A driver object."""
        timing = Timing(start_s=0.0, checkpoint_s=0.0)
        return SimulatedDriver(self._machines, SystemClock(), timing=timing, offload=inline, bases=self.bases())

    def bases(self) -> HostBases:
        """What checkpoints of simulated machines build on, another thing on each host."""
        return HostBases(self.root / "bases", bytes(self.root))

    def elsewhere(self) -> "DriverKit":
        """The same kind of driver on another host, which has nothing of this one; to be cleaned up for itself."""
        root = self.root / "elsewhere"
        root.mkdir()
        kit = type(self)(root)
        kit.apart = True
        return kit

    def spec(self, **changes: Any) -> VmSpec:
        """A machine to start, with a directory of its own."""
        vm_id = VmId(self.ids.new("vm"))
        directory = self.root / "vms" / vm_id
        directory.mkdir(parents=True)
        values: dict[str, Any] = {
            "vm_id": vm_id,
            "tenant_id": TenantId("acme"),
            "session_id": SessionId(self.ids.new("s")),
            "incarnation": 1,
            "machine": self.machine,
            "directory": directory,
        }
        return VmSpec(**(values | changes))

    def new_directory(self) -> Path:
        """An empty directory."""
        directory = self.root / self.ids.new("dir")
        directory.mkdir(parents=True)
        return directory

    def counting(self) -> ExecSpec:
        """A program that counts one up in the machine's memory and prints the number."""
        return ExecSpec(argv=["count"])

    def spoil_next_checkpoint(self, directory: Path) -> None:
        """Make a checkpoint into `directory` fail."""
        directory.rmdir()
        directory.write_bytes(b"a file where a directory should be")

    def clean_up(self) -> None:
        """End what a test left running outside the test's process."""


class DirectoryKit(DriverKit):
    """Simulated machines that are files."""

    name = "simulated on a directory"

    def driver(self) -> Driver:
        """A driver object."""
        machines = DirectoryMachines(self.root / "machines", offload=in_thread)
        timing = Timing(start_s=0.0, checkpoint_s=0.0)
        return SimulatedDriver(machines, SystemClock(), timing=timing, bases=self.bases())


class Taking:
    """Takes a program's output, and remembers it by offset as a careful reader would."""

    def __init__(self) -> None:
        self.stdout = b""
        self.stderr = b""
        self.taken: list[Output] = []
        self._next = 0

    async def __call__(self, output: Output) -> None:
        self.taken.append(output)
        new = output.data[max(0, self._next - output.offset) :]
        assert output.offset <= self._next, "bytes were left out"
        self._next += len(new)
        if output.stream == "stdout":
            self.stdout += new
        else:
            self.stderr += new


def files_of(checkpoint_id: Any, parts: Sequence[PartFile]) -> CheckpointFiles:
    """Parts as a start takes them."""
    return CheckpointFiles(checkpoint_id=checkpoint_id, files={part.kind: part.path for part in parts})


async def run_program(driver: Driver, vm_id: VmId, *argv: str, **spec: Any) -> tuple[ExecOutcome, Taking]:
    """Run a program to its end, under a new id, and let the guest forget it."""
    taking = Taking()
    exec_id = ExecId(SystemIds().new("x"))
    outcome = await driver.exec(vm_id, exec_id, ExecSpec(argv=list(argv), **spec), taking)
    await driver.forget(vm_id, exec_id)
    return outcome, taking


async def started(kit: DriverKit, driver: Driver, **changes: Any) -> VmSpec:
    """A running machine."""
    spec = kit.spec(**changes)
    await driver.start(spec, None)
    return spec


async def present(driver: Driver, vm_id: VmId) -> PresentVm | None:
    """The machine as its driver lists it."""
    return next((vm for vm in await driver.machines() if vm.vm_id == vm_id), None)


async def restored(kit: DriverKit, driver: Driver, spec: VmSpec, incarnation: int = 2) -> VmSpec:
    """Checkpoint a machine, end it, and start it again under a new identity."""
    parts = await driver.checkpoint(spec.vm_id, kit.new_directory())
    await driver.destroy(spec.vm_id)
    again = kit.spec(session_id=spec.session_id, incarnation=incarnation, machine=spec.machine)
    await driver.start(again, files_of(CheckpointId("ckp-1"), parts))
    return again


async def code_of(call: Awaitable[object]) -> str:
    """The code of the error that a call ends with."""
    try:
        await call
    except DriverError as error:
        return error.code
    raise AssertionError("it did what it should have refused")


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds in a guest."""
    async with asyncio.timeout(20):
        while not await holds():  # noqa: ASYNC110  (what is waited for happens in a guest, which sets no event)
            await asyncio.sleep(0.005)


def bounded(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario, a minute at most."""

    async def within() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(within())

"""The driver of simulated machines. It keeps nothing that matters: a machine is in the store, its time in the clock."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from torpor_chunks.offload import Offload, in_thread
from torpor_chunks.port import ChunkError
from torpor_contracts.host import HostCapacity
from torpor_contracts.ids import ExecId, VmId
from torpor_contracts.session import ExecSpec
from torpor_contracts.vm import ResourceRef
from torpor_eventlog.instants import to_us
from torpor_messaging.ports import Clock
from torpor_vm_host.adapters.simulated import guest
from torpor_vm_host.adapters.simulated.bases import HostBases
from torpor_vm_host.adapters.simulated.files import Live, SimulatedFiles
from torpor_vm_host.adapters.simulated.machine import End, Machine, Process
from torpor_vm_host.adapters.simulated.parts import FINGERPRINT, base_of, machine_from, refuse_unknown, write_parts
from torpor_vm_host.adapters.simulated.stores import MachineGone, Machines, MachineUnreadable
from torpor_vm_host.ports import (
    EXEC_UNKNOWN,
    VM_GONE,
    Base,
    CheckpointFiles,
    DriverError,
    ExecOutcome,
    LiveCheckpoint,
    OnOutput,
    OnPause,
    Output,
    PartFile,
    PresentExec,
    PresentVm,
    VmSpec,
)

CAPACITY: Final = HostCapacity(vcpus=1024, memory_mib=1024 * 1024, disk_mib=16 * 1024 * 1024, vms_max=1000)
"""What a host of simulated machines offers: they cost next to nothing."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How long a start and a checkpoint of a simulated machine take, seconds."""

    start_s: float = 0.02
    checkpoint_s: float = 0.02


class _Live:
    """A machine this driver object has in hand; only the holder of `lock` changes it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.lock = asyncio.Lock()
        self.changed = asyncio.Event()

    def notify(self) -> None:
        """Wake everybody who waits for a change."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class SimulatedDriver(SimulatedFiles):
    """See `torpor_vm_host.ports.Driver`."""

    name = "simulated"

    def __init__(
        self,
        machines: Machines,
        clock: Clock,
        *,
        timing: Timing | None = None,
        capacity: HostCapacity = CAPACITY,
        offload: Offload = in_thread,
        bases: HostBases | None = None,
    ) -> None:
        """`bases`: what checkpoints build on; without, they are whole by themselves."""
        self._machines = machines
        self._clock = clock
        self._timing = timing or Timing()
        self._capacity = capacity
        self._offload = offload
        self._bases = bases
        self._lives: dict[VmId, _Live] = {}

    async def fingerprint(self) -> str:
        """See `Driver.fingerprint`."""
        return FINGERPRINT

    async def capacity(self) -> HostCapacity:
        """See `Driver.capacity`."""
        return self._capacity

    def resources(self, spec: VmSpec) -> list[ResourceRef]:
        """See `Driver.resources`: the one thing such a machine is."""
        return [ResourceRef(kind="memory-file", name=f"machines/{spec.vm_id}")]

    async def remaining(self, resources: Sequence[ResourceRef]) -> list[ResourceRef]:
        """See `Driver.remaining`."""
        with _named():
            return [one for one in resources if await self._machines.exists(VmId(one.name.removeprefix("machines/")))]

    async def start(self, spec: VmSpec, checkpoint: CheckpointFiles | None) -> None:
        """See `Driver.start`."""
        refuse_unknown(spec.machine)
        machine = await self._offload(lambda: machine_from(spec, checkpoint))
        if checkpoint is None and self._bases is not None:
            machine.base = self._bases.own
        with _named():
            if machine.base and await self._base(machine.base) is None:
                raise DriverError("template-missing", f"there is no base {machine.base} here", retryable=False)
            if await self._machines.exists(spec.vm_id):
                raise DriverError("vm-exists", f"{spec.vm_id} exists already", retryable=False)
            await self._machines.create(machine)
        await self._clock.sleep(self._timing.start_s)
        async with self._holding(spec.vm_id) as live, self._changing(live):
            live.machine.run(self._now_us())

    async def bases(self) -> list[Base]:
        """See `Driver.bases`."""
        own = None if self._bases is None else await self._base(self._bases.own)
        return [] if own is None else [own]

    async def base_of(self, vm_id: VmId) -> Base | None:
        """See `Driver.base_of`."""
        async with self._holding(vm_id) as live:
            return await self._base(live.machine.base)

    async def lacking(self, checkpoint: CheckpointFiles) -> str | None:
        """See `Driver.lacking`."""
        name = await self._offload(lambda: base_of(checkpoint))
        return name if name and await self._base(name) is None else None

    async def receive(self, name: str, directory: Path) -> None:
        """See `Driver.receive`."""
        bases = self._bases
        if bases is not None:
            with _named():
                await self._offload(lambda: bases.receive(name, directory))

    async def adopt(self, vm_id: VmId) -> None:
        """See `Driver.adopt`."""
        async with self._holding(vm_id) as live:
            if live.machine.state != "running":
                raise DriverError("vm-not-running", f"{vm_id} is {live.machine.state}", retryable=False)

    async def machines(self) -> list[PresentVm]:
        """See `Driver.machines`."""
        with _named():
            present = await self._machines.ids()
        for vm_id in set(self._lives) - present:
            self._drop(vm_id)
        return [await self._present(vm_id) for vm_id in sorted(present)]

    async def freeze(self, vm_id: VmId) -> None:
        """See `Driver.freeze`."""
        async with self._holding(vm_id) as live, self._changing(live):
            live.machine.pause(self._now_us())

    async def checkpoint(self, vm_id: VmId, directory: Path) -> list[PartFile]:
        """See `Driver.checkpoint`."""
        async with self._holding(vm_id) as live:
            machine = live.machine
            if machine.state == "running":
                async with self._changing(live):
                    machine.generation += 1
                    machine.pause(self._now_us())
            await self._clock.sleep(self._timing.checkpoint_s)
            with _named():
                return await self._offload(lambda: write_parts(machine, directory))

    async def checkpoint_live(self, vm_id: VmId, directory: Path, at_pause: OnPause) -> LiveCheckpoint:
        """See `Driver.checkpoint_live`: the writing takes its time when the machine runs on."""
        async with self._holding(vm_id) as live:
            if live.machine.state != "running":
                raise DriverError("vm-not-running", f"{vm_id} is {live.machine.state}", retryable=True)
            began_us = self._now_us()
            async with self._changing(live):
                live.machine.generation += 1
                live.machine.pause(began_us)
            await at_pause()
            captured = msgspec.json.decode(msgspec.json.encode(live.machine), type=Machine)
            async with self._changing(live):
                live.machine.run(self._now_us())
            pause_ms = (self._now_us() - began_us) / 1000
        await self._clock.sleep(self._timing.checkpoint_s)
        with _named():
            return LiveCheckpoint(
                parts=await self._offload(lambda: write_parts(captured, directory)), pause_ms=pause_ms
            )

    async def resume(self, vm_id: VmId) -> None:
        """See `Driver.resume`."""
        async with self._holding(vm_id) as live:
            if live.machine.state == "paused":
                async with self._changing(live):
                    live.machine.run(self._now_us())

    async def destroy(self, vm_id: VmId) -> None:
        """See `Driver.destroy`."""
        with _named():
            await self._machines.delete(vm_id)
        self._drop(vm_id)

    async def exec(self, vm_id: VmId, exec_id: ExecId, program: ExecSpec, on_output: OnOutput) -> ExecOutcome:
        """See `Driver.exec`."""
        async with self._holding(vm_id) as live:
            if live.machine.state != "running":
                raise DriverError("vm-not-running", f"{vm_id} is {live.machine.state}", retryable=True)
            if exec_id in live.machine.processes:
                raise DriverError("exec-exists", f"the guest knows {exec_id} already", retryable=False)
            async with self._changing(live):
                guest.spawn(live.machine, exec_id, program, self._now_us())
        return await self._follow(vm_id, exec_id, on_output)

    async def attach(self, vm_id: VmId, exec_id: ExecId, on_output: OnOutput) -> ExecOutcome:
        """See `Driver.attach`."""
        return await self._follow(vm_id, exec_id, on_output)

    async def execs(self, vm_id: VmId) -> list[PresentExec]:
        """See `Driver.execs`."""
        async with self._holding(vm_id) as live:
            now_us = live.machine.paused_us or self._now_us()
            return [
                PresentExec(
                    exec_id=process.exec_id,
                    running=process.end is None,
                    remaining_s=max(0, process.times_out_us - now_us) / guest.US_PER_S,
                )
                for process in live.machine.processes.values()
            ]

    async def kill(self, vm_id: VmId, exec_id: ExecId, signal: int) -> None:
        """See `Driver.kill`."""
        async with self._holding(vm_id) as live, self._changing(live):
            guest.kill(self._process(live, exec_id), signal)

    async def forget(self, vm_id: VmId, exec_id: ExecId) -> None:
        """See `Driver.forget`."""
        async with self._holding(vm_id) as live:
            process = live.machine.processes.get(exec_id)
            if process is not None and process.end is not None:
                async with self._changing(live):
                    del live.machine.processes[exec_id]

    async def close(self) -> None:
        """See `Driver.close`."""
        for vm_id in list(self._lives):
            self._drop(vm_id)

    async def _base(self, name: str) -> Base | None:
        bases = self._bases
        with _named():
            return None if bases is None else await self._offload(lambda: bases.get(name))

    async def _follow(self, vm_id: VmId, exec_id: ExecId, on_output: OnOutput) -> ExecOutcome:
        while True:
            async with self._holding(vm_id) as live:
                process = self._process(live, exec_id)
                waiting = process.written[0] if process.written else None
                end, wait_s, changed = process.end, self._wait_s(live.machine, process), live.changed
            if waiting is not None:
                await on_output(Output(stream=waiting.stream, offset=waiting.offset, data=waiting.data))
                async with self._holding(vm_id) as live, self._changing(live):
                    guest.taken(self._process(live, exec_id), waiting.offset, self._now_us())
            elif end is not None:
                return _outcome(end, process.written_bytes)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await changed.wait()

    def _wait_s(self, machine: Machine, process: Process) -> float | None:
        due_us = process.due_us()
        if due_us is None or machine.state != "running":
            return None
        return max(0, due_us - self._now_us()) / guest.US_PER_S

    @asynccontextmanager
    async def _awake(self, vm_id: VmId) -> AsyncIterator[_Live]:
        """See `SimulatedFiles`."""
        while True:
            async with self._holding(vm_id) as live:
                if live.machine.state == "running":
                    yield live
                    return
                changed = live.changed
            await changed.wait()

    def _changing_it(self, live: Live) -> AbstractAsyncContextManager[None]:
        """See `SimulatedFiles`."""
        return self._changing(live)

    @asynccontextmanager
    async def _holding(self, vm_id: VmId) -> AsyncIterator[_Live]:
        """The machine as it is now, with nobody else changing it; raises `DriverError` when it is gone."""
        while True:
            live = await self._live(vm_id)
            async with live.lock:
                if self._lives.get(vm_id) is live:
                    guest.advance(live.machine, self._now_us())
                    yield live
                    return

    async def _live(self, vm_id: VmId) -> _Live:
        with _named():
            if not await self._machines.exists(vm_id):
                self._drop(vm_id)
                raise MachineGone(vm_id)
            if vm_id not in self._lives:
                machine = await self._machines.load(vm_id)
                self._lives.setdefault(vm_id, _Live(machine))
        return self._lives[vm_id]

    @asynccontextmanager
    async def _changing(self, live: Live) -> AsyncIterator[None]:
        """Keep what is done inside before anybody sees it; when that fails, what the store has is looked at again."""
        try:
            yield
            with _named():
                await self._machines.save(live.machine)
        except BaseException:
            self._drop(live.machine.vm_id)
            raise
        live.notify()

    def _process(self, live: Live, exec_id: ExecId) -> Process:
        process = live.machine.processes.get(exec_id)
        if process is None:
            raise DriverError(EXEC_UNKNOWN, f"the guest knows no program {exec_id}", retryable=False)
        return process

    async def _present(self, vm_id: VmId) -> PresentVm:
        live = self._lives.get(vm_id)
        try:
            machine = live.machine if live is not None else await self._machines.load(vm_id)
        except (MachineGone, MachineUnreadable) as error:
            return PresentVm(vm_id=vm_id, session_id=None, incarnation=None, state="dead", detail=str(error))
        return PresentVm(
            vm_id=vm_id, session_id=machine.session_id, incarnation=machine.incarnation, state=machine.state
        )

    def _drop(self, vm_id: VmId) -> None:
        live = self._lives.pop(vm_id, None)
        if live is not None:
            live.notify()

    def _now_us(self) -> int:
        return to_us(self._clock.now())


class _named:  # noqa: N801  (reads as what it does)
    """What the store of machines raises, as the errors of a driver."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        match error:
            case MachineGone():
                raise _gone(str(error)) from error
            case MachineUnreadable():
                raise DriverError("vm-unreadable", str(error), retryable=False) from error
            case ChunkError():
                raise DriverError(error.code, str(error), retryable=True) from error
            case _:
                return


def _gone(vm_id: str) -> DriverError:
    return DriverError(VM_GONE, f"there is no machine {vm_id}", retryable=False)


def _outcome(end: End, output_bytes: int) -> ExecOutcome:
    return ExecOutcome(outcome=end.outcome, exit_code=end.exit_code, detail=end.detail, output_bytes=output_bytes)

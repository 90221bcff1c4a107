"""A vm-host in virtual time, with a real snapshot store beside it; it can be killed at any call and started again."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.support.fakes import Published, RememberingTimers
from tests.support.points import PointedChunks, PointedDriver, PointedLog, Points, StickyWorkspace
from torpor_chunks.offload import inline
from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.guest import OPERATIONS
from torpor_contracts.ids import CheckpointId, CommandId, ExecId, SessionId, TenantId, VmId
from torpor_contracts.replies import Receipt, Refusal, Reply
from torpor_contracts.session import ExecSpec, MachineSpec
from torpor_contracts.vm import CheckpointVm, ExecVm, StartVm, StopVm, SuspendVm, VmClaimed
from torpor_eventlog.codec import decode_event
from torpor_eventlog.memory import MemoryDatabase, MemoryLog
from torpor_eventlog.views_memory import MemoryViewStore
from torpor_eventlog.views_port import Projection, ViewStore
from torpor_messaging import guest_messages
from torpor_messaging.ports import OutgoingCommand
from torpor_messaging.service import Incoming, Service
from torpor_messaging.service_ports import ServicePorts
from torpor_simulation.clock import SimClock, SimIds
from torpor_simulation.loop import VirtualLoop
from torpor_simulation.process import Process, ProcessKilled
from torpor_snapshot_store import assembly as snapshot_store
from torpor_snapshot_store.settings import SnapshotStoreSettings
from torpor_vm_host import assembly
from torpor_vm_host.adapters.simulated.bases import HostBases
from torpor_vm_host.adapters.simulated.driver import Timing
from torpor_vm_host.adapters.simulated.stores import MemoryMachines
from torpor_vm_host.settings import VmHostSettings

HOST = "host-a"
TENANT = TenantId("acme")
S = SessionId("s-1")
VM = VmId("vm-1")
X = ExecId("x-1")
CKP = CheckpointId("ckp-1")


class HostBus:
    """Keeps what is published; calls reach a real snapshot store, and a scheduler that takes every host."""

    def __init__(self, world: "HostWorld") -> None:
        self._world = world
        self.stored: list[Published] = []
        self.published: list[Published] = []
        self.registrations: list[OutgoingCommand] = []
        self.away = False
        self.storing_away = False
        self.answers: dict[str, Reply] = {}

    async def send(self, command: OutgoingCommand) -> None:
        raise AssertionError(f"a vm-host sends no commands but those it waits for: {command}")

    async def call(self, command: OutgoingCommand, timeout_s: float) -> bytes:
        self._world.points.reach(f"call {command.service}")
        if self.away:
            await asyncio.sleep(timeout_s)
            raise Transient(f"nobody answered within {timeout_s} s")
        if command.service == "scheduler":
            self.registrations.append(command)
        if command.service in self.answers:
            return msgspec.json.encode(self.answers[command.service])
        if command.service == "scheduler":
            return msgspec.json.encode(Reply(refusal=Refusal(code="ignored", message="known", advice="go on")))
        reply = await self._world.snapshot_store_answers(command)
        self._world.points.reach(f"called {command.service}")
        return msgspec.json.encode(reply)

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        if self.away:
            raise Transient("the bus is away")
        self.published.append(Published(subject, data, dict(headers or {})))

    async def publish_stored(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        if self.away or self.storing_away:
            raise Transient("the bus is away")
        self.stored.append(Published(subject, data, dict(headers or {})))

    async def query(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        raise AssertionError(f"a vm-host asks nothing: {subject} {data!r} {timeout_s}")


class Reader(NamedTuple):
    """A program's output as a careful reader has it."""

    output: bytes
    end: dict[str, str] | None


class HostWorld:
    """Everything that lasts, and the vm-host process of the moment."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.settings = VmHostSettings(host_id=HOST, **settings)
        self.points = Points()
        self.database = MemoryDatabase()
        self.log = PointedLog(self.database, self.points)
        self.views, self.store_views = MemoryViewStore(), MemoryViewStore()
        self.machines, self.chunks = MemoryMachines(), PointedChunks(self.points)
        self.bus = HostBus(self)
        self.clock = SimClock(Process("the world"))
        self._boots = itertools.count(1)
        self._numbers = itertools.count(1)
        self.snapshot_store = snapshot_store.build(
            SnapshotStoreSettings(), self._ports(MemoryLog(self.database), self.store_views), self.chunks
        )
        self.stuck: list[str] = []
        self.bases: HostBases | None = None
        """What the host's checkpoints build on, if anything; for the next process."""
        self.process = Process("not started")
        self.service = Service(name="none")

    # --- the process ------------------------------------------------------------------------------------------

    async def boot(self) -> None:
        """Start a vm-host process."""
        self.process = Process(f"vm-host-{next(self._boots)}")
        await self.within(self._boot())

    async def _boot(self) -> None:
        driver = PointedDriver(
            self.machines,
            self.clock,
            timing=Timing(start_s=0.1, checkpoint_s=0.1),
            offload=inline,
            bases=self.bases,
        )
        driver.points = self.points
        workspace = StickyWorkspace(self.root, offload=inline)
        workspace.stuck = self.stuck
        parts = await assembly.machinery(self.settings, driver, workspace, self.chunks)
        self.service = assembly.build(self.settings, self._ports(self.log, self.views), parts)
        self._unlock = workspace.unlock
        assert self.service.start is not None
        await self.service.start()

    def kill(self) -> None:
        """The process dies here and now."""
        self.process.kill()
        raise ProcessKilled(self.process.name)

    async def crash(self) -> None:
        """The process dies between two calls."""
        self.process.kill()
        await self._dead()

    async def _dead(self) -> None:
        await asyncio.gather(*self.process.running, return_exceptions=True)
        # The system takes the lock back from a dead process; here nobody else does.
        await self._unlock()

    async def reboot(self) -> None:
        """Make sure that the process is dead, and start another."""
        await self.crash()
        await self.boot()

    async def stop(self) -> None:
        """End the process in an orderly way."""
        assert self.service.stop is not None
        await self.within(self.service.stop())

    async def within(self, work: Awaitable[Any]) -> Any:
        """Run something as a part of the vm-host process."""
        box: list[Any] = []

        async def boxed() -> None:
            box.append(await work)

        await self.process.spawn(boxed(), "work")
        return box[0]

    async def look(self) -> None:
        """Let upkeep look once, and settle what it found."""
        await self.background("upkeep")
        for _ in range(200):
            await asyncio.sleep(0.01)

    async def background(self, name: str) -> None:
        """Run a background route once."""
        (route,) = [route for route in self.service.background if route.name == name]
        await self.within(route.run())

    # --- commands ---------------------------------------------------------------------------------------------

    async def command(self, command: Any, vm_id: str = VM, **envelope: Any) -> Receipt | None:
        """Deliver a command as the edge would, once."""
        tag = str(command.__struct_config__.tag)
        number = next(self._numbers)
        incoming = Incoming(
            tenant_id=envelope.get("tenant_id", TENANT),
            service="vm-host",
            target=envelope.get("target", f"{HOST}.{vm_id}"),
            command=command,
            command_id=CommandId(envelope.get("command_id", f"acme/{tag}-{number}")),
            causation_id="test",
            correlation_id="goal",
            request_digest=msgspec.json.encode(command)[:32].ljust(32, b"."),
            attempt=1,
        )
        receipt: Receipt | None = await self.within(self.service.commands[0].handle(incoming))
        return receipt

    async def killed_by(self, point: str, command: Any, vm_id: str = VM, **envelope: Any) -> None:
        """Deliver a command to a process that dies at a point."""
        self.points.plans[point] = self.kill
        await asyncio.gather(self.command(command, vm_id, **envelope), return_exceptions=True)
        await self._dead()
        assert not self.process.alive, f"{point} was never passed: {self.points.passed}"

    def start_vm(self, incarnation: int = 1, in_s: float = 60.0, **changes: Any) -> StartVm:
        """A command to start the machine."""
        values: dict[str, Any] = {
            "session_id": S,
            "incarnation": incarnation,
            "machine": MachineSpec(),
            "checkpoint_id": None,
            "deadline_at": self.in_s(in_s),
        }
        return StartVm(**(values | changes))

    def suspend_vm(self, incarnation: int = 1, checkpoint_id: str = CKP, in_s: float = 60.0, **more: Any) -> SuspendVm:
        """A command to suspend the machine."""
        values: dict[str, Any] = {"session_id": S, "parent_id": None, "deadline_at": self.in_s(in_s)}
        return SuspendVm(incarnation=incarnation, checkpoint_id=CheckpointId(checkpoint_id), **(values | more))

    def checkpoint_vm(
        self, incarnation: int = 1, checkpoint_id: str = CKP, in_s: float = 60.0, **more: Any
    ) -> CheckpointVm:
        """A command to checkpoint the machine while it runs."""
        values: dict[str, Any] = {"session_id": S, "parent_id": None, "deadline_at": self.in_s(in_s)}
        return CheckpointVm(incarnation=incarnation, checkpoint_id=CheckpointId(checkpoint_id), **(values | more))

    def in_s(self, seconds: float) -> datetime:
        """A moment from now."""
        return self.clock.now() + timedelta(seconds=seconds)

    # --- what there is ----------------------------------------------------------------------------------------

    async def events(self, stream: str = VM) -> list[Any]:
        """The events of a stream."""
        return [decode_event(recorded) for recorded in await MemoryLog(self.database).load(stream)]

    async def tags(self, stream: str = VM) -> list[str]:
        """The types of a stream's events."""
        return [recorded.tag.partition(".")[0] for recorded in await MemoryLog(self.database).load(stream)]

    async def last(self, kind: type[Any], stream: str = VM) -> Any:
        """The newest event of a kind."""
        return [event for event in await self.events(stream) if isinstance(event, kind)][-1]

    async def ask(
        self, request: Any, body: bytes = b"", *, tenant_id: TenantId = TENANT, session_id: str = S
    ) -> tuple[Any, bytes]:
        """Ask something of a session's machine, through the door; a refusal is raised."""
        (type_,) = [name for name, operation in OPERATIONS.items() if operation.request is type(request)]
        message = guest_messages.encode(request, body)
        answer = await self.within(self.service.guests[0].handle(tenant_id, type_, session_id, message))
        return guest_messages.decode_answer(answer, OPERATIONS[type_].answer)

    def state_of(self, vm_id: str = VM) -> str | None:
        """What a machine really is now."""
        kept = self.machines.kept.get(VmId(vm_id))
        return None if kept is None else str(msgspec.json.decode(kept)["state"])

    def directories(self) -> list[str]:
        """The machines' directories on the disk."""
        vms = self.root / "vms"
        return sorted(path.name for path in vms.iterdir()) if vms.exists() else []

    def read(self, exec_id: str = X, session_id: str = S) -> Reader:
        """What was published of a program's output; repeats dropped, nothing may be missing."""
        subject, output, end = f"out.{TENANT}.{session_id}.{exec_id}", b"", None
        for message in self.bus.stored:
            if message.subject != subject:
                continue
            offset = int(message.headers["Torpor-Offset"])
            assert offset <= len(output), "bytes were left out"
            output += message.data[len(output) - offset :]
            end = message.headers if "Torpor-End" in message.headers else end
        return Reader(output, end)

    async def ended(self, exec_id: str = X, stream: str = VM) -> Any:
        """Wait for a program's recorded end."""
        return await self.eventually(lambda event: getattr(event, "outcome", None) and event.exec_id == exec_id, stream)

    async def eventually(self, holds: Callable[[Any], object], stream: str = VM) -> Any:
        """Wait until the stream has an event for which something holds; virtual time passes."""
        for _ in range(10_000):
            for event in await self.events(stream):
                if holds(event):
                    return event
            await asyncio.sleep(0.01)
        raise AssertionError(f"it never came: {await self.tags(stream)}")

    async def fold(self) -> None:
        """Bring the vm-host's view up to the log."""
        await fold_view(MemoryLog(self.database), self.views, self.service.projections)

    async def snapshot_store_answers(self, command: OutgoingCommand) -> Reply:
        """What the snapshot store answers."""
        incoming = Incoming(
            tenant_id=command.tenant_id,
            service=command.service,
            target=command.target,
            command=command.command,
            command_id=CommandId(f"{command.tenant_id}/{command.command_id}"),
            causation_id=command.causation_id,
            correlation_id=command.correlation_id,
            request_digest=msgspec.json.encode(command.command)[-32:].ljust(32, b"."),
            attempt=1,
        )
        try:
            receipt = await self.snapshot_store.commands[0].handle(incoming)
        except Rejected as refused:
            return Reply(refusal=Refusal(code=refused.code, message=refused.message, advice=refused.advice))
        return Reply(receipt=receipt)

    def _ports(self, log: MemoryLog, views: MemoryViewStore) -> ServicePorts:
        ids = SimIds(f"test-{next(self._boots)}")
        return ServicePorts(log=log, views=views, bus=self.bus, timers=RememberingTimers(), clock=self.clock, ids=ids)


def exec_vm(*argv: str, exec_id: str = X, incarnation: int = 1, **spec: Any) -> ExecVm:
    """A command to run a program."""
    program = ExecSpec(argv=list(argv), **spec)
    return ExecVm(session_id=S, incarnation=incarnation, exec_id=ExecId(exec_id), program=program)


def stop_vm(incarnation: int = 1, reason: str = "test") -> StopVm:
    """A command to stop the machine."""
    return StopVm(session_id=S, incarnation=incarnation, reason=reason)


def claimed_resources(events: Sequence[Any]) -> list[Any]:
    """What was claimed."""
    return [resource for event in events if isinstance(event, VmClaimed) for resource in event.resources]


async def fold_view(log: MemoryLog, views: ViewStore, projections: Sequence[Projection]) -> None:
    """Fold everything the log has beyond the views."""
    for projection in projections:
        position = await views.prepare(projection.name, projection.tables)
        async with views.writing(projection.name) as write:
            for recorded in await log.read(position, 10_000):
                await projection.fold(write, decode_event(recorded), recorded)
                write.move_to(recorded.position)


def in_virtual_time(scenario: Callable[[], Coroutine[Any, Any, None]], seed: int = 1) -> None:
    """Run a scenario in a seeded virtual-time loop; an error that nobody saw fails it."""
    loop = VirtualLoop(seed)
    try:
        loop.run_until_complete(scenario())
        assert loop.unhandled == []
    finally:
        loop.close()

"""A whole scheduler over memory, with hosts that do what they are asked: messages go on only when a test lets them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

import msgspec

from tests.support.fakes import Outside
from tests.support.histories import ACME, NOON, fold_into
from torpor_contracts.checkpoint import CheckpointManifest, CheckpointRecorded
from torpor_contracts.errors import Rejected
from torpor_contracts.host import HostCapacity, HostHeartbeat, RegisterHost, VmObservation
from torpor_contracts.ids import SYSTEM_TENANT, CommandId, ExecId, HostId, SessionId, TenantId, VmId
from torpor_contracts.replies import Receipt
from torpor_contracts.scheduling import SessionView
from torpor_contracts.session import CreateSession
from torpor_contracts.vm import (
    CheckpointVm,
    ExecVm,
    StartVm,
    StopVm,
    SuspendVm,
    VmCheckpointed,
    VmCheckpointFailed,
    VmExecEnded,
    VmExecStarted,
    VmStarted,
    VmStartFailed,
    VmStopped,
    VmSuspended,
)
from torpor_eventlog.codec import decode_event, encode_event
from torpor_eventlog.instants import to_us
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Commit
from torpor_messaging.ports import OutgoingCommand
from torpor_messaging.service import Incoming
from torpor_scheduler.assembly import HEARTBEATS, build
from torpor_scheduler.projections import Views
from torpor_scheduler.settings import SchedulerSettings

CAPACITY = HostCapacity(vcpus=8, memory_mib=4096, disk_mib=16_384, vms_max=8)
STEPS_MAX = 500


@dataclass
class FakeHost:
    """A vm-host: its machines, and what it was asked.

    `silent` hosts take no command; `runs`: programs end at once; `checkpoints`: of machines that run can be taken.
    """

    host_id: HostId
    boot_id: str = "boot-1"
    silent: bool = False
    start_fails: bool = False
    runs: bool = True
    checkpoints: bool = True
    machines: dict[VmId, StartVm] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)

    def heartbeat(self, now: Any) -> HostHeartbeat:
        """Its sign of life, with every machine."""
        seen = [
            VmObservation(vm_id=vm_id, session_id=one.session_id, incarnation=one.incarnation, state="running")
            for vm_id, one in self.machines.items()
        ]
        return HostHeartbeat(host_id=self.host_id, boot_id=self.boot_id, observed_at=now, vms=seen)


class SchedulerWorld:
    """The scheduler, its log, and hosts. `settle` lets every message on until there is none."""

    def __init__(self, log: MemoryLog | None = None, **settings: Any) -> None:
        self.outside = Outside(log)
        self.settings = SchedulerSettings(**settings)
        self.service = build(self.settings, self.outside.ports())
        self.hosts: dict[str, FakeHost] = {}
        self.reacted = 0
        self.refusals: list[Rejected] = []
        self.drops: Callable[[OutgoingCommand], bool] = lambda _: False
        self._made = 0

    # --- what comes in ------------------------------------------------------------------------------------------

    async def command(
        self, target: str, command: Any, *, tenant: TenantId = ACME, command_id: str | None = None
    ) -> Receipt | None:
        """One command, handled; a refusal is raised."""
        self._made += 1
        body = msgspec.json.encode(command)
        return await self.service.commands[0].handle(
            Incoming(
                tenant_id=tenant,
                service="scheduler",
                target=target,
                command=command,
                command_id=CommandId(f"{tenant}/{command_id or f'test-{self._made}'}"),
                causation_id="test",
                correlation_id="goal",
                request_digest=hashlib.sha256(f"{tenant}.{target}".encode() + body).digest(),
                attempt=1,
            )
        )

    async def create(self, session_id: str = "s-1", create: CreateSession | None = None) -> Self:
        """Ask for a session, and let it come to rest."""
        await self.command(session_id, create or CreateSession())
        return await self.settle()

    async def host(self, host_id: str = "host-a", fingerprint: str = "simulated-1", **kwargs: Any) -> FakeHost:
        """A host registers."""
        host = self.hosts[host_id] = FakeHost(HostId(host_id), **kwargs)
        command = RegisterHost(boot_id=host.boot_id, driver="simulated", fingerprint=fingerprint, capacity=CAPACITY)
        await self.command(host_id, command, tenant=SYSTEM_TENANT)
        await self.settle()
        return host

    async def restart(self) -> None:
        """The scheduler's process is gone and there is a new one; messages under way are not lost."""
        self.service = build(self.settings, self.outside.ports())

    # --- time ---------------------------------------------------------------------------------------------------

    async def passes(self, seconds: float, *, beat_s: float = 1.0, beating: bool = True, hearing: bool = True) -> Self:
        """Time passes in beats: hosts that are not silent send heartbeats, the scheduler's own loops run."""
        clock = self.outside.clock
        until = clock.now() + timedelta(seconds=seconds)
        since_reconcile = 0.0
        while clock.now() < until:
            step = min(beat_s, (until - clock.now()).total_seconds())
            clock.pass_by(step)
            since_reconcile += step
            if hearing:
                await self.hear_probes()
            for host in list(self.hosts.values()):
                if beating and hearing and not host.silent:
                    await self.beat(host)
            loops = [route for route in self.service.background if route.name != "reconcile"]
            if since_reconcile >= self.settings.reconcile_every_s:
                since_reconcile, loops = 0.0, list(self.service.background)
            for route in loops:
                await route.run()
            await self.bring_timers()
            await self.settle()
        return self

    async def beat(self, host: FakeHost) -> None:
        """One heartbeat."""
        subject = HEARTBEATS.replace("*", host.host_id)
        await self.service.observations[0].handle(
            subject, msgspec.json.encode(host.heartbeat(self.outside.clock.now()))
        )

    async def hear_probes(self) -> None:
        """The scheduler's probes come back to it."""
        probes = self.service.observations[1]
        mine = [one for one in self.outside.bus.published if one.subject == probes.subject]
        self.outside.bus.published.clear()
        for one in mine:
            await probes.handle(one.subject, one.data)

    async def bring_timers(self) -> None:
        """The bus brings the timers that are due."""
        due = [
            (key, data) for key, (due_at, data) in self.outside.timers.due.items() if due_at <= self.outside.clock.now()
        ]
        for (tenant, service, kind, target), data in due:
            del self.outside.timers.due[tenant, service, kind, target]
            await self.service.timers[0].handle(TenantId(tenant), kind, target, data)

    # --- what goes on ----------------------------------------------------------------------------------------------

    async def settle(self) -> Self:
        """Fold, react and deliver until nothing is left to do."""
        for _ in range(STEPS_MAX):
            await fold_into(self.outside.views, Views(), self.outside.log)
            rows = await self.outside.log.read(self.reacted, 1_000)
            sent, self.outside.bus.sent = self.outside.bus.sent, []
            if not rows and not sent:
                return self
            for recorded in rows:
                event = decode_event(recorded)
                for route in self.service.reactors:
                    if isinstance(event, route.reacts_to):
                        await route.react(event, recorded)
                self.reacted = recorded.position
            for message in sent:
                if not self.drops(message):
                    await self._deliver(message)
        raise AssertionError("the world does not come to rest")

    async def _deliver(self, message: OutgoingCommand) -> None:
        if message.service == "scheduler":
            try:
                await self.command(
                    message.target, message.command, tenant=message.tenant_id, command_id=message.command_id
                )
            except Rejected as refusal:
                self.refusals.append(refusal)
            return
        host_id, _, vm_id = message.target.partition(".")
        host = self.hosts[host_id]
        if not host.silent:
            host.asked.append(message.command)
            await self._obey(host, VmId(vm_id), message.command, message.tenant_id)

    async def _obey(self, host: FakeHost, vm_id: VmId, command: Any, tenant: TenantId) -> None:
        machine = host.machines.get(vm_id)
        now = self.outside.clock.now()
        about: dict[str, Any] = {"vm_id": vm_id, "session_id": command.session_id, "incarnation": command.incarnation}
        match command:
            case StartVm() if host.start_fails:
                failed = VmStartFailed(
                    **about, host_id=host.host_id, code="full", detail="", retryable=True, observed_at=now
                )
                await self.happened(vm_id, failed, tenant)
            case StartVm() if machine is None:
                host.machines[vm_id] = command
                started = VmStarted(
                    **about,
                    host_id=host.host_id,
                    machine=command.machine,
                    checkpoint_id=command.checkpoint_id,
                    start_ms=1,
                    observed_at=now,
                )
                await self.happened(vm_id, started, tenant)
            case ExecVm() if machine is not None:
                await self.happened(vm_id, VmExecStarted(**about, exec_id=command.exec_id, observed_at=now), tenant)
                if host.runs:
                    await self.program_ends(vm_id, command.session_id, command.exec_id, command.incarnation, tenant)
            case CheckpointVm() if machine is not None and host.checkpoints:
                await self._recorded(command, tenant)
                taken = VmCheckpointed(
                    **about,
                    host_id=host.host_id,
                    checkpoint_id=command.checkpoint_id,
                    fingerprint="simulated-1",
                    pause_ms=3.0,
                    log_position=(await self.outside.log.head()).position,
                    taken_at=now,
                    observed_at=now,
                )
                await self.happened(vm_id, taken, tenant)
            case CheckpointVm() if machine is not None:
                failure = VmCheckpointFailed(
                    **about,
                    host_id=host.host_id,
                    checkpoint_id=command.checkpoint_id,
                    code="no-space",
                    detail="",
                    retryable=False,
                    observed_at=now,
                )
                await self.happened(vm_id, failure, tenant)
            case SuspendVm() if machine is not None:
                del host.machines[vm_id]
                await self._recorded(command, tenant)
                suspended = VmSuspended(
                    **about,
                    host_id=host.host_id,
                    checkpoint_id=command.checkpoint_id,
                    suspend_ms=1,
                    observed_at=now,
                )
                await self.happened(vm_id, suspended, tenant)
            case StopVm() if machine is not None:
                del host.machines[vm_id]
                stopped = VmStopped(**about, host_id=host.host_id, expected=True, cause=command.reason, observed_at=now)
                await self.happened(vm_id, stopped, tenant)
            case _:
                pass

    async def _recorded(self, command: CheckpointVm | SuspendVm, tenant: TenantId) -> None:
        """The snapshot store records a checkpoint."""
        manifest = CheckpointManifest(
            session_id=command.session_id,
            incarnation=command.incarnation,
            parent_id=command.parent_id,
            fingerprint="simulated-1",
            parts=[],
            log_position=(await self.outside.log.head()).position,
        )
        recorded = CheckpointRecorded(
            checkpoint_id=command.checkpoint_id,
            tenant_id=tenant,
            manifest=manifest,
            stored_bytes=0,
            recorded_at=self.outside.clock.now(),
        )
        await self.happened(command.checkpoint_id, recorded, tenant)

    async def program_ends(
        self, vm_id: VmId, session_id: SessionId, exec_id: ExecId, incarnation: int, tenant: TenantId = ACME
    ) -> None:
        """A program exits with 0."""
        ended = VmExecEnded(
            vm_id=vm_id,
            session_id=session_id,
            incarnation=incarnation,
            exec_id=exec_id,
            outcome="exited",
            exit_code=0,
            detail="",
            output_bytes=6,
            observed_at=self.outside.clock.now(),
        )
        await self.happened(vm_id, ended, tenant)

    async def happened(self, stream: str, event: msgspec.Struct, tenant: TenantId = ACME) -> None:
        """Another service appends to a stream of its own."""
        log = self.outside.log
        version = len(await log.load(stream))
        self._made += 1
        await log.append(
            Commit(
                command_id=CommandId(f"host-{self._made}"),
                tenant_id=tenant,
                causation_id="host",
                correlation_id="goal",
                request_digest=bytes(32),
                occurred_at_us=to_us(self.outside.clock.now()),
                expected={stream: version},
                events=[encode_event(stream, event)],
            )
        )

    # --- what can be seen -----------------------------------------------------------------------------------------

    async def ask(self, kind: str, target: str = "-", *, tenant: TenantId = ACME, **parameters: Any) -> Any:
        """One query."""
        route = next(route for route in self.service.queries if route.type == kind)
        return await route.handle(tenant, target, parameters)

    async def show(self, session_id: str = "s-1") -> SessionView:
        """A session as its owner sees it."""
        answer: SessionView = await self.ask("session", session_id)
        return answer

    async def events(self, stream: str = "s-1") -> list[str]:
        """The tags of a stream, without their versions."""
        return [recorded.tag.partition(".")[0] for recorded in await self.outside.log.load(stream)]

    @property
    def elapsed_s(self) -> float:
        """Seconds since noon."""
        return (self.outside.clock.now() - NOON).total_seconds()

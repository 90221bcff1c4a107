"""The programs of a world and how each is started: production's `build`, given simulated ports."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torpor_billing import assembly as billing
from torpor_billing.settings import BillingSettings
from torpor_contracts.host import HostCapacity
from torpor_eventlog.feeds import SharedFeed
from torpor_eventlog.healing import HealingFeed
from torpor_eventlog.views_memory import MemoryViewStore
from torpor_eventlog.views_port import Projection, ViewStore
from torpor_log_relay import assembly as log_relay
from torpor_log_relay.settings import LogRelaySettings
from torpor_messaging import subjects
from torpor_messaging.service import Service
from torpor_messaging.service_ports import ServicePorts
from torpor_messaging.timers import NatsTimers
from torpor_reaper import assembly as reaper
from torpor_reaper.settings import ReaperSettings
from torpor_scheduler import assembly as scheduler
from torpor_scheduler.settings import SchedulerSettings
from torpor_simulation.bus import SimBus
from torpor_simulation.carrying import ReaderEnd, RelayEnd
from torpor_simulation.clock import SimClock, SimIds
from torpor_simulation.hosting import Hosting
from torpor_simulation.hypervisor import FaultyChunks, FaultyDriver, Host, HostWorkspace
from torpor_simulation.log import SimLog
from torpor_simulation.process import Process
from torpor_simulation.programs import Main, Program
from torpor_simulation.surroundings import Surroundings
from torpor_simulation.views import SimViews
from torpor_snapshot_store import assembly as snapshot_store
from torpor_snapshot_store.settings import SnapshotStoreSettings
from torpor_vm_host import assembly as vm_host
from torpor_vm_host.settings import VmHostSettings

if TYPE_CHECKING:
    from torpor_simulation.world import World

CORE: Final = "core"
"""The machine that all services but the vm-hosts run on."""

IDLE_LOOK_S: Final = 6.0
SCHEDULER: Final = SchedulerSettings.model_validate(
    {
        "host_lost_after_s": 8.0,
        "look_every_s": 2.0,
        "sweep_every_s": 4.0,
        "reconcile_every_s": 4.0,
        "reconcile_after_s": 4.0,
        "start_timeout_s": 15.0,
        "suspend_timeout_s": 15.0,
        "stop_timeout_s": 10.0,
        "placement_backoff_s_max": 5.0,
        "suspend_backoff_s": 5.0,
        "suspend_backoff_s_max": 20.0,
    }
)
VM_HOST: Final = VmHostSettings.model_validate(
    {
        "heartbeat_s": 2.0,
        "look_every_s": 2.0,
        "claim_s_max": 40.0,
        "driver_look_s": 5.0,
        "driver_start_s": 10.0,
        "driver_checkpoint_s": 10.0,
        "driver_destroy_s": 5.0,
        "exec_grace_s": 10.0,
    }
)
LOG_RELAY: Final = LogRelaySettings.model_validate({"data_dir": ".", "poll_s": 4.0, "sign_every_s": 15.0})
SNAPSHOT_STORE: Final = SnapshotStoreSettings(finish_every_s=6.0, sweep_every_s=5.0, sweep_grace_s=40.0)
CAPACITY: Final = HostCapacity(vcpus=6, memory_mib=1024, disk_mib=4096, vms_max=6)
BILLING: Final = BillingSettings()
REAPER: Final = ReaperSettings(grace_s=6.0, notice_s=3.0, backoff_s=4.0, backoff_s_max=16.0, deadline_s=200.0)


@dataclass(frozen=True)
class Kind:
    """A kind of service: its replicas share its views."""

    name: str
    build: Callable[[ServicePorts, Surroundings], Service]


class Fleet:
    """Everything that runs in a world."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.kinds = {
            "scheduler": Kind("scheduler", lambda ports, _: scheduler.build(SCHEDULER, ports)),
            "snapshot-store": Kind("snapshot-store", self._snapshot_store),
            "billing": Kind("billing", lambda ports, _: billing.build(BILLING, ports)),
            "reaper": Kind("reaper", lambda ports, _: reaper.build(REAPER, ports)),
        }
        self.views = {name: MemoryViewStore() for name in ("log-relay", *self.kinds, *world.hosts)}
        self._built: dict[str, Service] = {}
        self._starts = 0

    def programs(self) -> list[Program]:
        """All programs, in the order in which they are started."""
        world = self._world
        replicas = {"scheduler": world.plan.schedulers}
        programs = [Program("log-relay", CORE, self._log_relay)]
        for name, kind in self.kinds.items():
            main = self._main(kind)
            programs += [Program(f"{name}-{number + 1}", CORE, main) for number in range(replicas.get(name, 1))]
        programs += [Program(f"vm-{host_id}", host_id, self._vm_host(host)) for host_id, host in world.hosts.items()]
        return programs

    def projections(self) -> Iterator[tuple[str, ViewStore, Sequence[Projection]]]:
        """The projections of every service that was started, with its views."""
        for name, service in self._built.items():
            yield name, self.views[name], service.projections

    def followers(self) -> Iterator[tuple[str, ViewStore, list[str]]]:
        """The followers of every service that was started."""
        for name, service in self._built.items():
            projections = [projection.name for projection in service.projections]
            yield name, self.views[name], [*projections, *(reactor.name for reactor in service.reactors)]

    def ports(self, process: Process, machine: str, views: MemoryViewStore) -> tuple[ServicePorts, Hosting]:
        """Fresh ports for a process, over everything that lasts."""
        world = self._world
        around = world.surroundings(process, machine)
        self._starts += 1
        clock, ids = (
            SimClock(process, world.skew_s[machine]),
            SimIds(f"{world.plan.seed}-{process.name}-{self._starts}"),
        )
        bus = SimBus(world.broker, world.questions, around, clock, ids)
        log = SimLog(world.log, around, lambda: world.broker.publish_core(subjects.HINT, {}, b""))
        ports = ServicePorts(
            log=log, views=SimViews(views, around), bus=bus, timers=NatsTimers(bus), clock=clock, ids=ids
        )
        reading = HealingFeed(log, ReaderEnd(world.events, around), lambda _: None, idle_look_s=IDLE_LOOK_S)
        hosting = Hosting(
            broker=world.broker,
            questions=world.questions,
            around=around,
            bus=bus,
            views=ports.views,
            clock=clock,
            ids=ids,
            feed=SharedFeed(log, reading),
            broken=world.broken,
            acking=world.acking,
        )
        return ports, hosting

    def _main(self, kind: Kind) -> Main:
        async def main(process: Process) -> None:
            ports, hosting = self.ports(process, CORE, self.views[kind.name])
            service = self._built[kind.name] = kind.build(ports, hosting.around)
            await hosting.run(service)

        return main

    def _snapshot_store(self, ports: ServicePorts, around: Surroundings) -> Service:
        chunks = FaultyChunks(self._world.chunks, around, self._world.plan.driver)
        return snapshot_store.build(SNAPSHOT_STORE, ports, chunks)

    def _vm_host(self, host: Host) -> Main:
        settings = VM_HOST.model_copy(update={"host_id": host.host_id})

        async def main(process: Process) -> None:
            ports, hosting = self.ports(process, host.host_id, self.views[host.host_id])
            faults = self._world.plan.driver
            driver = FaultyDriver(host, ports.clock, hosting.around, faults, CAPACITY)
            parts = await vm_host.machinery(
                settings, driver, HostWorkspace(host, process), FaultyChunks(self._world.chunks, hosting.around, faults)
            )
            service = self._built[host.host_id] = vm_host.build(settings, ports, parts)
            await hosting.run(service)

        return main

    async def _log_relay(self, process: Process) -> None:
        ports, hosting = self.ports(process, CORE, self.views["log-relay"])
        world = self._world
        settings = LOG_RELAY.model_copy(update={"data_dir": world.scratch / "log-relay"})

        async def newest() -> str | None:
            heads = list(world.broker.streams["HEADS"].messages.values())
            return heads[-1].data.decode() if heads else None

        await hosting.run(log_relay.build(settings, ports, RelayEnd(world.events, hosting.around), newest))

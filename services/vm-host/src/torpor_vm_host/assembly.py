"""Puts the vm-host together from its ports; the edge and the simulation both run what comes out."""

from dataclasses import dataclass
from typing import Final

from torpor_chunks.port import ChunkStore
from torpor_contracts.errors import Transient
from torpor_contracts.host import HostCapacity, HostLost, HostRegistered
from torpor_contracts.ids import HostId
from torpor_messaging.service import BackgroundRoute, CommandRoute, GuestRoute, ReactorRoute, Service
from torpor_messaging.service_ports import ServicePorts
from torpor_vm_host.bases import Bases
from torpor_vm_host.bounded import BoundedDriver
from torpor_vm_host.checkpoints import Checkpoints
from torpor_vm_host.clearing import Clearing
from torpor_vm_host.door import Door
from torpor_vm_host.ending import Ending
from torpor_vm_host.handlers import Handlers
from torpor_vm_host.host import Host
from torpor_vm_host.hosting import Hosting
from torpor_vm_host.ledger import Ledger
from torpor_vm_host.live import LiveCheckpoints
from torpor_vm_host.ports import Driver, Workspace
from torpor_vm_host.presence import Presence
from torpor_vm_host.programs import Programs
from torpor_vm_host.projections import Vms
from torpor_vm_host.settings import VmHostSettings
from torpor_vm_host.starting import Starting
from torpor_vm_host.suspending import Suspends
from torpor_vm_host.upkeep import Upkeep
from torpor_vm_host.uses import Uses
from torpor_vm_host.vm_locks import VmLocks
from torpor_vm_host.workers import Workers

SERVICE: Final = "vm-host"
START_TRIES_MAX: Final = 20
ACK_WAIT_S: Final = 10.0
TEMPLATES_EVERY_S: Final = 5.0
TEMPLATES_PAUSE_S_MAX: Final = 600.0
"""A try costs seconds of a processor: a store that takes nothing is not tried again and again."""


@dataclass(frozen=True)
class HostMachinery:
    """What a vm-host has beyond what every service has: its driver, its disk, the chunk store, and what it found."""

    driver: Driver
    workspace: Workspace
    chunks: ChunkStore
    capacity: HostCapacity
    fingerprint: str


async def machinery(
    settings: VmHostSettings, driver: Driver, workspace: Workspace, chunks: ChunkStore
) -> HostMachinery:
    """Ask the driver what this machine can do; raises `DriverError`."""
    bounded = BoundedDriver(driver, settings.driver_limits())
    return HostMachinery(
        driver=bounded,
        workspace=workspace,
        chunks=chunks,
        capacity=settings.offered(await bounded.capacity()),
        fingerprint=await bounded.fingerprint(),
    )


def build(settings: VmHostSettings, ports: ServicePorts, parts: HostMachinery) -> Service:
    """One vm-host: it recovers what is there before it takes its first command."""
    hosting = _hosting(settings, ports, parts)
    starting, suspends, live = Starting(hosting), Suspends(hosting), LiveCheckpoints(hosting)
    handlers = Handlers(hosting, starting, suspends, live, Ending(hosting), execs_max=settings.execs_max)
    upkeep = Upkeep(
        hosting,
        starting=starting,
        suspends=suspends,
        live=live,
        log=ports.log,
        views=ports.views,
        claim_s_max=settings.claim_s_max,
    )
    presence = Presence(hosting, parts.fingerprint, ports)

    async def start() -> None:
        await parts.workspace.lock()
        for attempt in range(1, START_TRIES_MAX + 1):
            try:
                await upkeep.recover()
                break
            except Transient as error:
                if attempt == START_TRIES_MAX:
                    raise
                await ports.clock.sleep(error.retry_after_s)

    async def stop() -> None:
        await hosting.programs.stop()
        await hosting.workers.stop()
        await parts.driver.close()
        await parts.workspace.unlock()

    return Service(
        name=SERVICE,
        commands=[
            CommandRoute(
                service=SERVICE,
                durable=f"{SERVICE}-{settings.host_id}",
                handle=handlers.handle,
                target_filter=f"{settings.host_id}.*",
                ack_wait_s=ACK_WAIT_S,
            )
        ],
        guests=[GuestRoute(host_id=settings.host_id, handle=Door(hosting).handle)],
        projections=[Vms()],
        reactors=[
            ReactorRoute(
                name=f"{SERVICE}-presence-{settings.host_id}",
                reacts_to=(HostLost, HostRegistered),
                react=presence.heard,
            )
        ],
        background=[
            BackgroundRoute(name="upkeep", every_s=settings.look_every_s, run=upkeep.look),
            BackgroundRoute(name="register", every_s=settings.look_every_s, run=presence.register),
            BackgroundRoute(name="heartbeat", every_s=settings.heartbeat_s, run=presence.heartbeat),
            *_keeping(settings, hosting.bases),
        ],
        start=start,
        stop=stop,
    )


def _keeping(settings: VmHostSettings, bases: Bases) -> list[BackgroundRoute]:
    """New templates come with new kinds of machines: those are looked for again and again."""
    if settings.keep_templates == "never":
        return []
    first_s = 0.0 if settings.keep_templates == "always" else settings.keep_templates_after_s
    route = BackgroundRoute(
        name="templates",
        every_s=TEMPLATES_EVERY_S,
        run=bases.keep_all,
        first_s=first_s,
        pause_s_max=TEMPLATES_PAUSE_S_MAX,
    )
    return [route]


def _hosting(settings: VmHostSettings, ports: ServicePorts, parts: HostMachinery) -> Hosting:
    host = Host(host_id=HostId(settings.host_id), boot_id=ports.ids.new("boot"))
    ledger, workers = Ledger(host, ports), Workers()
    programs = Programs(
        parts.driver, ledger, workers, bus=ports.bus, clock=ports.clock, limits=settings.output_limits()
    )
    return Hosting(
        host=host,
        capacity=parts.capacity,
        driver=parts.driver,
        workspace=parts.workspace,
        checkpoints=Checkpoints(host, parts.chunks, ports),
        bases=Bases(parts.driver, parts.chunks, parts.workspace, keeping=settings.keep_templates),
        clearing=Clearing(parts.driver, parts.workspace),
        ledger=ledger,
        programs=programs,
        workers=workers,
        uses=Uses(ports.clock),
        locks=VmLocks(),
        clock=ports.clock,
    )

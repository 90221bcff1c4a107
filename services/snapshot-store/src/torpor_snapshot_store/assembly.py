"""Puts the snapshot store together from its ports; the edge and the simulation both run what comes out."""

from typing import Final

from torpor_chunks.port import ChunkStore
from torpor_messaging.service import BackgroundRoute, CommandRoute, Service
from torpor_messaging.service_ports import ServicePorts
from torpor_snapshot_store.handlers import Handlers
from torpor_snapshot_store.projections import Checkpoints
from torpor_snapshot_store.queries import Queries
from torpor_snapshot_store.settings import SnapshotStoreSettings
from torpor_snapshot_store.sweeping import Sweeping
from torpor_snapshot_store.verifying import Verifying

SERVICE: Final = "snapshot-store"
ACK_WAIT_S: Final = 10.0


def build(settings: SnapshotStoreSettings, ports: ServicePorts, chunks: ChunkStore) -> Service:
    """The whole of the snapshot store over one chunk store."""
    handlers = Handlers(chunks, ports, young_s=settings.sweep_grace_s / 2)
    verifying = Verifying(chunks, ports.clock)
    sweeping = Sweeping(chunks, ports, settings.sweep_grace_s)

    async def start() -> None:
        await ports.views.prepare(Checkpoints.name, Checkpoints.tables)

    return Service(
        name=SERVICE,
        commands=[CommandRoute(service=SERVICE, durable=SERVICE, handle=handlers.handle, ack_wait_s=ACK_WAIT_S)],
        queries=Queries(ports, verifying).routes(SERVICE),
        projections=[Checkpoints()],
        background=[
            BackgroundRoute(name="freeing", every_s=settings.finish_every_s, run=handlers.finish_freeing),
            BackgroundRoute(name="sweeping", every_s=settings.sweep_every_s, run=sweeping.sweep),
        ],
        start=start,
        stop=verifying.stop,
    )

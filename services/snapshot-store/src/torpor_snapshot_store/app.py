"""The snapshot store's composition root: settings from the environment, ports from the edge, packs where a URL says."""

import logging
import sys
from functools import partial
from typing import Final

from pydantic import ValidationError

from torpor_chunks.opening import open_store
from torpor_chunks.port import ChunkError
from torpor_contracts.errors import Rejected
from torpor_messaging.edge import EXIT_REFUSED, run_service
from torpor_messaging.service import Service
from torpor_messaging.service_ports import ServicePorts
from torpor_snapshot_store.assembly import SERVICE, build
from torpor_snapshot_store.settings import SnapshotStoreSettings

_log: Final = logging.getLogger(__name__)


def main() -> int:
    """Run the snapshot store until it is told to stop; the process's exit code."""
    try:
        settings = SnapshotStoreSettings()
    except ValidationError as error:
        sys.stderr.write(f"{SERVICE}: correct these variables, TORPOR_SNAPSHOT_STORE_…: {error}\n")
        return EXIT_REFUSED
    return run_service(SERVICE, partial(_build, settings))


async def _build(settings: SnapshotStoreSettings, ports: ServicePorts) -> Service:
    try:
        chunks = open_store(settings.store_url(), settings.key_file())
        freed_bytes = await chunks.remove_abandoned(settings.sweep_grace_s)
    except ChunkError as error:
        raise Rejected(error.code, str(error), "correct TORPOR_CHUNKS_URL or TORPOR_CHUNKS_KEY_FILE") from error
    if freed_bytes:
        _log.info("removed %d bytes that dead writers had left half-written", freed_bytes)
    return build(settings, ports, chunks)

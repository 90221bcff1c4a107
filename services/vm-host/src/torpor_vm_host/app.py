"""The vm-host's composition root: settings from the environment, ports from the edge, the driver from a probe."""

import sys
from functools import partial

from pydantic import ValidationError

from torpor_chunks.opening import open_store
from torpor_chunks.port import ChunkError, ChunkStore
from torpor_contracts.errors import Rejected
from torpor_messaging.edge import EXIT_REFUSED, run_service
from torpor_messaging.service import Service
from torpor_messaging.service_ports import ServicePorts
from torpor_vm_host.adapters.workspace import DirectoryWorkspace
from torpor_vm_host.assembly import SERVICE, build, machinery
from torpor_vm_host.drivers import DriverEnvironment, make_driver
from torpor_vm_host.settings import VmHostSettings


def main() -> int:
    """Run one vm-host until it is told to stop; its machines stay. The process's exit code."""
    try:
        settings = VmHostSettings()
    except ValidationError as error:
        sys.stderr.write(f"{SERVICE}: correct these variables, TORPOR_VM_HOST_…: {error}\n")
        return EXIT_REFUSED
    return run_service(SERVICE, partial(_build, settings))


async def _build(settings: VmHostSettings, ports: ServicePorts) -> Service:
    directory = settings.vms_directory()
    environment = DriverEnvironment(
        directory=directory, clock=ports.clock, ids=ports.ids, options=settings.driver_options()
    )
    parts = await machinery(
        settings,
        await make_driver(settings.driver, environment),
        DirectoryWorkspace(directory),
        _chunks(settings),
    )
    return build(settings, ports, parts)


def _chunks(settings: VmHostSettings) -> ChunkStore:
    try:
        return open_store(
            settings.store_url(),
            settings.key_file(),
            cache=settings.vms_directory().parent / f"{settings.host_id}-packs",
            cache_bytes=settings.chunks_cache_mib << 20,
        )
    except ChunkError as error:
        raise Rejected(error.code, str(error), "correct TORPOR_CHUNKS_URL or TORPOR_CHUNKS_KEY_FILE") from error

"""The vm-host's composition root: settings from the environment, ports from the edge, the driver from a probe."""

import sys
from functools import partial

from pydantic import ValidationError

from torpor_chunks.directory import DirectoryChunks
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
    environment = DriverEnvironment(directory=directory, clock=ports.clock, timing=settings.timing())
    parts = await machinery(
        settings,
        await make_driver(settings.driver, environment),
        DirectoryWorkspace(directory),
        DirectoryChunks(settings.chunks_root()),
    )
    return build(settings, ports, parts)

"""The Firecracker driver as a vm-host uses it: machines and templates on one file system, so that they share blocks."""

from collections.abc import Callable
from pathlib import Path

from torpor_messaging.system import SystemIds
from torpor_vm_host.adapters.firecracker.cgroups import find_cgroups
from torpor_vm_host.adapters.firecracker.configuring import Limits
from torpor_vm_host.adapters.firecracker.driver import FirecrackerDriver
from torpor_vm_host.adapters.firecracker.engine import find_engine
from torpor_vm_host.adapters.firecracker.jail import Jailing
from torpor_vm_host.adapters.firecracker.template import Workshop
from torpor_vm_host.images.library import default_library


def make_driver(directory: Path, progress: Callable[[str], None]) -> FirecrackerDriver:
    """A driver of the machines below `directory`; raises `Rejected` where there is no Firecracker."""
    workshop = Workshop(
        engine=find_engine(),
        jailing=Jailing(cgroups=find_cgroups()),
        limits=Limits(),
        cache=directory / "firecracker-templates",
        progress=progress,
    )
    ids = SystemIds()
    return FirecrackerDriver(workshop, default_library(), directory / "vms", lambda: ids.new("epoch"), "faults")

"""What everything that acts on this host's machines is made of."""

from dataclasses import dataclass

from torpor_contracts.host import HostCapacity
from torpor_messaging.ports import Clock
from torpor_vm_host.bases import Bases
from torpor_vm_host.checkpoints import Checkpoints
from torpor_vm_host.clearing import Clearing
from torpor_vm_host.host import Host
from torpor_vm_host.ledger import Ledger
from torpor_vm_host.ports import Driver, Workspace
from torpor_vm_host.programs import Programs
from torpor_vm_host.uses import Uses
from torpor_vm_host.vm_locks import VmLocks
from torpor_vm_host.workers import Workers


@dataclass(frozen=True)
class Hosting:
    """One host at work: who it is, what it offers, its driver (bounded), its disk, and what it keeps account of."""

    host: Host
    capacity: HostCapacity
    driver: Driver
    workspace: Workspace
    checkpoints: Checkpoints
    bases: Bases
    clearing: Clearing
    ledger: Ledger
    programs: Programs
    workers: Workers
    uses: Uses
    locks: VmLocks
    clock: Clock

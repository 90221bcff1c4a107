"""Who this host is: its id, and the boot that this process is."""

from dataclasses import dataclass

from torpor_contracts.ids import HostId


@dataclass(frozen=True)
class Host:
    """One vm-host process. `boot_id` is new with each."""

    host_id: HostId
    boot_id: str

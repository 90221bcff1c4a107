"""What a machine's process may use: limits for the jailer to set, and where they are on this host."""

import contextlib
from pathlib import Path
from typing import Final, Literal

import msgspec

from torpor_contracts.session import MachineSpec

ROOT: Final = Path("/sys/fs/cgroup")
PARENT: Final = "torpor"
MEMORY_HEADROOM_MIB: Final = 96
"""What Firecracker itself, its page tables and the pages it writes into snapshots need beside the guest's memory."""
CPU_PERIOD_US: Final = 100_000
THREADS_BESIDE_VCPUS: Final = 16


class Cgroups(msgspec.Struct, frozen=True, kw_only=True):
    """The control groups of this host: version 1 or 2, and those of the controllers we use that it has."""

    version: Literal[1, 2]
    controllers: frozenset[str]
    root: Path = ROOT

    def limits(self, machine: MachineSpec) -> list[str]:
        """`file=value` as the jailer's option `--cgroup` takes them."""
        memory = (machine.memory_mib + MEMORY_HEADROOM_MIB) * 2**20
        quota, threads = machine.vcpus * CPU_PERIOD_US, machine.vcpus + THREADS_BESIDE_VCPUS
        if self.version == 2:  # noqa: PLR2004  (cgroup v2)
            wanted = {
                "memory": [f"memory.max={memory}", "memory.swap.max=0"],
                "cpu": [f"cpu.max={quota} {CPU_PERIOD_US}"],
                "pids": [f"pids.max={threads}"],
            }
        else:
            wanted = {
                "memory": [f"memory.limit_in_bytes={memory}"],
                "cpu": [f"cpu.cfs_period_us={CPU_PERIOD_US}", f"cpu.cfs_quota_us={quota}"],
                "pids": [f"pids.max={threads}"],
            }
        return [limit for controller, limits in wanted.items() if controller in self.controllers for limit in limits]

    def folders(self, name: str) -> list[Path]:
        """Where the jailer makes the groups of the machine `name`."""
        if self.version == 2:  # noqa: PLR2004
            return [self.root / PARENT / name]
        return [self.root / controller / PARENT / name for controller in sorted(self.controllers)]

    def exist(self, name: str) -> bool:
        """Whether any group of the machine is there."""
        return any(folder.exists() for folder in self.folders(name))

    def remove(self, name: str) -> None:
        """Remove the machine's groups, whose processes have ended; idempotent. One that is busy still is left."""
        for folder in self.folders(name):
            with contextlib.suppress(OSError):
                folder.rmdir()


def find_cgroups(root: Path = ROOT) -> Cgroups | None:
    """This host's control groups, or None when it has none that we could limit a machine by."""
    wanted = {"cpu", "memory", "pids"}
    unified = root / "cgroup.controllers"
    if unified.is_file():
        there = wanted & set(unified.read_text().split())
        return Cgroups(version=2, controllers=frozenset(there), root=root) if there else None
    there = {name for name in wanted if (root / name / "cgroup.procs").is_file()}
    return Cgroups(version=1, controllers=frozenset(there), root=root) if there else None

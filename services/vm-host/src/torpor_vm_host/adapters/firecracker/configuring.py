"""What a machine is told before it runs: how it is booted once, and how it is loaded ever after."""

from typing import Final

import msgspec

from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.firecracker import jail as names
from torpor_vm_host.adapters.firecracker import requests
from torpor_vm_host.adapters.firecracker.api import SNAPSHOT_S_MAX, Api
from torpor_vm_host.adapters.firecracker.engine import OVERRIDES_SINCE, TRACKS_SINCE, Engine
from torpor_vm_host.adapters.firecracker.vsock import AGENT_PORT, GUEST_CID

DRIVE: Final = "root"
REFILL_MS: Final = 100
BOOT_ARGS: Final = (
    "quiet reboot=k panic=-1 8250.nr_uarts=0 i8042.noaux i8042.nomux i8042.dumbkbd random.trust_cpu=on "
    f"torpor.agent=vsock:{AGENT_PORT}"
)
"""No serial line: what a guest writes to one would fill a file of the host."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much input and output a machine may do a second; bursts are a tenth of that."""

    disk_bytes_per_s: int = 256 * 2**20
    disk_operations_per_s: int = 20_000
    entropy_bytes_per_s: int = 2**20


async def name_logs(api: Api) -> None:
    """Say where to log; neither a booted nor a loaded machine knows."""
    await api.put("/logger", requests.Logger(log_path=names.LOG, level="Warning"))
    await api.put("/metrics", requests.Metrics(metrics_path=names.METRICS))


async def boot(api: Api, machine: MachineSpec, limits: Limits) -> None:
    """Configure a fresh process and let its machine boot."""
    await name_logs(api)
    config = requests.MachineConfig(vcpu_count=machine.vcpus, mem_size_mib=machine.memory_mib, track_dirty_pages=False)
    await api.put("/machine-config", config)
    source = requests.BootSource(kernel_image_path=names.KERNEL, initrd_path=names.INITRD, boot_args=BOOT_ARGS)
    await api.put("/boot-source", source)
    drive = requests.Drive(
        drive_id=DRIVE,
        path_on_host=names.DISK,
        is_root_device=True,
        is_read_only=False,
        rate_limiter=_disk_limiter(limits),
    )
    await api.put(f"/drives/{DRIVE}", drive)
    await api.put("/vsock", requests.Vsock(guest_cid=GUEST_CID, uds_path=names.VSOCK))
    entropy = requests.RateLimiter(bandwidth=_bucket(limits.entropy_bytes_per_s))
    await api.put("/entropy", requests.Entropy(rate_limiter=entropy))
    await api.put("/actions", requests.Action(action_type="InstanceStart"))


async def load(api: Api, engine: Engine, memory: requests.MemoryBackend, limits: Limits) -> None:
    """Load a snapshot into a fresh process; its machine stands still, limited as machines are today."""
    await name_logs(api)
    tracks, overrides = engine.version >= TRACKS_SINCE, engine.version >= OVERRIDES_SINCE
    body = requests.SnapshotLoad(
        snapshot_path=names.STATE,
        mem_backend=memory,
        resume_vm=False,
        track_dirty_pages=True if tracks else None,
        enable_diff_snapshots=None if tracks else True,
        vsock_override=requests.VsockOverride(uds_path=names.VSOCK) if overrides else None,
        clock_realtime=True if overrides else None,
    )
    await api.put("/snapshot/load", body, timeout_s=SNAPSHOT_S_MAX)
    # The limits of the day the template was made are in the snapshot.
    change = requests.DriveChange(drive_id=DRIVE, rate_limiter=_disk_limiter(limits))
    await api.patch(f"/drives/{DRIVE}", change)


def _disk_limiter(limits: Limits) -> requests.RateLimiter:
    return requests.RateLimiter(bandwidth=_bucket(limits.disk_bytes_per_s), ops=_bucket(limits.disk_operations_per_s))


def _bucket(per_s: int) -> requests.TokenBucket:
    return requests.TokenBucket(size=max(1, per_s * REFILL_MS // 1000), refill_time=REFILL_MS)

"""The bodies of the requests we send to Firecracker, named and typed as its interface definition has them.

Fields that are None are left out; Firecracker refuses names it does not know.
"""

from typing import Literal

import msgspec


class TokenBucket(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`size` tokens, filled up again within `refill_time` milliseconds; a token is a byte or an operation."""

    size: int
    refill_time: int
    one_time_burst: int | None = None


class RateLimiter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Independent limits of bytes and of operations."""

    bandwidth: TokenBucket | None = None
    ops: TokenBucket | None = None


class MachineConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PUT /machine-config."""

    vcpu_count: int
    mem_size_mib: int
    track_dirty_pages: bool | None = None


class BootSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PUT /boot-source."""

    kernel_image_path: str
    initrd_path: str | None = None
    boot_args: str | None = None


class Drive(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PUT /drives/{drive_id}."""

    drive_id: str
    path_on_host: str
    is_root_device: bool
    is_read_only: bool
    rate_limiter: RateLimiter | None = None


class DriveChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PATCH /drives/{drive_id}."""

    drive_id: str
    rate_limiter: RateLimiter


class Vsock(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PUT /vsock."""

    guest_cid: int
    uds_path: str


class Entropy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PUT /entropy."""

    rate_limiter: RateLimiter | None = None


class Logger(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PUT /logger."""

    log_path: str
    level: Literal["Error", "Warning", "Info", "Debug", "Trace", "Off"]


class Metrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PUT /metrics."""

    metrics_path: str


class Action(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PUT /actions."""

    action_type: Literal["FlushMetrics", "InstanceStart", "SendCtrlAltDel"]


class VmState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PATCH /vm."""

    state: Literal["Paused", "Resumed"]


class SnapshotCreate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PUT /snapshot/create."""

    snapshot_path: str
    mem_file_path: str
    snapshot_type: Literal["Full", "Diff"]


class MemoryBackend(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a loaded machine's memory comes from: a file, or the socket of a page-fault handler."""

    backend_type: Literal["File", "Uffd"]
    backend_path: str


class VsockOverride(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the loaded machine's vsock is to be on the host."""

    uds_path: str


class SnapshotLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PUT /snapshot/load. Two names for one thing: `track_dirty_pages` replaces `enable_diff_snapshots`."""

    snapshot_path: str
    mem_backend: MemoryBackend
    resume_vm: bool | None = None
    track_dirty_pages: bool | None = None
    enable_diff_snapshots: bool | None = None
    vsock_override: VsockOverride | None = None
    clock_realtime: bool | None = None


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to GET /."""

    id: str
    state: Literal["Not started", "Running", "Paused"]
    vmm_version: str

"""The guest's initial RAM disk: the virtio modules of Debian's kernel, our agent, and the hand-over to the root.

It is two archives behind each other, as the kernel takes them: one comes with the image, the other holds the agent, so
that a new agent needs no new image.
"""

import gzip
import io
import lzma
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from torpor_contracts.errors import Rejected

MODULES: Final = ("virtio_mmio", "virtio_blk", "virtio_console", "virtio-rng")
"""What the guest's devices need; their dependencies are loaded first, what the kernel has built in is left out."""
VSOCK_MODULES: Final = ("vmw_vsock_virtio_transport",)
"""The same for a machine whose host is met on a vsock; others do not load them."""

FOLDER: Final = stat.S_IFDIR | 0o755
EXECUTABLE: Final = stat.S_IFREG | 0o755
PLAIN: Final = stat.S_IFREG | 0o644

AGENT: Final = "/run/torpor/agent"
"""Where the agent is in the guest: in memory, whatever the image."""

INIT: Final = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs dev /dev
exec < /dev/console > /dev/console 2>&1
for m in {modules}; do $b insmod /modules/$m.ko; done
i=0
while [ ! -b /dev/vda ] && [ $i -lt 2000 ]; do $b usleep 5000; i=$((i+1)); done
$b mount -t ext4 -o rw,noatime /dev/vda /root || $b echo "torpor: there is no root file system"
$b mount -t tmpfs -o mode=755 run /root/run
$b mkdir -p /root/run/torpor
$b cp -r /agent /root{agent}
for d in proc sys dev; do $b mount --move /$d /root/$d; done
exec $b switch_root /root {agent}/agent
"""


def _entry(name: str, mode: int, data: bytes, number: int) -> bytes:
    """One entry of a "newc" cpio archive (kernel: Documentation/driver-api/early-userspace/buffer-format.rst)."""
    path = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields)
    return _padded(header + path) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def _archive(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    out = io.BytesIO()
    for number, (name, mode, data) in enumerate(entries, 1):
        out.write(_entry(name, mode, data, number))
    out.write(_entry("TRAILER!!!", 0, b"", 0))
    return out.getvalue()


def _depends(module: bytes) -> list[str]:
    """The modules a module names in its `.modinfo` as loaded before it."""
    match = re.search(rb"\0depends=([^\0]*)\0", module)
    return [name for name in match[1].decode().split(",") if name] if match else []


def find_modules(kernel_tree: Path, names: Iterable[str] = MODULES) -> dict[str, bytes]:
    """The modules with those that they need, uncompressed, in the order they must be loaded."""
    there = {
        path.name.partition(".ko")[0].replace("-", "_"): path for path in sorted(kernel_tree.rglob("kernel/**/*.ko*"))
    }
    found: dict[str, bytes] = {}

    def add(name: str) -> None:
        path = there.get(name.replace("-", "_"))
        if path is None or path.name.partition(".ko")[0] in found:
            return
        data = path.read_bytes()
        data = lzma.decompress(data) if path.suffix == ".xz" else data
        for before in _depends(data):
            add(before)
        found[path.name.partition(".ko")[0]] = data

    for name in names:
        add(name)
    return found


def boot_archive(kernel_tree: Path, busybox: Path) -> bytes:
    """The part of an initrd that belongs to the kernel unpacked below `kernel_tree`."""
    modules = find_modules(kernel_tree)
    if not busybox.is_file():
        raise Rejected(
            "image-build-failed", f"there is no {busybox}", "report this: the package busybox-static changed"
        )
    init = INIT.format(modules=" ".join(modules), agent=AGENT)
    entries = [(name, FOLDER, b"") for name in ("bin", "proc", "sys", "dev", "root", "modules")]
    entries.append(("init", EXECUTABLE, init.encode()))
    entries.append(("bin/busybox", EXECUTABLE, busybox.read_bytes()))
    entries.extend((f"modules/{name}.ko", PLAIN, data) for name, data in modules.items())
    return gzip.compress(_archive(entries), compresslevel=1, mtime=0)


def agent_archive(agent: Path) -> bytes:
    """The part of an initrd that is our agent, from the folder of its modules."""
    entries = [("agent", FOLDER, b""), ("agent/torpor_guest_agent", FOLDER, b"")]
    entries.append(("agent/agent", EXECUTABLE, (agent / "init").read_bytes()))
    entries.extend(
        (f"agent/torpor_guest_agent/{path.name}", PLAIN, path.read_bytes()) for path in sorted(agent.glob("*.py"))
    )
    return gzip.compress(_archive(entries), compresslevel=6, mtime=0)

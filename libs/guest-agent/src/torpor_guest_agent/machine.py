"""What the first process of the machine does before anything else: mounts, devices, the loopback, the host's port."""

import ctypes
import fcntl
import os
import socket
import struct
import time
from pathlib import Path
from typing import Final

from torpor_guest_agent.identity import FOLDER

PORT_NAME: Final = "torpor.agent"
OPTION: Final = "torpor.agent"
PORT_WAIT_S: Final = 30.0
MOUNTS: Final = (
    ("proc", "/proc", "proc", ""),
    ("sysfs", "/sys", "sysfs", ""),
    ("devtmpfs", "/dev", "devtmpfs", ""),
    ("devpts", "/dev/pts", "devpts", "gid=5,mode=620,ptmxmode=666"),
    ("tmpfs", "/dev/shm", "tmpfs", "mode=1777"),  # noqa: S108  (the guest's own)
    ("tmpfs", "/run", "tmpfs", "mode=755"),
    ("cgroup2", "/sys/fs/cgroup", "cgroup2", ""),
)
EXT4_IOC_RESIZE_FS: Final = 0x40086610
BLOCK_BYTES: Final = 4096
SIOCGIFFLAGS: Final = 0x8913
SIOCSIFFLAGS: Final = 0x8914
IFF_UP: Final = 1


def prepare() -> None:
    """Mount what a Linux program expects; what is mounted already stays."""
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = {line.split()[1] for line in _mounts()}
    for source, target, kind, options in MOUNTS:
        if target in mounted:
            continue
        Path(target).mkdir(parents=True, exist_ok=True)
        libc.mount(source.encode(), target.encode(), kind.encode(), 0, options.encode())
    Path(FOLDER).mkdir(mode=0o755, exist_ok=True)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1")):
        if not os.path.lexists(f"/dev/{name}"):
            Path(f"/dev/{name}").symlink_to(target)
    _raise_loopback()
    _grow_root()


def open_channel() -> int | socket.socket:
    """Where the host is met: what `torpor.agent=vsock:PORT` on the kernel's command line names, or else our port."""
    for word in Path("/proc/cmdline").read_text().split():
        name, _, value = word.partition("=")
        if name == OPTION:
            kind, _, number = value.partition(":")
            if kind != "vsock":
                raise OSError(f"{OPTION} names no channel that is known: {value!r}")
            return listen_on_vsock(int(number))
    return open_port()


def listen_on_vsock(port: int) -> socket.socket:
    """A socket on which the host connects to this machine."""
    listening = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    listening.bind((socket.VMADDR_CID_ANY, port))
    listening.listen(4)
    return listening


def open_port() -> int:
    """The descriptor of the virtio-serial port that leads to the host; waits for it while devices appear."""
    deadline = time.monotonic() + PORT_WAIT_S
    while time.monotonic() < deadline:
        for name in Path("/sys/class/virtio-ports").glob("*/name"):
            if name.read_text().strip() == PORT_NAME:
                return os.open(f"/dev/{name.parent.name}", os.O_RDWR | os.O_CLOEXEC)
        time.sleep(0.005)
    raise OSError(f"no virtio port named {PORT_NAME} appeared within {PORT_WAIT_S} s")


def _mounts() -> list[str]:
    try:
        return Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return []


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack_from("16sh", fcntl.ioctl(probe, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def _grow_root() -> None:
    """Let the root file system fill its disk, which may be larger than the image it came from (ext4, while mounted)."""
    sectors = int(Path("/sys/class/block/vda/size").read_text())
    root = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        used = os.fstatvfs(root)
        blocks = sectors * 512 // BLOCK_BYTES
        if blocks * BLOCK_BYTES > used.f_blocks * used.f_frsize + used.f_bsize * BLOCK_BYTES:
            fcntl.ioctl(root, EXT4_IOC_RESIZE_FS, struct.pack("Q", blocks))
    finally:
        os.close(root)

"""A userfaultfd as Firecracker makes one: memory whose pages another process gives when they are first touched."""

import ctypes
import fcntl
import json
import mmap
import os
import socket
import struct
from pathlib import Path
from typing import Final

PAGE: Final = 4096
SYS_USERFAULTFD: Final = 323
"""On x86-64."""
API: Final = 0xAA
UFFDIO_API: Final = 0xC018AA3F
UFFDIO_REGISTER: Final = 0xC020AA00
MODE_MISSING: Final = 1
EVENT_REMOVE: Final = 1 << 3


class FaultedMemory:
    """Anonymous memory of `size` bytes that is missing until a handler, listening at `handler`, gives it.

    With `user` the process is that user before it meets the handler, as in a jail.
    """

    def __init__(self, size: int, handler: Path, page_size: int = PAGE, user: int | None = None) -> None:
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.uffd = _userfaultfd()
        fcntl.ioctl(self.uffd, UFFDIO_API, bytearray(struct.pack("<QQQ", API, EVENT_REMOVE, 0)))
        register = struct.pack("<QQQQ", self.address, size, MODE_MISSING, 0)
        fcntl.ioctl(self.uffd, UFFDIO_REGISTER, bytearray(register))
        mapping = {
            "base_host_virt_addr": self.address,
            "size": size,
            "offset": 0,
            "page_size": page_size,
            "page_size_kib": page_size,
        }
        # Kept open as Firecracker does: the handler may not yet have read when it would be closed.
        self.stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        os.chdir(handler.parent)
        if user is not None:
            os.setresuid(user, user, user)
        self.stream.connect(handler.name)
        socket.send_fds(self.stream, [json.dumps([mapping]).encode()], [self.uffd])

    def drop(self, start: int, length: int) -> None:
        """Give pages back to the kernel, as a balloon does."""
        self.memory.madvise(mmap.MADV_DONTNEED, start, length)


def _userfaultfd() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.syscall(SYS_USERFAULTFD, os.O_CLOEXEC | os.O_NONBLOCK)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "userfaultfd")
    return descriptor


def userfaults_work() -> bool:
    """Whether this process may make a userfaultfd that takes faults of the kernel too."""
    try:
        os.close(_userfaultfd())
    except OSError:
        return False
    return True

"""The way into a guest: Firecracker's vsock socket on the host, and the agent that listens inside."""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Final

from torpor_vm_host.adapters.qemu.guest import GuestChannel
from torpor_vm_host.adapters.qemu.wire import connected
from torpor_vm_host.ports import VM_GONE, DriverError

AGENT_PORT: Final = 1024
"""The vsock port on which the agent listens; told to it on the kernel's command line."""
GUEST_CID: Final = 3
"""The guest's own address. Every machine may have the same: each has a socket of its own."""
TRY_AGAIN_S: Final = 0.02
GREETING_S_MAX: Final = 2.0
GREETING_BYTES_MAX: Final = 32


async def open_channel(path: Path, timeout_s: float, port: int = AGENT_PORT) -> GuestChannel:
    """A channel to the guest's agent; tried again while nobody listens in the guest, which may still be booting.

    Raises `DriverError` `guest-silent`, or `vm-gone` when Firecracker does not listen either.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    while True:
        connection = await _try_once(path, port, min(GREETING_S_MAX, max(0.001, deadline - clock())))
        if connection is not None:
            with contextlib.suppress(OSError):  # the guest closed it again, as it does to all when it has been loaded
                return GuestChannel(connection)
        if clock() >= deadline:
            raise DriverError("guest-silent", f"nobody listened in the guest within {timeout_s} s", retryable=True)
        await asyncio.sleep(TRY_AGAIN_S)


async def _try_once(path: Path, port: int, timeout_s: float) -> socket.socket | None:
    """A connection (`CONNECT port` is answered `OK number`), or None when the guest does not listen."""
    try:
        connection = connected(path)
    except OSError as error:
        raise DriverError(VM_GONE, f"the machine's vsock is closed: {error}", retryable=False) from error
    try:
        async with asyncio.timeout(timeout_s):
            answer = await _greet(connection, port)
    except (TimeoutError, ConnectionError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    if not answer.startswith(b"OK "):
        connection.close()
        if answer:
            raise DriverError(VM_GONE, f"the machine's vsock answered {answer!r}", retryable=False)
        return None
    return connection


async def _greet(connection: socket.socket, port: int) -> bytes:
    """The answer's line, and nothing of what comes after it; empty when the connection is closed instead."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, b"CONNECT %d\n" % port)
    answer = b""
    while not answer.endswith(b"\n") and len(answer) < GREETING_BYTES_MAX:
        byte = await loop.sock_recv(connection, 1)
        if not byte:
            return b""
        answer += byte
    return answer

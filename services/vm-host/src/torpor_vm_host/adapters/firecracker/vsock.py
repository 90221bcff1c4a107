"""The way into a guest: Firecracker's vsock socket on the host, and the agent that listens inside."""

import asyncio
from pathlib import Path
from typing import Final

from torpor_vm_host.adapters.qemu.guest import READ_BYTES, GuestChannel
from torpor_vm_host.adapters.qemu.process import connected
from torpor_vm_host.ports import VM_GONE, DriverError

AGENT_PORT: Final = 1024
"""The vsock port on which the agent listens; told to it on the kernel's command line."""
GUEST_CID: Final = 3
"""The guest's own address. Every machine may have the same: each has a socket of its own."""
TRY_AGAIN_S: Final = 0.02
GREETING_S_MAX: Final = 2.0
GREETING_BYTES_MAX: Final = 32


async def open_channel(socket: Path, timeout_s: float, port: int = AGENT_PORT) -> GuestChannel:
    """A channel to the guest's agent; tried again while nobody listens in the guest, which may still be booting.

    Raises `DriverError` `guest-silent`, or `vm-gone` when Firecracker does not listen either.
    """
    clock = asyncio.get_running_loop()
    deadline = clock.time() + timeout_s
    while True:
        channel = await _try_once(socket, port, min(GREETING_S_MAX, max(0.001, deadline - clock.time())))
        if channel is not None:
            return channel
        if clock.time() >= deadline:
            raise DriverError("guest-silent", f"nobody listened in the guest within {timeout_s} s", retryable=True)
        await asyncio.sleep(TRY_AGAIN_S)


async def _try_once(socket: Path, port: int, timeout_s: float) -> GuestChannel | None:
    """One connection (`CONNECT port` is answered `OK number`), or None when the guest does not listen."""
    try:
        reader, writer = await asyncio.open_unix_connection(sock=connected(socket), limit=READ_BYTES)
    except OSError as error:
        raise DriverError(VM_GONE, f"the machine's vsock is closed: {error}", retryable=False) from error
    try:
        async with asyncio.timeout(timeout_s):
            writer.write(b"CONNECT %d\n" % port)
            answer = await reader.readuntil(b"\n")
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        writer.transport.abort()
        return None
    except BaseException:
        writer.transport.abort()
        raise
    if len(answer) > GREETING_BYTES_MAX or not answer.startswith(b"OK "):
        writer.transport.abort()
        raise DriverError(VM_GONE, f"the machine's vsock answered {answer[:32]!r}", retryable=False)
    return GuestChannel(reader, writer)

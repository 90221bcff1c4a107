"""Firecracker's HTTP interface on its Unix socket: one request at a time, every failure a `DriverError`.

Each request has a connection of its own, so nothing is open between requests and nothing needs to be closed.
"""

import asyncio
import os
from pathlib import Path
from typing import Final

import httpcore
import msgspec

from torpor_vm_host.adapters.firecracker.requests import InstanceInfo, VmState
from torpor_vm_host.ports import VM_GONE, DriverError

ANSWER_S_MAX: Final = 20.0
SNAPSHOT_S_MAX: Final = 120.0
"""A snapshot writes all of a machine's memory to a disk."""
REFUSED: Final = "firecracker-refused"
SILENT: Final = "firecracker-silent"


class _Fault(msgspec.Struct, frozen=True):
    """The body of an answer that is an error."""

    fault_message: str = ""


class Api:
    """The interface of one Firecracker process, whose socket is at `socket`."""

    def __init__(self, socket: Path) -> None:
        # The path by its folder's descriptor: a Unix socket's own may not be longer than 107 bytes.
        self._folder: int | None = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        name = f"/proc/self/fd/{self._folder}/{socket.name}"
        self._pool = httpcore.AsyncConnectionPool(uds=name, max_connections=1, max_keepalive_connections=0)
        self._turn = asyncio.Lock()

    async def put(self, path: str, body: msgspec.Struct, *, timeout_s: float = ANSWER_S_MAX) -> None:
        """PUT a body; `DriverError` `firecracker-refused`, `firecracker-silent` or `vm-gone`."""
        await self._request("PUT", path, body, timeout_s)

    async def patch(self, path: str, body: msgspec.Struct, *, timeout_s: float = ANSWER_S_MAX) -> None:
        """PATCH with a body; errors as for `put`."""
        await self._request("PATCH", path, body, timeout_s)

    async def describe(self, *, timeout_s: float = ANSWER_S_MAX) -> InstanceInfo:
        """What the process says of its machine; errors as for `put`."""
        answer = await self._request("GET", "/", None, timeout_s)
        try:
            return msgspec.json.decode(answer, type=InstanceInfo)
        except msgspec.DecodeError as error:
            raise DriverError(REFUSED, f"GET / was answered by {answer[:200]!r}", retryable=False) from error

    async def pause(self) -> None:
        """Let the virtual processors stand still; idempotent."""
        await self.patch("/vm", VmState(state="Paused"))

    async def resume(self) -> None:
        """Let the virtual processors go on; idempotent."""
        await self.patch("/vm", VmState(state="Resumed"))

    def close(self) -> None:
        """Let go of the process."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    async def _request(self, method: str, path: str, body: msgspec.Struct | None, timeout_s: float) -> bytes:
        content = None if body is None else msgspec.json.encode(body)
        headers = [("Host", "localhost"), ("Accept", "application/json"), ("Content-Type", "application/json")]
        try:
            async with self._turn, asyncio.timeout(timeout_s):
                answer = await self._pool.request(method, f"http://localhost{path}", headers=headers, content=content)
        except (TimeoutError, httpcore.TimeoutException) as error:
            raise DriverError(SILENT, f"{method} {path} got no answer in {timeout_s} s", retryable=True) from error
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            raise DriverError(VM_GONE, f"{method} {path}: {error!r}", retryable=False) from error
        if answer.status >= 300:  # noqa: PLR2004  (HTTP)
            raise DriverError(REFUSED, f"{method} {path}: {answer.status} {_fault(answer.content)}", retryable=False)
        return answer.content


def _fault(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=_Fault).fault_message
    except msgspec.DecodeError:
        return repr(content[:200])

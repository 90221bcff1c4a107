"""QEMU's machine protocol: commands in order, their answers, and events; a session holds no task of its own.

QEMU: docs/interop/qmp-spec.txt. Commands may be sent before earlier ones are answered: QEMU runs them in order, so a
pause need not wait for a round trip between its steps.
"""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torpor_vm_host.adapters.qemu.wire import Wire, connected

LINE_BYTES_MAX: Final = 16 * 1024 * 1024


class QmpRefused(Exception):  # noqa: N818  (an answer)
    """QEMU would not do what it was told; the text is its own."""


class QmpSession:
    """One session with one QEMU. `on_event` is called with each event's name and data."""

    def __init__(self, path: Path) -> None:
        """Connect to the socket that QEMU listens on; raises `OSError`."""
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._greeted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._received = b""
        self.on_event: Callable[[str, dict[str, Any]], None] = lambda _, __: None
        self._wire = Wire(connected(path), self._take, self._over)

    @property
    def is_open(self) -> bool:
        """Whether QEMU can still be told anything."""
        return self._wire.is_open

    async def greet(self) -> None:
        """Wait for QEMU's greeting and begin; raises `ConnectionError`."""
        await self._greeted
        await self.send("qmp_capabilities")

    def send(
        self, command: str, arguments: dict[str, Any] | None = None, *, descriptor: int | None = None
    ) -> "asyncio.Future[Any]":
        """Give a command, with an open file if it takes one; the answer, `QmpRefused`, or `ConnectionError`."""
        number = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        message = json.dumps({"execute": command, "arguments": arguments or {}, "id": number}).encode() + b"\n"
        self._wire.send(message, () if descriptor is None else (descriptor,))
        self._answers[number] = answer
        return answer

    def close(self) -> None:
        """End the session; QEMU goes on."""
        self._wire.close()

    def _take(self, data: bytes) -> None:
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self._wire.close()
                return
            self._dispatch(message)
        if len(self._received) > LINE_BYTES_MAX:
            self._wire.close()

    def _dispatch(self, message: dict[str, Any]) -> None:
        if "event" in message:
            self.on_event(str(message["event"]), message.get("data") or {})
        elif "QMP" in message:
            if not self._greeted.done():
                self._greeted.set_result(None)
        else:
            answer = self._answers.pop(message.get("id", 0), None)
            if answer is None or answer.done():
                return
            if "error" in message:
                answer.set_exception(QmpRefused(str(message["error"].get("desc", message["error"]))))
            else:
                answer.set_result(message.get("return"))

    def _over(self) -> None:
        waiting = [*self._answers.values(), self._greeted]
        self._answers.clear()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(ConnectionResetError("QEMU has closed its control socket"))
                answer.exception()  # whoever waits is told; where nobody does, nobody is to be warned

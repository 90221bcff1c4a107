"""Firecracker's HTTP server and vsock on Unix sockets, in the process that is the machine."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any, Final

from tests.support.firecracker.interface import Interface
from tests.support.firecracker.machine import Machine
from tests.support.firecracker.rules import Refused

HEAD_BYTES_MAX: Final = 64 * 1024
AGENT_PORT: Final = 1024
GREETING_S_MAX: Final = 5.0


class Server:
    """Answers requests one after the other, and leads connections into the guest."""

    def __init__(self, machine: Machine, interface: Interface, identity: str, log: Path) -> None:
        self._machine = machine
        self._interface = interface
        self._identity = identity
        self._log = log
        self._vsock: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self._links: set[asyncio.StreamWriter] = set()
        self._next_port = 1 << 30
        self._over = asyncio.Event()

    async def run(self, socket: str) -> None:
        """Serve until the machine ends."""
        api = await asyncio.start_unix_server(self._serve, socket, limit=HEAD_BYTES_MAX)
        async with api:
            await self._over.wait()

    # --- requests ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not self._over.is_set():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                method, path, _ = lines[0].split(" ")
                headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in lines[1:])}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                status, answer = await self._answer(method, path, content)
                body = b"" if answer is None else json.dumps(answer).encode()
                words = f"HTTP/1.1 {status}\r\nServer: Firecracker API\r\nContent-Length: {len(body)}\r\n"
                writer.write((words + "Content-Type: application/json\r\n\r\n").encode() + body)
                await writer.drain()
                if self._machine.ended:
                    self._over.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, method: str, path: str, content: bytes) -> tuple[str, dict[str, Any] | None]:
        answer: tuple[str, dict[str, Any] | None] = ("204 No Content", None)
        try:
            defined, identity, schema = self._interface.find(method, path)
            body = json.loads(content) if content else {}
            if schema is not None:
                self._interface.check(body, schema)
            elif content:
                raise ValueError("GET request cannot have a body.")  # noqa: TRY301
            if method == "GET":
                answer = "200 OK", self._describe(defined)
            else:
                self._machine.take(method, defined, body, identity)
                await self._keep_vsock(defined)
        except (ValueError, Refused) as error:
            answer = "400 Bad Request", {"fault_message": str(error)}
        self._note(method, path, content, answer)
        return answer

    def _describe(self, path: str) -> dict[str, Any]:
        version = ".".join(map(str, self._machine.version))
        match path:
            case "/":
                state = self._machine.rules.state
                return {"id": self._identity, "state": state, "vmm_version": version, "app_name": "Firecracker"}
            case "/version":
                return {"firecracker_version": version}
            case _:
                raise Refused(f"{path} is not told by this server")

    def _note(self, method: str, path: str, content: bytes, answer: tuple[str, dict[str, Any] | None]) -> None:
        entry = {
            "id": self._identity,
            "method": method,
            "path": path,
            "body": json.loads(content or b"null"),
            "status": int(answer[0].split()[0]),
            "answer": answer[1],
        }
        number = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(number, json.dumps(entry).encode() + b"\n")
        os.close(number)

    # --- vsock ---

    async def _keep_vsock(self, path: str) -> None:
        if path == "/snapshot/create":
            for link in list(self._links):  # every connection is reset
                link.transport.abort()
        if self._vsock is None and self._machine.vsock is not None:
            self._vsock = await asyncio.start_unix_server(self._lead_in, self._machine.vsock.name)

    async def _lead_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._machine.guest is not None
        try:
            async with asyncio.timeout(GREETING_S_MAX):
                line = await reader.readuntil(b"\n")
            if line != b"CONNECT %d\n" % AGENT_PORT:
                raise ConnectionRefusedError(line)
            inside = await asyncio.open_unix_connection(self._machine.guest.nearby)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            writer.close()
            return
        self._next_port += 1
        writer.write(b"OK %d\n" % self._next_port)
        self._links |= {writer, inside[1]}
        for source, target in ((reader, inside[1]), (inside[0], writer)):
            pump = asyncio.create_task(self._pump(source, target))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(HEAD_BYTES_MAX):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()
            self._links.discard(writer)

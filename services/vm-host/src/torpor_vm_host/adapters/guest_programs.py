"""Programs in a guest, the same for every engine whose guest runs our agent: a driver only says how to reach it."""

import signal as signals
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from torpor_contracts.ids import ExecId, VmId
from torpor_contracts.session import ExecSpec
from torpor_guest_agent.frames import Frame
from torpor_vm_host.adapters.guest_files import GuestFiles
from torpor_vm_host.adapters.qemu.following import Followers, unknown_program
from torpor_vm_host.adapters.qemu.guest import GuestChannel, programs_of
from torpor_vm_host.ports import VM_GONE, DriverError, ExecOutcome, OnOutput, Output, PresentExec

CANNOT_START: Final = {
    "not-found": 127,
    "not-permitted": 126,
    "cannot-start": 126,
    "no-such-directory": 126,
    "no-such-user": 126,
    "name-too-long": 126,
    "not-a-directory": 126,
    "out-of-memory": 126,
    "too-many-processes": 126,
}
"""The agent's reason -> the exit code a shell would give."""


class GuestPrograms(GuestFiles):
    """The part of `ports.Driver` that is about a guest."""

    @abstractmethod
    async def _talk(self, vm_id: VmId) -> tuple[GuestChannel, Followers]:
        """The open channel to the machine's guest; `DriverError` when there is no such machine."""

    @asynccontextmanager
    async def _reach(self, vm_id: VmId) -> AsyncIterator[tuple[GuestChannel, Followers]]:
        """The open channel, for as long as a request and its answer take."""
        yield await self._talk(vm_id)

    async def _ask(self, vm_id: VmId, op: str, header: dict[str, Any] | None = None) -> Frame:
        """Ask the machine's agent, and wait for its answer."""
        async with self._reach(vm_id) as (guest, _):
            return await guest.request(op, header)

    def _beginning(
        self, vm_id: VmId, guest: GuestChannel, op: str, header: dict[str, Any], body: bytes = b""
    ) -> Callable[[], Awaitable[Frame]]:
        """What makes the agent send a program's events on the channel `guest`, on which they are waited for."""

        async def begin() -> Frame:
            async with self._reach(vm_id) as (now, _):
                if now is not guest:
                    raise DriverError(VM_GONE, "the guest's channel was renewed", retryable=False)
                return await guest.request(op, header, body)

        return begin

    async def exec(self, vm_id: VmId, exec_id: ExecId, program: ExecSpec, on_output: OnOutput) -> ExecOutcome:
        """See `ports.Driver`."""
        guest, followers = await self._talk(vm_id)
        header: dict[str, Any] = {
            "exec_id": exec_id,
            "argv": program.argv,
            "env": program.env,
            "cwd": program.cwd,
            "user": program.user,
            "timeout_s": program.timeout_s,
            "stdin_open": program.stdin_open or program.terminal is not None,
        }
        if program.terminal is not None:
            header["pty"] = {"rows": program.terminal.rows, "columns": program.terminal.columns}
        begin = self._beginning(vm_id, guest, "exec", header, program.stdin.encode())
        try:
            return await followers.follow(exec_id, begin, on_output)
        except DriverError as error:
            code = CANNOT_START.get(error.code)
            if code is None:
                raise
            said = "command not found" if error.code == "not-found" else error.detail
            message = f"torpor: {program.argv[0]}: {said}\n".encode()
            await on_output(Output(stream="stderr", offset=0, data=message))
            return ExecOutcome(outcome="exited", exit_code=code, detail=error.code, output_bytes=len(message))

    async def attach(self, vm_id: VmId, exec_id: ExecId, on_output: OnOutput) -> ExecOutcome:
        """See `ports.Driver`."""
        guest, followers = await self._talk(vm_id)
        begin = self._beginning(vm_id, guest, "attach", {"exec_id": exec_id})
        try:
            return await followers.follow(exec_id, begin, on_output)
        except DriverError as error:
            raise unknown_program(error) from error

    async def execs(self, vm_id: VmId) -> list[PresentExec]:
        """See `ports.Driver`."""
        answer = await self._ask(vm_id, "programs")
        return [
            PresentExec(exec_id=ExecId(found.exec_id), running=found.running, remaining_s=found.remaining_s or 0.0)
            for found in programs_of(answer)
        ]

    async def kill(self, vm_id: VmId, exec_id: ExecId, signal: int) -> None:
        """See `ports.Driver`."""
        try:
            await self._ask(vm_id, "signal", {"exec_id": exec_id, "signal": signals.Signals(signal).value})
        except DriverError as error:
            raise unknown_program(error) from error

    async def forget(self, vm_id: VmId, exec_id: ExecId) -> None:
        """See `ports.Driver`."""
        await self._ask(vm_id, "forget", {"exec_id": exec_id})

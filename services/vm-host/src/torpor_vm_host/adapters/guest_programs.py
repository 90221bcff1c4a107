"""Programs in a guest, the same for every engine whose guest runs our agent: a driver only says how to reach it."""

import signal as signals
from abc import ABC, abstractmethod
from typing import Final

from torpor_contracts.ids import ExecId, VmId
from torpor_contracts.session import ExecSpec
from torpor_vm_host.adapters.qemu.following import Followers, unknown_program
from torpor_vm_host.adapters.qemu.guest import GuestChannel
from torpor_vm_host.ports import DriverError, ExecOutcome, OnOutput, Output, PresentExec

CANNOT_START: Final = {"not-found": 127, "not-permitted": 126, "cannot-start": 126, "no-such-user": 126}


class GuestPrograms(ABC):
    """The part of `ports.Driver` that is about programs."""

    @abstractmethod
    async def _talk(self, vm_id: VmId) -> tuple[GuestChannel, Followers]:
        """The open channel to the machine's guest; `DriverError` when there is no such machine."""

    async def exec(self, vm_id: VmId, exec_id: ExecId, program: ExecSpec, on_output: OnOutput) -> ExecOutcome:
        """See `ports.Driver`."""
        guest, followers = await self._talk(vm_id)
        if any(known.exec_id == exec_id for known in await self.execs(vm_id)):
            raise DriverError("exec-exists", f"the guest knows {exec_id} already", retryable=False)
        header = {
            "exec_id": exec_id,
            "argv": program.argv,
            "env": program.env,
            "cwd": program.cwd,
            "user": program.user,
            "timeout_s": program.timeout_s,
        }

        async def begin() -> None:
            await guest.request("exec", header, program.stdin.encode())

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

        async def begin() -> None:
            await guest.request("attach", {"exec_id": exec_id})

        try:
            return await followers.follow(exec_id, begin, on_output)
        except DriverError as error:
            raise unknown_program(error) from error

    async def execs(self, vm_id: VmId) -> list[PresentExec]:
        """See `ports.Driver`."""
        guest, _ = await self._talk(vm_id)
        answer = await guest.request("programs")
        return [
            PresentExec(exec_id=found["exec_id"], running=found["running"], remaining_s=found["remaining_s"] or 0.0)
            for found in answer.header["programs"]
        ]

    async def kill(self, vm_id: VmId, exec_id: ExecId, signal: int) -> None:
        """See `ports.Driver`."""
        guest, _ = await self._talk(vm_id)
        try:
            await guest.request("signal", {"exec_id": exec_id, "signal": signals.Signals(signal).value})
        except DriverError as error:
            raise unknown_program(error) from error

    async def forget(self, vm_id: VmId, exec_id: ExecId) -> None:
        """See `ports.Driver`."""
        guest, _ = await self._talk(vm_id)
        await guest.request("forget", {"exec_id": exec_id})

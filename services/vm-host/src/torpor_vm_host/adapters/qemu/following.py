"""Following programs in a guest: output in order to whoever takes it, confirmed when it is taken, until the end."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, Literal, cast

from torpor_contracts.ids import ExecId
from torpor_guest_agent.frames import Frame
from torpor_vm_host.adapters.qemu.guest import GuestChannel
from torpor_vm_host.ports import EXEC_UNKNOWN, VM_GONE, DriverError, ExecOutcome, OnOutput, Output

CONFIRM_EVERY_BYTES: Final = 128 * 1024


class Followers:
    """Hands the events of a guest's programs to those who follow them, one follower a program."""

    def __init__(self, guest: GuestChannel) -> None:
        self._guest = guest
        self._queues: dict[str, asyncio.Queue[Frame]] = {}
        guest.on_event = self._take

    async def follow(self, exec_id: ExecId, begin: Callable[[], Any], on_output: OnOutput) -> ExecOutcome:
        """Begin (start or attach), then take output to the end. Who was following before is cut off.

        The queue is bounded by what the guest sends unconfirmed (`programs.UNCONFIRMED_BYTES_MAX`).
        """
        queue: asyncio.Queue[Frame] = asyncio.Queue()
        self._queues[exec_id] = queue
        try:
            await begin()
            return await self._take_all(exec_id, queue, on_output)
        finally:
            if self._queues.get(exec_id) is queue:
                del self._queues[exec_id]

    async def _take_all(self, exec_id: ExecId, queue: asyncio.Queue[Frame], on_output: OnOutput) -> ExecOutcome:
        taken = confirmed = -1
        while True:
            frame = await queue.get()
            header = frame.header
            match header["event"]:
                case "output":
                    if header["offset"] < taken:  # sent again on attaching, and taken already
                        continue
                    stream = cast("Literal['stdout', 'stderr']", header["stream"])
                    await on_output(Output(stream=stream, offset=header["offset"], data=frame.body))
                    taken = header["offset"] + len(frame.body)
                    if taken - confirmed >= CONFIRM_EVERY_BYTES or queue.empty():
                        await self._guest.tell("confirm", {"exec_id": exec_id, "offset": taken})
                        confirmed = taken
                case "end":
                    return _outcome(header)
                case _:
                    raise DriverError(VM_GONE, "the guest's channel was closed", retryable=False)

    def _take(self, frame: Frame) -> None:
        exec_id = frame.header.get("exec_id")
        if exec_id is None:
            if frame.header["event"] == "closed":
                for queue in self._queues.values():
                    queue.put_nowait(frame)
            return
        follower = self._queues.get(exec_id)
        if follower is not None:
            follower.put_nowait(frame)


def _outcome(header: dict[str, Any]) -> ExecOutcome:
    detail = f"signal {header['signal']}" if header.get("signal") is not None else ""
    timed_out = header["outcome"] == "timed-out"
    return ExecOutcome(
        outcome=header["outcome"],
        exit_code=None if timed_out else header["exit_code"],
        detail=detail,
        output_bytes=header["offset"],
    )


def unknown_program(error: DriverError) -> DriverError:
    """The agent's word for a program it does not know, as the port says it."""
    if error.code == "no-such-program":
        return DriverError(EXEC_UNKNOWN, error.detail, retryable=False)
    return error

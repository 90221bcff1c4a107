"""Following programs in a guest: output in order to whoever takes it, confirmed when it is taken, until the end."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal

import msgspec

from torpor_contracts.ids import ExecId
from torpor_guest_agent.frames import Frame
from torpor_vm_host.adapters.qemu.guest import NONSENSE, GuestChannel
from torpor_vm_host.ports import EXEC_UNKNOWN, VM_GONE, DriverError, ExecOutcome, OnOutput, Output

CONFIRM_EVERY_BYTES: Final = 128 * 1024


class OutputEvent(msgspec.Struct, frozen=True, tag="output", tag_field="event"):
    """Bytes a program wrote, which are the body of the frame."""

    stream: Literal["stdout", "stderr"]
    offset: int


class EndEvent(msgspec.Struct, frozen=True, tag="end", tag_field="event"):
    """A program ended; `offset` is all it wrote."""

    outcome: Literal["exited", "signaled", "timed-out"]
    offset: int
    exit_code: int | None = None
    signal: int | None = None


class Began(msgspec.Struct, frozen=True):
    """What an agent answers to who begins to follow a program; one that starts has written nothing yet."""

    first_offset: int = 0


class ClosedEvent(msgspec.Struct, frozen=True, tag="closed", tag_field="event"):
    """The guest's channel is no more."""


class Followers:
    """Hands a guest's events to those who wait for them: one follower a program, any number of watches."""

    def __init__(self, guest: GuestChannel) -> None:
        self._guest = guest
        self._queues: dict[str, asyncio.Queue[Frame]] = {}
        self._watches: dict[str, Callable[[Frame], None]] = {}
        self._numbers = itertools.count(1)
        guest.on_event = self._take

    async def follow(self, exec_id: ExecId, begin: Callable[[], Awaitable[Frame]], on_output: OnOutput) -> ExecOutcome:
        """Begin (start or attach), then take output to the end. Who was following before is cut off.

        The answer to `begin` says where the output begins that nobody has taken yet (`first_offset`).

        The queue is bounded by what the guest sends unconfirmed (`program.UNCONFIRMED_BYTES_MAX`).
        """
        queue: asyncio.Queue[Frame] = asyncio.Queue()
        self._queues[exec_id] = queue
        try:
            began = _began(await begin())
            return await self._take_all(exec_id, queue, on_output, began.first_offset)
        finally:
            if self._queues.get(exec_id) is queue:
                del self._queues[exec_id]

    @contextmanager
    def watching(self, take: Callable[[Frame], None]) -> Iterator[str]:
        """The id of a new watch, whose events `take` is given, and the one that says that the channel was closed."""
        watch = f"watch-{next(self._numbers)}"
        self._watches[watch] = take
        try:
            yield watch
        finally:
            del self._watches[watch]

    async def _take_all(
        self, exec_id: ExecId, queue: asyncio.Queue[Frame], on_output: OnOutput, first_offset: int
    ) -> ExecOutcome:
        """Every byte once, in order: what a guest says before it has heard of us, it says again because it has."""
        taken, confirmed = first_offset, -1
        while True:
            frame = await queue.get()
            match _event(frame):
                case OutputEvent(offset=offset) | EndEvent(offset=offset) if offset != taken:
                    continue
                case OutputEvent() as output:
                    await on_output(Output(stream=output.stream, offset=output.offset, data=frame.body))
                    taken = output.offset + len(frame.body)
                    if taken - confirmed >= CONFIRM_EVERY_BYTES or queue.empty():
                        self._guest.tell("confirm", {"exec_id": exec_id, "offset": taken})
                        confirmed = taken
                case EndEvent() as end:
                    return _outcome(end)
                case ClosedEvent():
                    raise DriverError(VM_GONE, "the guest's channel was closed", retryable=False)

    def _take(self, frame: Frame) -> None:
        exec_id = frame.header.get("exec_id")
        watching = self._watches.get(str(frame.header.get("watch")))
        if watching is not None:
            watching(frame)
        if frame.header["event"] == "closed" and exec_id is None:
            for queue in self._queues.values():
                queue.put_nowait(frame)
            for take in list(self._watches.values()):
                take(frame)
            return
        follower = self._queues.get(exec_id) if isinstance(exec_id, str) else None
        if follower is not None:
            follower.put_nowait(frame)


def _event(frame: Frame) -> OutputEvent | EndEvent | ClosedEvent:
    try:
        return msgspec.convert(frame.header, OutputEvent | EndEvent | ClosedEvent)
    except msgspec.ValidationError as error:
        raise _nonsense(error) from error


def _began(answer: Frame) -> Began:
    try:
        return msgspec.convert(answer.header, Began)
    except msgspec.ValidationError as error:
        raise _nonsense(error) from error


def _nonsense(error: msgspec.ValidationError) -> DriverError:
    return DriverError(NONSENSE, f"the guest's agent says what no agent of ours does: {error}", retryable=False)


def _outcome(end: EndEvent) -> ExecOutcome:
    return ExecOutcome(
        outcome=end.outcome,
        exit_code=None if end.outcome == "timed-out" else end.exit_code,
        detail="" if end.signal is None else f"signal {end.signal}",
        output_bytes=end.offset,
    )


def unknown_program(error: DriverError) -> DriverError:
    """The agent's word for a program it does not know, as the port says it."""
    if error.code == "no-such-program":
        return DriverError(EXEC_UNKNOWN, error.detail, retryable=False)
    return error

"""The door to this host's guests: files, input and terminals of machines that run, for those whose sessions they are.

It begins nothing and records nothing. A request names its session and incarnation; one for a machine that is not the
session's any more is refused, and so is one for a machine that is being put to sleep: who asks wakes it then.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec

from torpor_contracts import guest
from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.ids import TenantId, VmId
from torpor_contracts.session import TerminalSize
from torpor_messaging import guest_messages
from torpor_vm_host.answers import Answers
from torpor_vm_host.bounded import TIMED_OUT
from torpor_vm_host.domain.vm import Claim, Running
from torpor_vm_host.guest_ports import STDIN_FULL
from torpor_vm_host.hosting import Hosting
from torpor_vm_host.ports import EXEC_UNKNOWN, VM_GONE, DriverError
from torpor_vm_host.watches import Watches

AT_ONCE_MAX: Final = 32
"""Requests that are in guests at once; the others wait. Each may hold a piece of a file in memory."""

WANTED_S: Final = 1.0
"""How long it is believed that a session wants its machine, before its stream is looked at again."""

ADVICE: Final[Mapping[str, str]] = {
    "not-found": "check the path",
    "upload-unknown": "begin the upload again, from its first piece",
    "disk-full": "remove something, or create sessions with a larger disk",
    STDIN_FULL: "give it again when the program has read on",
    "stdin-gap": "give input in order, each piece where the one before ended",
    "stdin-closed": "start the program with stdin_open or a terminal",
    "no-terminal": "start the program with a terminal",
    EXEC_UNKNOWN: "check the exec id; the program may have ended",
}
UNTOUCHED: Final = (guest.WatchDirectory, guest.ListPrograms)
"""Requests that are no use of the machine: whoever looks on does not keep it awake."""

Answered = tuple[msgspec.Struct, bytes]


class Door:
    """Answers `guest.<tenant>.<this host>.<type>.<session>`."""

    def __init__(self, hosting: Hosting) -> None:
        self._driver = hosting.driver
        self._ledger = hosting.ledger
        self._uses = hosting.uses
        self._clock = hosting.clock
        self._watches = Watches(hosting.driver, hosting.workers, hosting.clock)
        self._answers = Answers()
        self._at_once = asyncio.Semaphore(AT_ONCE_MAX)
        self._wanted_s: dict[VmId, float] = {}

    async def handle(self, tenant_id: TenantId, type_: str, session_id: str, data: bytes) -> bytes:
        """The answer's message; raises `Rejected` or `Transient` to refuse."""
        operation = guest.OPERATIONS.get(type_)
        if operation is None:
            known = ", ".join(guest.OPERATIONS)
            raise Rejected("unknown-operation", f"there is no {type_!r}", f"use one of {known}")
        parts = guest_messages.split(data)
        try:
            request: Any = msgspec.json.decode(parts.head, type=operation.request)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Rejected(
                "malformed-request", f"{type_}: {error}", "send what the schema says, on one line"
            ) from error
        claim = await self._claim(tenant_id, session_id, request.incarnation)
        if operation.reads or not request.request_id:
            return await self._carry_out(claim, request, parts.body)
        key = f"{claim.vm_id}/{request.request_id}"
        return await self._answers.once(key, data, lambda: self._carry_out(claim, request, parts.body))

    async def _claim(self, tenant_id: TenantId, session_id: str, incarnation: int) -> Claim:
        """The machine that is meant; refused unless it is the session's, here, running, and of that incarnation."""
        for state in self._ledger.known.values():
            if not isinstance(state, Running) or state.claim.session_id != session_id:
                continue
            claim = state.claim
            if claim.tenant_id == tenant_id and claim.incarnation == incarnation and await self._is_wanted(claim):
                return claim
        raise Rejected(
            guest.NOT_HERE,
            f"incarnation {incarnation} of session {session_id} does not run on this host",
            "look at the session again, and resume it if it sleeps",
        )

    async def _is_wanted(self, claim: Claim) -> bool:
        now_s = self._clock.monotonic_s()
        if now_s - self._wanted_s.get(claim.vm_id, -WANTED_S) < WANTED_S:
            return True
        wanted = await self._ledger.wanted(claim)
        if wanted:
            self._wanted_s = {vm_id: at_s for vm_id, at_s in self._wanted_s.items() if now_s - at_s < WANTED_S}
            self._wanted_s[claim.vm_id] = now_s
        return wanted

    async def _carry_out(self, claim: Claim, request: guest.GuestRequest, body: bytes) -> bytes:
        try:
            if isinstance(request, UNTOUCHED):
                answer, data = await self._look_on(claim.vm_id, request)
            else:
                with self._uses.using(claim.vm_id):
                    async with self._at_once:
                        answer, data = await self._use(claim.vm_id, request, body)
        except DriverError as error:
            raise _refusal(error) from error
        return guest_messages.encode(answer, data)

    async def _look_on(self, vm_id: VmId, request: guest.WatchDirectory | guest.ListPrograms) -> Answered:
        if isinstance(request, guest.WatchDirectory):
            return guest.DirectoryWatched(events=await self._watches.ask(vm_id, request)), b""
        found = await self._driver.execs(vm_id)
        programs = [
            guest.RunningProgram(exec_id=one.exec_id, running=one.running, remaining_s=one.remaining_s) for one in found
        ]
        return guest.ProgramsListed(programs=programs), b""

    async def _use(self, vm_id: VmId, request: Any, body: bytes) -> Answered:
        done: Callable[[Any, VmId, Any, bytes], Awaitable[Answered]] = _USES[type(request)]
        return await done(self._driver, vm_id, request, body)


async def _read(driver: Any, vm_id: VmId, request: guest.ReadFile, _: bytes) -> Answered:
    if request.offset < 0 or not 0 < request.length <= guest.PIECE_BYTES_MAX:
        raise _illegal(f"offset {request.offset}, length {request.length}", f"read 1 to {guest.PIECE_BYTES_MAX} bytes")
    piece = await driver.read_file(vm_id, request.path, request.offset, request.length)
    return piece.read, piece.data


async def _write(driver: Any, vm_id: VmId, request: guest.WriteFile, body: bytes) -> Answered:
    if request.offset < 0 or not 0 <= request.mode <= MODE_MAX:
        raise _illegal(
            f"offset {request.offset}, mode {request.mode:o}", "give an offset from 0 on and 12 bits of mode"
        )
    if not request.upload.isascii() or not request.upload.isalnum() or len(request.upload) > 64:  # noqa: PLR2004
        raise _illegal("the upload has no name", "name it with up to 64 letters and digits")
    return guest.FileWritten(size_bytes=await driver.write_file(vm_id, request, body)), b""


async def _stat(driver: Any, vm_id: VmId, request: guest.StatFile, _: bytes) -> Answered:
    return guest.FileStat(entry=await driver.stat_file(vm_id, request.path)), b""


async def _list(driver: Any, vm_id: VmId, request: guest.ListDirectory, _: bytes) -> Answered:
    if not 1 <= request.limit <= guest.ENTRIES_MAX:
        raise _illegal(f"limit {request.limit}", f"ask for 1 to {guest.ENTRIES_MAX} entries")
    listed: guest.DirectoryListed = await driver.list_directory(vm_id, request.path, request.after, request.limit)
    return listed, b""


async def _make(driver: Any, vm_id: VmId, request: guest.MakeDirectory, _: bytes) -> Answered:
    await driver.make_directory(vm_id, request.path, request.mode, request.user)
    return guest.Done(), b""


async def _move(driver: Any, vm_id: VmId, request: guest.MoveFile, _: bytes) -> Answered:
    await driver.move_file(vm_id, request.path, request.to)
    return guest.Done(), b""


async def _remove(driver: Any, vm_id: VmId, request: guest.RemoveFile, _: bytes) -> Answered:
    await driver.remove_file(vm_id, request.path, recursive=request.recursive)
    return guest.Done(), b""


async def _feed(driver: Any, vm_id: VmId, request: guest.FeedProgram, body: bytes) -> Answered:
    if request.offset < 0:
        raise _illegal(f"offset {request.offset}", "count the bytes given before")
    fed = await driver.feed(vm_id, request.exec_id, body, request.offset, ends=request.ends)
    return guest.ProgramFed(offset=fed), b""


async def _resize(driver: Any, vm_id: VmId, request: guest.ResizeTerminal, _: bytes) -> Answered:
    if not (1 <= request.rows <= SIDE_MAX and 1 <= request.columns <= SIDE_MAX):
        raise _illegal(f"{request.rows} rows, {request.columns} columns", f"give 1 to {SIDE_MAX} of each")
    size = TerminalSize(rows=request.rows, columns=request.columns)
    await driver.resize(vm_id, request.exec_id, size)
    return guest.Done(), b""


async def _signal(driver: Any, vm_id: VmId, request: guest.SignalProgram, _: bytes) -> Answered:
    if not 0 < request.signal <= SIGNAL_MAX:
        raise _illegal(f"signal {request.signal}", f"give the number of a signal, 1 to {SIGNAL_MAX}")
    await driver.kill(vm_id, request.exec_id, request.signal)
    return guest.Done(), b""


MODE_MAX: Final = 0o7777
SIDE_MAX: Final = 10_000
SIGNAL_MAX: Final = 64
_USES: Final[Mapping[type[Any], Callable[..., Awaitable[Answered]]]] = {
    guest.ReadFile: _read,
    guest.WriteFile: _write,
    guest.StatFile: _stat,
    guest.ListDirectory: _list,
    guest.MakeDirectory: _make,
    guest.MoveFile: _move,
    guest.RemoveFile: _remove,
    guest.FeedProgram: _feed,
    guest.ResizeTerminal: _resize,
    guest.SignalProgram: _signal,
}


def _illegal(what: str, advice: str) -> Rejected:
    return Rejected("illegal-request", f"{what} cannot be", advice)


def _refusal(error: DriverError) -> Rejected | Transient:
    """What a driver could not do, as the refusal of a request."""
    if error.code in {VM_GONE, "vm-not-running"}:
        return Rejected(guest.NOT_HERE, f"the machine is gone: {error.detail}", "look at the session again")
    if error.code == TIMED_OUT or (error.retryable and error.code != STDIN_FULL):
        return Transient(f"{error.code}: {error.detail}", retry_after_s=1.0)
    return Rejected(error.code, error.detail, ADVICE.get(error.code, "see the code"))

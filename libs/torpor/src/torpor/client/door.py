"""What a session's machine is asked directly: finds the machine, wakes the session when it sleeps, and asks again."""

import asyncio
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from torpor.client.awaited import UP, observed
from torpor.client.connection import Connection
from torpor.client.refusals import guest_refusal
from torpor.errors import Unavailable, WrongState
from torpor_contracts import guest
from torpor_contracts.ids import HostId
from torpor_contracts.replies import Receipt, Refusal
from torpor_contracts.scheduling import SessionView
from torpor_contracts.session import ResumeSession, SuspendFailed, SuspendWithdrawn
from torpor_messaging import guest_messages, subjects
from torpor_messaging.system import SystemIds

ASK_TIMEOUT_S: Final = 120.0
"""How long one request is asked, waking the machine included."""
TRIES_MAX: Final = 64
LOOK_AGAIN_S: Final = 10.0
"""How long a host is asked that does not answer, before the session is looked at again: it may be elsewhere by now."""
LOOKS_MAX: Final = 8
_PAUSE_S_FIRST: Final = 0.02
_PAUSE_S_MAX: Final = 1.0

_SETTLED: Final = (*UP, SuspendFailed, SuspendWithdrawn)
_TYPES: Final = {operation.request: type_ for type_, operation in guest.OPERATIONS.items()}
_IDS: Final = SystemIds()


class Place(NamedTuple):
    """Where a session's machine is, and which it is."""

    host_id: HostId
    incarnation: int


class Answered(NamedTuple):
    """An answer, the bytes that go with it, and the machine that gave it."""

    answer: Any
    body: bytes
    place: Place


class Door:
    """Asks one session's machine."""

    def __init__(self, connection: Connection, session_id: str) -> None:
        self._connection = connection
        self._session_id = session_id
        self._finding = asyncio.Lock()
        self.place: Place | None = None
        """The machine as far as we know; None: to be found."""

    def another(self) -> "Door":
        """A door to the same session for whoever waits for long."""
        return Door(self._connection, self._session_id)

    async def ask(
        self,
        request: guest.GuestRequest,
        body: bytes = b"",
        *,
        wakes: bool = True,
        patience_s: float = 1.0,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> Answered:
        """The answer to a request, whose incarnation is filled in.

        A session that sleeps is woken if the request `wakes` it, else waited for. Asked again, it changes nothing twice
        in the same machine. `Unavailable` after `timeout_s`.
        """
        operation = guest.OPERATIONS[_TYPES[type(request)]]
        if not operation.reads:
            request = replace(request, request_id=_IDS.new("req"))
        loop = asyncio.get_running_loop()
        deadline_s, pause_s = loop.time() + timeout_s, _PAUSE_S_FIRST
        reason = "its machine was not found"
        for _ in range(TRIES_MAX):
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                break
            place = self.place or await self._find(left_s, wakes=wakes)
            subject = subjects.guest(self._connection.tenant, place.host_id, _TYPES[type(request)], self._session_id)
            data = guest_messages.encode(replace(request, incarnation=place.incarnation), body)
            try:
                complaint = f"{place.host_id} does not answer"
                answered = await self._connection.ask(
                    subject, data, min(left_s, max(LOOK_AGAIN_S, patience_s)), complaint, patience_s
                )
            except Unavailable as away:
                reason = away.message
                self._forget(place)
                continue
            answer, attached = guest_messages.decode_answer(answered, operation.answer)
            if not isinstance(answer, Refusal):
                return Answered(answer, attached, place)
            if answer.code == guest.NOT_HERE:
                self._forget(place)
            elif answer.retry_after_s is None:
                raise guest_refusal(answer)
            reason = answer.message
            await asyncio.sleep(min(answer.retry_after_s or pause_s, max(0.0, deadline_s - loop.time())))
            pause_s = min(pause_s * 2, _PAUSE_S_MAX)
        raise Unavailable(
            f"session {self._session_id} did not answer {_TYPES[type(request)]} within {timeout_s:g} s: {reason}",
            f"see `torpor session show {self._session_id}`, and ask again",
        )

    def _forget(self, place: Place) -> None:
        if self.place == place:
            self.place = None

    async def _find(self, timeout_s: float, *, wakes: bool) -> Place:
        async with self._finding:
            if self.place is None:
                self.place = await self._found(timeout_s, wakes=wakes)
            return self.place

    async def _found(self, timeout_s: float, *, wakes: bool) -> Place:
        view: SessionView = await self._connection.query("scheduler", "session", self._session_id)
        for _ in range(LOOKS_MAX):
            if view.state == "running" and view.host_id is not None:
                return Place(view.host_id, view.incarnation)
            since = await self._coming(view, timeout_s, wakes=wakes)
            body = (seen := await observed(self._connection, self._session_id, since, _SETTLED, timeout_s)).body
            if isinstance(body, UP):
                return Place(body.host_id, body.incarnation)
            # It did not fall asleep after all: the machine is the one it was.
            view = await self._connection.query("scheduler", "session", self._session_id, {"at_least": seen.position})
        raise Unavailable(f"session {self._session_id} does not come to run", "see `torpor session show`")

    async def _coming(self, view: SessionView, timeout_s: float, *, wakes: bool) -> Receipt | int:
        """Wake the session if it sleeps; since when in the log its machine may be seen running."""
        if view.state in {"terminating", "terminated"}:
            raise WrongState(f"session-{view.state}", f"the session is {view.state}", "create another session")
        if view.state == "failed":
            problem = view.problem
            told = f": {problem.code}: {problem.detail}" if problem else ""
            raise WrongState("session-failed", f"the session failed{told}", problem.way_out if problem else "resume it")
        if wakes and view.state in {"suspended", "suspending", "lost"}:
            try:
                return await self._connection.command(
                    "scheduler", self._session_id, ResumeSession(), _IDS.new("cmd"), timeout_s
                )
            except WrongState as refused:
                if not refused.code.startswith("already-"):
                    raise
                # Somebody else wakes it.
        return view.position + 1


def encoded_path(path: str | bytes) -> bytes:
    """A path as the guest has it; text with `surrogateescape` stands for bytes that are no UTF-8."""
    return path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")


def shown(name: bytes) -> str:
    """A name or path as text, from which `encoded_path` makes the same bytes again."""
    return name.decode("utf-8", "surrogateescape")

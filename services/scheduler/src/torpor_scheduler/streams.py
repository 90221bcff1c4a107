"""Folds the scheduler's streams and decides on them; a stream of something else is known for what it is.

All streams of the log share one name space, and clients choose the ids of sessions: what stands under an id may
belong to another service. That is an answer, not a violated invariant.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from torpor_contracts.errors import Rejected
from torpor_contracts.ids import HostId, SessionId
from torpor_contracts.replies import Receipt
from torpor_eventlog.deciding import Cause, Decisions
from torpor_messaging.service_ports import ServicePorts
from torpor_scheduler.domain.folding import evolve
from torpor_scheduler.domain.host import ABSENT_HOST, Host, HostPhase, evolve_host
from torpor_scheduler.domain.session import INITIAL, Phase, Session
from torpor_scheduler.projections import HOST_EVENTS, SESSION_EVENTS

SESSIONS_KEPT: Final = 512
"""Folded states kept in memory: sessions that sleep by the ten thousand must not add up there."""

HOSTS_KEPT: Final = 256


State = TypeVar("State", Session, Host)


class Foreign(msgspec.Struct, frozen=True):
    """A stream that is not of the kind it was read as."""


FOREIGN: Final = Foreign()


def _fold_session(state: Session | Foreign, event: Any) -> Session | Foreign:
    if isinstance(state, Foreign) or not isinstance(event, SESSION_EVENTS):
        return FOREIGN
    return evolve(state, event)


def _fold_host(state: Host | Foreign, event: Any) -> Host | Foreign:
    if isinstance(state, Foreign) or not isinstance(event, HOST_EVENTS):
        return FOREIGN
    return evolve_host(state, event)


def _initial_session() -> Session | Foreign:
    return INITIAL


def _initial_host() -> Host | Foreign:
    return ABSENT_HOST


class Streams:
    """The streams of sessions and hosts."""

    def __init__(self, ports: ServicePorts) -> None:
        now = ports.clock.now
        self._sessions = Decisions[Session | Foreign](ports.log, _initial_session, _fold_session, now, SESSIONS_KEPT)
        self._hosts = Decisions[Host | Foreign](ports.log, _initial_host, _fold_host, now, HOSTS_KEPT)

    async def session(self, session_id: SessionId) -> Session | None:
        """The session's present state; None when there is none."""
        state, _ = await self._sessions.fold(session_id)
        return None if isinstance(state, Foreign) or state.phase is Phase.ABSENT else state

    async def host(self, host_id: HostId) -> Host | None:
        """The host's present state; None when there is none."""
        state, _ = await self._hosts.fold(host_id)
        return None if isinstance(state, Foreign) or state.phase is HostPhase.ABSENT else state

    async def decide_session(
        self,
        cause: Cause,
        session_id: SessionId,
        others: Sequence[SessionId],
        decide: Callable[[Session, Mapping[SessionId, Session | None]], Sequence[tuple[str, msgspec.Struct]]],
        given: Callable[[], Awaitable[Mapping[str, int]]],
    ) -> Receipt | None:
        """Decide on a session and on others that are to be made; see `Decisions.execute_across`.

        `decide` sees None for another whose id belongs to something that is no session.
        """

        def on_all(states: Mapping[str, Session | Foreign]) -> Sequence[tuple[str, msgspec.Struct]]:
            found = {other: states[other] for other in others}
            sessions = {other: None if isinstance(state, Foreign) else state for other, state in found.items()}
            return decide(_own(states[session_id], session_id), sessions)

        return await self._sessions.execute_across(cause, [session_id, *others], on_all, given=given)

    async def decide_host(
        self, cause: Cause, host_id: HostId, decide: Callable[[Host], Sequence[msgspec.Struct]]
    ) -> Receipt | None:
        """Decide on a host; see `Decisions.execute`."""
        return await self._hosts.execute(cause, host_id, lambda state: decide(_own(state, host_id)))


def _own(state: State | Foreign, stream: str) -> State:
    if isinstance(state, Foreign):
        raise Rejected("id-taken", f"{stream} is the id of something else", "choose another id")
    return state

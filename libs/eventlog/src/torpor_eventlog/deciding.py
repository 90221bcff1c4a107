"""Load, fold, decide, append: the one way a service turns a command into events; a lost race is decided again."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from torpor_contracts.errors import Transient, VersionConflict
from torpor_contracts.ids import CommandId, TenantId
from torpor_contracts.replies import Receipt
from torpor_eventlog.codec import decode_event
from torpor_eventlog.port import Commit, EventLog, NewEvent

State = TypeVar("State")

RACES_MAX: Final = 8
"""How often a lost race is decided again before the command is put off."""


class Cause(Protocol):
    """What a commit records of the command behind it (`torpor_messaging.service.Incoming` is one)."""

    @property
    def tenant_id(self) -> TenantId:
        """Whose events they are."""
        ...

    @property
    def command_id(self) -> CommandId:
        """What the receipt is known by."""
        ...

    @property
    def causation_id(self) -> str:
        """What led to it."""
        ...

    @property
    def correlation_id(self) -> str:
        """The goal it serves."""
        ...

    @property
    def request_digest(self) -> bytes:
        """SHA-256 of the request."""
        ...


@dataclass(frozen=True)
class _Folded(Generic[State]):
    state: State
    version: int


class Decisions(Generic[State]):
    """Decides commands on the streams of one kind of aggregate.

    Folded states are kept for `keep_max` streams; a stream known already is only read from where it was left, so
    the fold is never older than the log and a lost race shows at the append.
    """

    def __init__(
        self,
        log: EventLog,
        initial: Callable[[], State],
        evolve: Callable[[State, Any], State],
        now: Callable[[], datetime],
        keep_max: int = 2048,
    ) -> None:
        self._log = log
        self._initial = initial
        self._evolve = evolve
        self._now = now
        self._keep_max = keep_max
        self._kept: OrderedDict[str, _Folded[State]] = OrderedDict()

    async def fold(self, stream: str) -> tuple[State, int]:
        """The stream's present state and version."""
        kept = self._kept.get(stream)
        state, version = (kept.state, kept.version) if kept else (self._initial(), 0)
        for recorded in await self._log.load(stream, after_version=version):
            state, version = self._evolve(state, decode_event(recorded)), recorded.version
        self._keep(stream, state, version)
        return state, version

    async def execute(
        self,
        cause: Cause,
        stream: str,
        decide: Callable[[State], Sequence[msgspec.Struct]],
        *,
        given: Callable[[], Awaitable[Mapping[str, int]]] | None = None,
    ) -> Receipt | None:
        """Decide and append; the receipt of the events, or None when `decide` found nothing to record.

        A command already in the log answers its first receipt and is not decided again. What `decide` raises passes.
        `given` looks at other streams before each decision and answers their versions: the events are appended only
        if those streams have not changed since, so a decision may rest on them.
        """

        def on_one(states: Mapping[str, State]) -> list[tuple[str, msgspec.Struct]]:
            return [(stream, event) for event in decide(states[stream])]

        return await self.execute_across(cause, [stream], on_one, given=given)

    async def execute_across(
        self,
        cause: Cause,
        streams: Sequence[str],
        decide: Callable[[Mapping[str, State]], Sequence[tuple[str, msgspec.Struct]]],
        *,
        given: Callable[[], Awaitable[Mapping[str, int]]] | None = None,
    ) -> Receipt | None:
        """Decide on several streams of this kind together; `decide` answers events with the streams they go to.

        The first event's stream is the command's own. A stream that was only read may change meanwhile, unless it is
        among those that `given` answers (see `execute`).
        """
        known = await self._known(cause)
        if known is not None:
            return known
        for _ in range(RACES_MAX):
            unchanged = dict(await given()) if given is not None else {}
            folded = {stream: await self.fold(stream) for stream in streams}
            events = decide({stream: state for stream, (state, _) in folded.items()})
            if not events:
                return None
            expected = unchanged | {stream: folded[stream][1] for stream, _ in events}
            try:
                # Not folded into what is kept: the receipt may be that of another replica, whose events the log has.
                return await self._log.append(self._commit(cause, expected, events))
            except VersionConflict:
                continue
        named = ", ".join(streams)
        raise Transient(f"stream {named} is being written by others; {RACES_MAX} races lost", retry_after_s=0.2)

    async def _known(self, cause: Cause) -> Receipt | None:
        receipt = await self._log.receipt(cause.command_id)
        if receipt is None:
            return None
        return await self._log.append(self._commit(cause, {}, []))

    def _commit(
        self, cause: Cause, expected: Mapping[str, int], events: Sequence[tuple[str, msgspec.Struct]]
    ) -> Commit:
        now = self._now()
        return Commit(
            command_id=cause.command_id,
            tenant_id=cause.tenant_id,
            causation_id=cause.causation_id,
            correlation_id=cause.correlation_id,
            request_digest=cause.request_digest,
            occurred_at_us=int(now.timestamp() * 1_000_000),
            expected=expected,
            events=[
                NewEvent(stream=stream, tag=str(event.__struct_config__.tag), data=msgspec.json.encode(event))
                for stream, event in events
            ],
        )

    def _keep(self, stream: str, state: State, version: int) -> None:
        self._kept[stream] = _Folded(state, version)
        self._kept.move_to_end(stream)
        while len(self._kept) > self._keep_max:
            self._kept.popitem(last=False)

"""Load, fold, decide, append: the one way a service turns a command into events, with bounded retries of a lost race."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
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
    def tenant_id(self) -> TenantId: ...
    @property
    def command_id(self) -> CommandId: ...
    @property
    def causation_id(self) -> str: ...
    @property
    def correlation_id(self) -> str: ...
    @property
    def request_digest(self) -> bytes: ...


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
        self, cause: Cause, stream: str, decide: Callable[[State], Sequence[msgspec.Struct]]
    ) -> Receipt | None:
        """Decide and append; the receipt of the events, or None when `decide` found nothing to record.

        A command already in the log answers its first receipt and is not decided again. `Rejected` from `decide` passes.
        """
        known = await self._known(cause)
        if known is not None:
            return known
        for _ in range(RACES_MAX):
            state, version = await self.fold(stream)
            events = decide(state)
            if not events:
                return None
            try:
                receipt = await self._log.append(self._commit(cause, {stream: version}, [(stream, e) for e in events]))
            except VersionConflict:
                continue
            if receipt.version == version + len(events):
                for event in events:
                    state = self._evolve(state, event)
                self._keep(stream, state, receipt.version)
            return receipt
        raise Transient(f"stream {stream} is being written by others; {RACES_MAX} races lost", retry_after_s=0.2)

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

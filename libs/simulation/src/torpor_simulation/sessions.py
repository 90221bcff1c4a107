"""The sessions of a world, folded from its log as it grows, by production's own fold; an illegal event is a finding."""

from collections.abc import Callable
from typing import Any, Final, get_args

from torpor_contracts.errors import InvariantViolation
from torpor_contracts.session import (
    ResumeDeferred,
    ResumeRequested,
    SessionEvent,
    SessionRecovered,
    SessionRequested,
    SessionSuspended,
    SuspendFailed,
    SuspendRequested,
    SuspendWithdrawn,
    TerminateRequested,
)
from torpor_contracts.session_branches import RollbackRequested
from torpor_scheduler.domain.folding import evolve
from torpor_scheduler.domain.session import INITIAL, Phase, Session
from torpor_simulation.history import Violation

EVENTS: Final = get_args(SessionEvent)
STABLE: Final = frozenset({Phase.RUNNING, Phase.SUSPENDED, Phase.LOST, Phase.TERMINATED, Phase.FAILED})
"""Phases in which a session may stay for as long as nobody wants anything of it."""


class Sessions:
    """Folded sessions by id, and what was asked of each last."""

    def __init__(self, violated: Callable[[Violation], None]) -> None:
        self._violated = violated
        self.folded: dict[str, Session] = {}
        self.wanted: dict[str, Phase] = {}
        self._suspends: dict[str, str] = {}

    def committed(self, stream: str, event: Any) -> None:
        """Take in one event of the log."""
        if not isinstance(event, EVENTS):
            return
        try:
            self.folded[stream] = evolve(self.folded.get(stream, INITIAL), event)
        except InvariantViolation as error:
            self._violated(Violation("legal", f"{stream}: {error}"))
        match event:
            case SessionRequested() | ResumeRequested() | ResumeDeferred() | SuspendFailed() | SessionRecovered():
                self.wanted[stream] = Phase.RUNNING
            case SuspendWithdrawn() | RollbackRequested():
                self.wanted[stream] = Phase.RUNNING
            case SuspendRequested():
                self.wanted[stream] = Phase.SUSPENDED
                self._suspends[stream] = event.checkpoint_id
            case SessionSuspended() if self._suspends.get(stream) == event.checkpoint_id:
                # What was given up meanwhile and happened all the same: asked for it was.
                self.wanted[stream] = Phase.SUSPENDED
            case TerminateRequested():
                self.wanted[stream] = Phase.TERMINATED
            case _:
                pass

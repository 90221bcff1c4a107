"""Decides what a command makes happen to a session: pure, one module for each kind of command."""

from torpor_scheduler.domain.session_decisions.context import (
    Addressee,
    CheckpointFacts,
    CheckpointNeeded,
    Context,
    HistoryNeeded,
    Limits,
    LookedUp,
    Rules,
    Seed,
    SeedsNeeded,
)
from torpor_scheduler.domain.session_decisions.decide import Decided, decide

__all__ = [
    "Addressee",
    "CheckpointFacts",
    "CheckpointNeeded",
    "Context",
    "Decided",
    "HistoryNeeded",
    "Limits",
    "LookedUp",
    "Rules",
    "Seed",
    "SeedsNeeded",
    "decide",
]

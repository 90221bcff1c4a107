"""Decides what a command makes happen to a session: pure, one module for each kind of command."""

from torpor_scheduler.domain.session_decisions.context import Addressee, Context, HistoryNeeded, Limits, Rules
from torpor_scheduler.domain.session_decisions.decide import decide

__all__ = ["Addressee", "Context", "HistoryNeeded", "Limits", "Rules", "decide"]

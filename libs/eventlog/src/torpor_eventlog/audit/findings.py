"""What audits report: findings with a place and a position, and progress while they run."""

from collections.abc import Callable
from typing import Final, Literal

import msgspec

OnProgress = Callable[[str, int, int], None]
"""Told now and then: what is being done, how many rows are done, of how many."""

FINDINGS_MAX: Final = 100
"""How many findings of one audit are kept; the others are counted."""

READ_MAX: Final = 2000
"""Rows read at a time."""

Kind = Literal["missing", "changed", "truncated", "extra", "unreadable"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as the log's digests say, first at `position`.

    `place`: in the log itself, in the stream EVENTS, in a signed head, or in an exported bundle.
    """

    place: Literal["log", "stream", "head", "bundle"]
    position: int
    kind: Kind
    detail: str


class Findings:
    """Collects findings, the first ones in full."""

    def __init__(self) -> None:
        self.first: list[Finding] = []
        self.total = 0

    def add(self, place: Literal["log", "stream", "head", "bundle"], position: int, kind: Kind, detail: str) -> None:
        """Note a finding."""
        self.total += 1
        if len(self.first) < FINDINGS_MAX:
            self.first.append(Finding(place=place, position=position, kind=kind, detail=detail))


def silent(what: str, done: int, of: int) -> None:
    """Progress that nobody looks at."""

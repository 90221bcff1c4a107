"""How the story is told: a line for each thing that happened and the time it took; and all of it as data."""

import sys
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TextIO

from torpor_contracts.errors import TorporError

WIDTH: Final = 92


class NotSo(TorporError):  # noqa: N818  (says what is so, as the errors of the contracts do)
    """Something that the story says, and that is not so on this machine."""

    code: ClassVar[str] = "not-so"

    def __init__(self, claim: str, found: str) -> None:
        self.message = f"this is not so: {claim}; found: {found}"
        self.advice = "please report it, with the data directory's logs/"
        super().__init__(self.message)


@dataclass
class Telling:
    """What was said, and what it rests on. `to`: where people read it; programs get `record` in the end."""

    to: TextIO = sys.stdout
    claims: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)

    def chapter(self, title: str) -> None:
        """What comes next is about this."""
        self._write(f"\n{title}\n")

    def say(self, text: str, took_s: float | None = None) -> None:
        """One thing that happened, and how long it took, seconds."""
        took = "" if took_s is None else f"{took_s:.2f} s"
        self._write(f"  {text}{took.rjust(max(2, WIDTH - 2 - len(text)))}\n" if took else f"  {text}\n")

    def figure(self, name: str, seconds: float) -> float:
        """Keep a figure under a name."""
        self.figures[name] = round(seconds, 4)
        return seconds

    def claim(self, what: str, *, holds: bool, found: object) -> None:
        """State something that was looked at; raises `NotSo` when it does not hold."""
        self.claims.append({"claim": what, "holds": holds, "found": str(found)})
        if not holds:
            raise NotSo(what, str(found))

    def _write(self, text: str) -> None:
        self.to.write(text)
        self.to.flush()

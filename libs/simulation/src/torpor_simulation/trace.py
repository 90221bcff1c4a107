"""What happened in a world, in order: its digest proves that a seed repeats, its text lets people read it."""

import asyncio
import hashlib
from collections.abc import Callable


class Trace:
    """Collects lines of (virtual time, kind, details); `show` gets each as it comes."""

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._show = show
        self._lines: list[tuple[float, str, tuple[object, ...]]] = []

    def add(self, kind: str, *details: object) -> None:
        """Note something; details must print the same in every run."""
        line = (self._loop.time(), kind, details)
        self._lines.append(line)
        if self._show is not None:
            self._show(_text(line))

    def digest(self) -> str:
        """SHA-256 over every line so far."""
        digest = hashlib.sha256()
        for line in self._lines:
            digest.update(_text(line).encode())
        return digest.hexdigest()

    def last(self, count: int) -> list[str]:
        """The last lines, as text."""
        return [_text(line) for line in self._lines[-count:]]


def _text(line: tuple[float, str, tuple[object, ...]]) -> str:
    at_s, kind, details = line
    return f"{at_s:12.6f}  {kind:<12} " + " ".join(str(detail) for detail in details)

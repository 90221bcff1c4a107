"""Spaces out repeats: at an age, at twice the age, at four times, and so on; remembered in memory, within a bound."""

from collections import OrderedDict
from math import log2
from typing import Final

KEPT_MAX: Final = 20_000
LONGEST_S: Final = 300.0


class Spacing:
    """Tells when something that has been waiting for some time is due to be tried again.

    Tries are made `first_s`, `2 * first_s`, `4 * first_s`… after it began to wait, then every `longest_s`.
    """

    def __init__(self, first_s: float, longest_s: float = LONGEST_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._tried: OrderedDict[str, int] = OrderedDict()

    def due(self, key: str, age_s: float) -> int | None:
        """The number of the try that is due now (0 is the first), or None when it was made already or it is too soon.

        The number follows from the age alone, so several schedulers, or one that was restarted, name the same try.
        """
        number = self.number(age_s)
        if number is None or self._tried.get(key, -1) >= number:
            return None
        self._tried[key] = number
        self._tried.move_to_end(key)
        if len(self._tried) > KEPT_MAX:
            self._tried.popitem(last=False)
        return number

    def number(self, age_s: float) -> int | None:
        """How many tries an age has seen before the last one; None before the first."""
        if age_s < self._first_s:
            return None
        doubled = int(log2(max(self._longest_s / self._first_s, 1.0)))
        even_from_s = self._first_s * 2.0**doubled
        if age_s < even_from_s:
            return int(log2(age_s / self._first_s))
        return doubled + int((age_s - even_from_s) / self._longest_s)

"""Fault points: every place where a process meets the outside, counted in a clean run and struck in later ones."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from torpor_contracts.errors import Transient
from torpor_simulation.process import Process, ProcessKilled
from torpor_simulation.trace import Trace


@dataclass
class FaultRates:
    """How often a passed point strikes. Probabilities are per point; `slow_s` bounds one slowness."""

    crash: float = 0.0
    transient: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.0

    def calm(self) -> None:
        """Stop striking."""
        self.crash = self.transient = self.slow = 0.0


class Faults:
    """Decides, from a seed or by number, what happens at each fault point.

    Points are numbered from 1 in the order in which they are passed; `crash_at` kills the process that passes that one.
    """

    def __init__(self, seed: int, rates: FaultRates, trace: Trace, crash_at: int | None = None) -> None:
        self._random = random.Random(f"{seed}-faults")  # noqa: S311  (a seeded world)
        self._trace = trace
        self.rates = rates
        self.crash_at = crash_at
        self.passed = 0
        self.on_pass: Callable[[Process, str], None] | None = None
        """Told of every point that is passed, for who counts them."""

    @classmethod
    def none(cls, trace: Trace) -> "Faults":
        """For whom no fault is meant."""
        return cls(0, FaultRates(), trace)

    def strike(self, process: Process, point: str) -> None:
        """Pass a point at which a process may die; raises `ProcessKilled` when it does, or is dead already."""
        process.check()
        self.passed += 1
        if self.on_pass is not None:
            self.on_pass(process, point)
        if self.passed == self.crash_at or self._chance(self.rates.crash):
            self._trace.add("crash", process.name, point)
            process.kill()
            raise ProcessKilled(process.name)

    async def enter(self, process: Process, point: str) -> None:
        """Pass a point before an effect: the process may die, the effect may be refused for now, or be slow."""
        self.strike(process, point)
        if self._chance(self.rates.transient):
            self._trace.add("transient", process.name, point)
            raise Transient(f"{point} is not to be had just now", retry_after_s=0.1 + self._random.random())
        if self._chance(self.rates.slow):
            await asyncio.sleep(self._random.random() * self.rates.slow_s)
            process.check()

    def calm(self) -> None:
        """Stop every fault."""
        self.rates.calm()
        self.crash_at = None

    def _chance(self, probability: float) -> bool:
        return probability > 0.0 and self._random.random() < probability

"""The simulated network: how long messages take, which get lost, and who can reach the servers at all."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

BUS: Final = "the bus"
LOG: Final = "the log"
UNNOTICED_S: Final = 10.0
"""How long the server goes on sending to a machine that can be reached no more."""


@dataclass
class NetworkFaults:
    """How bad the network is. Probabilities are per message; `calm` makes a good one of it.

    `delay_s` is the mean of an ordinary delay; `slow` of the messages take up to `slow_s` more.
    """

    delay_s: float = 0.002
    slow: float = 0.0
    slow_s: float = 0.0
    core_lost: float = 0.0
    ack_lost: float = 0.0
    stored_but_unanswered: float = 0.0
    duplicated: float = 0.0
    schedule_lost: float = 0.0
    schedule_late_s: float = 0.25

    def calm(self) -> None:
        """Stop every fault; ordinary delays stay."""
        self.slow = self.core_lost = self.ack_lost = self.stored_but_unanswered = 0.0
        self.duplicated = self.schedule_lost = 0.0


class Network:
    """Draws delays and losses from a seed, and knows who is cut off."""

    def __init__(self, seed: int, faults: NetworkFaults) -> None:
        self._random = random.Random(f"{seed}-network")  # noqa: S311  (a seeded world)
        self._loop = asyncio.get_running_loop()
        self.faults = faults
        self._down: dict[str, float] = {}
        self.on_healed: list[Callable[[], None]] = []
        """Called whenever somebody can be reached again."""

    def take_down(self, what: str) -> None:
        """Make a machine, or one of `BUS` and `LOG`, unreachable; what runs on a machine runs on."""
        self._down[what] = self._loop.time()

    def bring_back(self, what: str) -> None:
        """End an outage or a partition."""
        self._down.pop(what, None)
        for tell in self.on_healed:
            tell()

    def calm(self) -> None:
        """Stop every fault and end every outage and partition."""
        self.faults.calm()
        for what in list(self._down):
            self.bring_back(what)

    def reaches_bus(self, machine: str) -> bool:
        """Whether this machine and the bus can talk now."""
        return not self._down or (BUS not in self._down and machine not in self._down)

    def seems_there(self, machine: str) -> bool:
        """Whether the bus would send this machine something: it learns of a lost connection only after a while."""
        if not self._down:
            return True
        since_s = self._down.get(machine)
        return BUS not in self._down and (since_s is None or self._loop.time() - since_s < UNNOTICED_S)

    def reaches_log(self, machine: str) -> bool:
        """Whether this machine and the log's database can talk now."""
        return not self._down or (LOG not in self._down and machine not in self._down)

    def delay_s(self) -> float:
        """How long the next message takes."""
        faults = self.faults
        delay_s = faults.delay_s * (0.5 + self._random.random())
        if faults.slow and self._random.random() < faults.slow:
            delay_s += faults.slow_s * self._random.random()
        return delay_s

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens now."""
        return probability > 0.0 and self._random.random() < probability

    def uniform_s(self, most_s: float) -> float:
        """A time in [0, most_s)."""
        return self._random.random() * most_s

    def pick(self, below: int) -> int:
        """One of 0 … below-1."""
        return int(self._random.random() * below)

"""What one world is made of, and what befalls it: everything is drawn from its seed before it begins."""

import random
from dataclasses import dataclass, field
from typing import Literal

from torpor_simulation.faults import FaultRates
from torpor_simulation.hypervisor import DriverFaults
from torpor_simulation.network import NetworkFaults

DisasterKind = Literal[
    "crash", "bus-outage", "log-outage", "partition", "host-off", "host-gone", "machine-dies", "machine-ruined",
    "stranger", "schedules-lost", "drain", "tidying", "service-off", "stream-truncated", "stream-changed",
]  # fmt: skip


@dataclass(frozen=True)
class Disaster:
    """Something that befalls the world at a moment and, where that makes sense, for a while. Times in seconds."""

    kind: DisasterKind
    at_s: float
    lasts_s: float
    which: float
    """Chooses among what can be hit, in [0, 1)."""


@dataclass
class Plan:
    """A world before it begins. `trouble_s`: for how long faults may strike; `skew_s`: how far clocks may be off."""

    seed: int
    hosts: int = 1
    schedulers: int = 1
    sessions: int = 1
    acts: int = 3
    trouble_s: float = 60.0
    skew_s: float = 0.0
    network: NetworkFaults = field(default_factory=NetworkFaults)
    rates: FaultRates = field(default_factory=FaultRates)
    driver: DriverFaults = field(default_factory=DriverFaults)
    disasters: tuple[Disaster, ...] = ()
    crash_at: int | None = None


KINDS: tuple[tuple[DisasterKind, int], ...] = (
    ("crash", 30),
    ("bus-outage", 8),
    ("log-outage", 8),
    ("partition", 14),
    ("host-off", 10),
    ("host-gone", 6),
    ("machine-dies", 14),
    ("machine-ruined", 4),
    ("stranger", 4),
    ("schedules-lost", 6),
    ("drain", 8),
    ("tidying", 8),
    ("service-off", 12),
    ("stream-truncated", 6),
    ("stream-changed", 6),
)


def draw(seed: int) -> Plan:
    """The plan of a seed: sizes first, then how bad the network, the programs and the drivers are, then disasters."""
    chance = random.Random(f"{seed}-plan")  # noqa: S311  (a seeded world)
    trouble_s = chance.uniform(20, 50)
    plan = Plan(
        seed=seed,
        hosts=chance.choice((1, 2, 2)),
        schedulers=chance.choice((1, 1, 2)),
        sessions=chance.choice((1, 2, 2, 3)),
        acts=chance.randint(2, 6),
        trouble_s=trouble_s,
        skew_s=chance.choice((0.0, 0.0, 0.2, 2.0)),
    )
    if chance.random() < 0.7:  # noqa: PLR2004  (so many worlds have a bad network)
        plan.network = NetworkFaults(
            slow=chance.choice((0.0, 0.02, 0.1)),
            slow_s=chance.choice((0.1, 1.0, 6.0)),
            core_lost=chance.choice((0.0, 0.02, 0.2)),
            ack_lost=chance.choice((0.0, 0.02, 0.1)),
            stored_but_unanswered=chance.choice((0.0, 0.01, 0.05)),
            duplicated=chance.choice((0.0, 0.05, 0.2)),
            schedule_lost=chance.choice((0.0, 0.2, 1.0)),
        )
    if chance.random() < 0.6:  # noqa: PLR2004
        plan.rates = FaultRates(
            crash=chance.choice((0.0, 0.002, 0.01)),
            transient=chance.choice((0.0, 0.01, 0.05)),
            slow=chance.choice((0.0, 0.02)),
            slow_s=chance.choice((0.5, 4.0)),
        )
    if chance.random() < 0.4:  # noqa: PLR2004
        plan.driver = DriverFaults(
            start_failed=chance.choice((0.0, 0.1, 0.4)),
            checkpoint_failed=chance.choice((0.0, 0.1, 0.4)),
            destroy_failed=chance.choice((0.0, 0.1, 0.3)),
            no_space=chance.choice((0.0, 0.05, 0.3)),
        )
    kinds, weights = [kind for kind, _ in KINDS], [weight for _, weight in KINDS]
    plan.disasters = tuple(
        Disaster(
            kind=chance.choices(kinds, weights)[0],
            at_s=chance.uniform(0.5, trouble_s),
            lasts_s=chance.choice((0.5, 3.0, 12.0, 25.0)),
            which=chance.random(),
        )
        for _ in range(chance.choice((0, 1, 2, 3, 4, 6)))
    )
    return plan

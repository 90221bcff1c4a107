"""Mutants: defects put into production's code on purpose; a simulator that does not find them proves nothing.

Each changes one function of a service or library for as long as a world runs, and names the laws that must catch it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from torpor_simulation import mutations
from torpor_simulation.mutations import Change
from torpor_simulation.plan import Disaster, Plan, draw
from torpor_simulation.running import Outcome, run_world

SEEDS_MAX: Final = 150
"""How many worlds a mutant may survive."""


@dataclass(frozen=True)
class Mutant:
    """What is broken, how, in which worlds it is looked for, and which checkers may find it."""

    name: str
    change: Callable[[], Change]
    caught_by: frozenset[str]
    plan: Callable[[int], Plan] = draw


@contextmanager
def at_large(mutant: Mutant) -> Iterator[None]:
    """Let the mutant live inside the block: every change is taken back after it."""
    with ExitStack() as stack:
        for owner, name, value in mutant.change():
            stack.callback(setattr, owner, name, owner.__dict__[name])
            setattr(owner, name, value)
        yield


def hunt(mutant: Mutant, seeds_max: int = SEEDS_MAX) -> Outcome | None:
    """The first world in which the mutant is caught, or None when it survived all of them."""
    with at_large(mutant):
        for seed in range(1, seeds_max + 1):
            outcome = run_world(mutant.plan(seed))
            if outcome.violations:
                return outcome
    return None


def without_schedules(seed: int) -> Plan:
    """A world in which no timer is ever kept by the bus."""
    plan = draw(seed)
    plan.network.schedule_lost = 1.0
    return plan


def without_store(seed: int) -> Plan:
    """A world in which the snapshot store is away for most of the time, and nothing else goes wrong."""
    plan = Plan(seed=seed, hosts=1, schedulers=1, sessions=2, acts=6, trouble_s=50.0)
    plan.disasters = (Disaster(kind="service-off", at_s=0.5, lasts_s=45.0, which=0.5),)
    return plan


def restless(seed: int) -> Plan:
    """A world in which machines come and go, and word of them is late."""
    plan = draw(seed)
    plan.hosts = 2
    plan.network.slow, plan.network.slow_s = 0.3, 8.0
    plan.driver.start_failed = 0.4
    return plan


def crowded(seed: int) -> Plan:
    """A world with two schedulers, slow and forgetful enough to race for the same sessions."""
    plan = draw(seed)
    plan.schedulers, plan.sessions, plan.acts = 2, 2, 8
    plan.network.duplicated = 0.4
    plan.network.slow, plan.network.slow_s = 0.2, 0.05
    return plan


def _mutant(change: Callable[[], Change], *caught_by: str, plan: Callable[[int], Plan] = draw) -> Mutant:
    return Mutant(change.__name__.replace("_", "-"), change, frozenset(caught_by), plan)


MUTANTS: Final = {
    mutant.name: mutant
    for mutant in (
        _mutant(mutations.templates_left_at_home, "loadable-elsewhere"),
        _mutant(mutations.versions_unchecked, "positions", "legal", "broken", plan=crowded),
        _mutant(mutations.acknowledged_before_append, "acked-unrecorded"),
        _mutant(mutations.answered_before_append, "receipt-true", "acked-unrecorded"),
        _mutant(mutations.started_twice, "notes", "unasked", "lost-truly", "exec-once", "one-live-vm", plan=crowded),
        _mutant(mutations.acquired_before_claim, "claimed-first"),
        _mutant(
            mutations.incarnation_ignored,
            "lost-truly",
            "as-asked",
            "legal",
            "broken",
            "woken",
            "settles",
            "notes",
            plan=restless,
        ),
        _mutant(mutations.incarnation_reused, "incarnations", "one-live-vm", "one-running", "broken"),
        _mutant(mutations.cursor_forgotten, "views", "settles", "billing", "dead-letters", "broken"),
        _mutant(mutations.position_before_rows, "views", "settles", "billing", "dead-letters", "broken"),
        _mutant(mutations.exec_unrecorded, "exec-once"),
        _mutant(mutations.destroyed_before_registered, "unasked", "restorable", plan=without_store),
        _mutant(mutations.released_unseen, "released-after", "observed"),
        _mutant(mutations.hosts_never_lost, "settles"),
        _mutant(mutations.timers_without_backstop, "settles", plan=without_schedules),
        _mutant(mutations.billed_by_request, "billing"),
        _mutant(mutations.reaped_without_recheck, "nobodys", "machines", "settles", "lost-truly", "unasked"),
        _mutant(mutations.receipts_forgotten, "answers", "commands-once"),
        _mutant(mutations.refusal_told_too_soon, "answers", "acked-unrecorded"),
        _mutant(mutations.referenced_freed, "restorable", "woken"),
    )
}
"""All mutants by name."""

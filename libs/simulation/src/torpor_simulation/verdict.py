"""What is wrong with a world at rest: every checker, in one place."""

from typing import TYPE_CHECKING

from torpor_billing.projections import METERS
from torpor_simulation import checks_answers, checks_billing, checks_branches, checks_log, checks_rest
from torpor_simulation.checks_content import notes_where_they_belong
from torpor_simulation.checks_views import rows_of, views_refold
from torpor_simulation.history import History, Violation
from torpor_simulation.rest import running_machines
from torpor_simulation.workload import all_noted

if TYPE_CHECKING:
    from torpor_simulation.world import World


async def judge(world: "World") -> list[Violation]:
    """Everything that does not hold in a world at rest."""
    history = History(world.log.rows)
    found: list[Violation] = [
        *checks_log.positions(history),
        *checks_log.chain(history, await world.log.head()),
        *checks_log.commands_once(history),
        *checks_log.incarnations(history),
        *checks_log.one_running(history),
        *checks_log.programs(history),
        *checks_log.claims(history),
        *checks_branches.forks_whole(history),
        *checks_branches.begins_where_forked(history),
        *checks_branches.one_at_a_time(history),
        *checks_branches.checkpoints_true(history),
        *checks_branches.rollbacks_end(history),
        *checks_rest.as_asked(world),
        *checks_rest.machines_as_said(world),
        *checks_rest.lost_hosts(world, history),
        *checks_rest.restorable(world, history),
        *checks_rest.notes_kept(world, history, world.lives),
        *notes_where_they_belong(world, history, all_noted(world.lives)),
        *checks_answers.answers(world.ledger, history, world.broker.copies),
        *checks_answers.dead_letters(world.broker),
        *checks_rest.woken(world, history),
    ]
    for kind, store, projections in world.fleet.projections():
        if kind in world.gone:
            continue
        found.extend(await views_refold(world.log, world.log.rows, kind, store, projections))
    rows = await rows_of(world.fleet.views["billing"], METERS)
    found.extend(checks_billing.billed([row.meter for row in rows.values()], history, running_machines(world)))
    return found

"""What every event log proves of its rows."""

import pytest

from tests.support.event_logs import Open, check_sound, grow, tree_over
from torpor_contracts.errors import Rejected
from torpor_eventlog.merkle import consistency_holds, inclusion_holds
from torpor_eventlog.port import EventLog

pytestmark = pytest.mark.anyio


async def test_head_and_proofs_hold_over_rows_of_several_replicas(open_log: Open) -> None:
    replicas = [await open_log() for _ in range(2)]
    for number in range(6):
        await grow(replicas[number % 2], 97, f"stream-{number}")
    log = replicas[0]
    rows = await check_sound(log)
    assert len(rows) == 582  # more than two tiles, and no whole number of them
    for size in (1, 2, 3, 255, 256, 257, 511, 512, 513, 582):
        root = tree_over(rows[:size]).root()
        for position in {1, (size + 1) // 2, max(1, size - 1), size}:
            proof = await log.inclusion_proof(position, size)
            assert inclusion_holds(rows[position - 1].digest, position - 1, size, proof, root)
        proof = await log.consistency_proof(size, 582)
        assert consistency_holds(size, 582, proof, root, (await log.head()).root)
    assert await log.consistency_proof(0, 582) == []


@pytest.mark.parametrize(("position", "size"), [(0, 3), (-1, 3), (4, 3), (1, 4), (1, 0)])
async def test_rows_that_are_not_there_have_no_proof(log: EventLog, position: int, size: int) -> None:
    await grow(log, 3)
    with pytest.raises(Rejected) as refused:
        await log.inclusion_proof(position, size)
    assert refused.value.code == "illegal-proof"


@pytest.mark.parametrize(("old", "new"), [(-1, 3), (3, 2), (3, 4), (4, 4)])
async def test_trees_that_never_were_have_no_proof(log: EventLog, old: int, new: int) -> None:
    await grow(log, 3)
    with pytest.raises(Rejected) as refused:
        await log.consistency_proof(old, new)
    assert refused.value.code == "illegal-proof"

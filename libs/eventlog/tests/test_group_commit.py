"""Group commit: who shares a batch with whom, what bounds it, and what those who wait hear when it fails."""

import asyncio
from collections.abc import Sequence
from typing import Final

import pytest

from tests.support.event_logs import commit, new_id
from torpor_contracts.errors import InvariantViolation, Transient
from torpor_contracts.replies import Receipt
from torpor_eventlog import group_commit
from torpor_eventlog.group_commit import BATCH_MAX, GroupCommit
from torpor_eventlog.optimism import NONE_KNOWN
from torpor_eventlog.planning import START, Plan, Prepared, plan, prepare

pytestmark = pytest.mark.anyio

BOUND_S: Final = 20


class GatedDatabase:
    """Takes batches, and answers each when its gate is opened."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.error: Exception | None = None
        self._end = START
        self._gates: asyncio.Queue[None] = asyncio.Queue()

    def open_gate(self, times: int = 1) -> None:
        for _ in range(times):
            self._gates.put_nowait(None)

    async def write(self, batch: Sequence[Prepared]) -> Plan:
        self.sizes.append(len(batch))
        await self._gates.get()
        if self.error is not None:
            raise self.error
        planned = plan(batch, self._end, {}, NONE_KNOWN)
        self._end = planned.end
        return planned


@pytest.fixture
def database() -> GatedDatabase:
    return GatedDatabase()


async def settle() -> None:
    """Let everything run that can run without the database."""
    for _ in range(10):
        await asyncio.sleep(0)


def new(data: bytes = b"{}") -> Prepared:
    return prepare(commit(new_id("stream"), data=data))


async def test_appends_that_come_while_a_batch_is_written_share_the_next(database: GatedDatabase) -> None:
    group = GroupCommit(database.write, None)
    first = group.append(new())
    await settle()
    others = [group.append(new()) for _ in range(7)]
    await settle()
    assert database.sizes == [1]
    database.open_gate(2)
    receipts = await asyncio.gather(first, *others)
    assert database.sizes == [1, 7]
    assert [receipt.position for receipt in receipts] == list(range(1, 9))


async def test_those_just_answered_join_those_who_wait(database: GatedDatabase) -> None:
    """Writers in a loop end up in one batch, not in two that take turns."""
    group = GroupCommit(database.write, None)
    database.open_gate(10)

    async def write_three() -> None:
        for _ in range(3):
            await group.append(new())

    await asyncio.gather(*(write_three() for _ in range(20)))
    assert database.sizes == [20, 20, 20]


async def test_a_batch_is_bounded_by_commits(database: GatedDatabase) -> None:
    group = GroupCommit(database.write, None)
    appends = [group.append(new()) for _ in range(BATCH_MAX + 3)]
    database.open_gate(2)
    await asyncio.gather(*appends)
    assert database.sizes == [BATCH_MAX, 3]


async def test_a_batch_is_bounded_by_bytes(database: GatedDatabase) -> None:
    group = GroupCommit(database.write, None)
    appends = [group.append(new(b"x" * 900_000)) for _ in range(12)]
    database.open_gate(2)
    await asyncio.gather(*appends)
    assert database.sizes == [10, 2]  # closed by the commit that reaches 8 MiB


async def test_only_so_many_may_wait(database: GatedDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "WAITING_MAX", 5)
    group = GroupCommit(database.write, None)
    waiting = [group.append(new()) for _ in range(5)]
    with pytest.raises(Transient, match="cannot keep up"):
        group.append(new())
    database.open_gate()
    assert len(await asyncio.gather(*waiting)) == 5


async def test_each_hears_of_a_failure_and_the_next_batch_is_not_touched(database: GatedDatabase) -> None:
    group = GroupCommit(database.write, None)
    database.error = Transient("the disk is full", retry_after_s=7)
    database.open_gate()
    answers = await asyncio.gather(*(group.append(new()) for _ in range(3)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["the disk is full"] * 3
    assert all(isinstance(answer, Transient) and answer.retry_after_s == 7 for answer in answers)
    assert len({id(answer) for answer in answers}) == 3
    database.error = None
    database.open_gate()
    assert (await group.append(new())).position == 1


async def test_a_mistake_of_ours_reaches_all_who_wait(database: GatedDatabase) -> None:
    group = GroupCommit(database.write, None)
    database.error = KeyError("oops")
    database.open_gate()
    answers = await asyncio.gather(*(group.append(new()) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(answer, InvariantViolation) for answer in answers)
    assert all(isinstance(answer.__cause__, KeyError) for answer in answers if isinstance(answer, BaseException))


async def test_an_append_given_up_before_its_batch_began_never_happens(database: GatedDatabase) -> None:
    group = GroupCommit(database.write, None)
    first, second, third = (group.append(new()) for _ in range(3))
    second.cancel()
    database.open_gate()
    await asyncio.gather(first, third)
    assert database.sizes == [2]


async def test_an_append_given_up_while_it_is_written_disturbs_nobody(database: GatedDatabase) -> None:
    group = GroupCommit(database.write, None)
    first, second = group.append(new()), group.append(new())
    await settle()
    first.cancel()
    database.open_gate()
    assert (await second).position == 2


async def test_closing_writes_what_waits_and_takes_no_more(database: GatedDatabase) -> None:
    group = GroupCommit(database.write, None)
    waiting = group.append(new())
    closing = asyncio.ensure_future(group.close())
    await settle()
    assert not closing.done()
    with pytest.raises(Transient, match="closed"):
        group.append(new())
    database.open_gate()
    await closing
    assert isinstance(await waiting, Receipt)


async def test_a_loop_that_ends_leaves_nobody_without_an_answer(database: GatedDatabase) -> None:
    group = GroupCommit(database.write, None)
    written, waiting = group.append(new()), None
    await settle()
    waiting = group.append(new())
    (writer,) = [task for task in asyncio.all_tasks() if task.get_name() == "event log group commit"]
    writer.cancel()
    answers = await asyncio.wait_for(asyncio.gather(written, waiting, return_exceptions=True), BOUND_S)
    assert [type(answer) for answer in answers] == [Transient, Transient]


async def test_the_hint_comes_once_for_each_batch_that_added_something(database: GatedDatabase) -> None:
    hinted: list[int] = []
    group = GroupCommit(database.write, hinted.append)
    database.open_gate(3)
    await asyncio.gather(*(group.append(new()) for _ in range(3)))
    again = new()
    await group.append(again)
    await settle()
    assert hinted == [3, 4]

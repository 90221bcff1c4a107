"""What every event log promises of appending, loading and reading, and of races."""

import asyncio

import pytest

from tests.support.event_logs import NOON_US, Open, check_sound, commit, everything, grow, new_id
from torpor_contracts.errors import VersionConflict
from torpor_contracts.ids import CommandId
from torpor_contracts.replies import Receipt
from torpor_eventlog.merkle import EMPTY_ROOT
from torpor_eventlog.port import EventLog, Recorded

pytestmark = pytest.mark.anyio


async def test_an_empty_log_has_a_head(log: EventLog) -> None:
    head = await log.head()
    assert (head.position, head.digest, head.root) == (0, bytes(32), EMPTY_ROOT)
    assert await log.read(0, 10) == []
    assert await log.load("stream-a") == []
    assert await log.receipt(CommandId("cmd-unknown")) is None


async def test_an_event_is_kept_as_it_was_given(log: EventLog) -> None:
    data = '{"type":"thing-happened.v1","what":"Grüße, 世界 🌍\\u0000"}'.encode()
    given = commit(
        "strøm-å",
        data=data,
        command_id="cmd-é",
        causation_id="causé-1",
        correlation_id="goal-ß",
        tenant_id="mandant-ü",
        occurred_at_us=NOON_US + 7,
    )
    receipt = await log.append(given)
    (row,) = await log.load("strøm-å")
    assert row == Recorded(
        position=1,
        stream="strøm-å",
        version=1,
        tag="thing-happened.v1",
        data=data,
        occurred_at_us=NOON_US + 7,
        command_id="cmd-é",
        causation_id="causé-1",
        correlation_id="goal-ß",
        tenant_id="mandant-ü",
        digest=row.digest,
    )
    assert receipt == Receipt(
        command_id=CommandId("cmd-é"), stream="strøm-å", version=1, position=1, digest=row.digest.hex()
    )
    assert await log.receipt(CommandId("cmd-é")) == receipt
    await check_sound(log)


async def test_a_commands_events_stand_together_in_the_order_given(log: EventLog) -> None:
    await log.append(commit("stream-b"))
    receipt = await log.append(
        commit("stream-a", "stream-b", "stream-a", "stream-c", expected={"stream-a": 0, "stream-b": 1, "stream-c": 0})
    )
    rows = await check_sound(log)
    assert [(row.stream, row.version) for row in rows[1:]] == [
        ("stream-a", 1),
        ("stream-b", 2),
        ("stream-a", 2),
        ("stream-c", 1),
    ]
    assert (receipt.stream, receipt.version, receipt.position) == ("stream-a", 2, 4)
    assert receipt.digest == rows[3].digest.hex()


async def test_a_conflict_in_one_stream_leaves_nothing_in_any(log: EventLog) -> None:
    await log.append(commit("stream-b"))
    with pytest.raises(VersionConflict) as conflict:
        await log.append(commit("stream-a", "stream-b"))
    assert (conflict.value.stream, conflict.value.expected, conflict.value.actual) == ("stream-b", 0, 1)
    assert await log.load("stream-a") == []
    assert len(await check_sound(log)) == 1


@pytest.mark.parametrize("expected", [0, 1, 3, 4, 1000])
async def test_only_the_present_version_may_be_expected(log: EventLog, expected: int) -> None:
    await grow(log, 2)
    with pytest.raises(VersionConflict) as conflict:
        await log.append(commit("stream-a", expected={"stream-a": expected}))
    assert (conflict.value.expected, conflict.value.actual) == (expected, 2)
    assert (await log.append(commit("stream-a", expected={"stream-a": 2}))).version == 3
    await check_sound(log)


async def test_a_stream_that_does_not_exist_is_at_version_0(log: EventLog) -> None:
    with pytest.raises(VersionConflict) as conflict:
        await log.append(commit("stream-new", expected={"stream-new": 1}))
    assert conflict.value.actual == 0


@pytest.mark.parametrize("actual", [0, 1])
async def test_a_stream_may_be_expected_without_being_written(log: EventLog, actual: int) -> None:
    await grow(log, actual, "stream-read")
    with pytest.raises(VersionConflict):
        await log.append(commit("stream-a", expected={"stream-a": 0, "stream-read": 1 - actual}))
    receipt = await log.append(commit("stream-a", expected={"stream-a": 0, "stream-read": actual}))
    assert receipt.stream == "stream-a"
    assert len(await log.load("stream-read")) == actual


async def test_a_replica_knows_when_a_stream_it_only_reads_was_written_by_another(open_log: Open) -> None:
    first, second = await open_log(), await open_log()
    await first.append(commit("stream-own"))
    await second.append(commit("stream-read"))
    with pytest.raises(VersionConflict):
        await first.append(commit("stream-a", expected={"stream-a": 0, "stream-read": 0}))
    await first.append(commit("stream-a", expected={"stream-a": 0, "stream-read": 1}))
    await second.append(commit("stream-read", expected={"stream-read": 1}))
    with pytest.raises(VersionConflict):
        await first.append(commit("stream-a", expected={"stream-a": 1, "stream-read": 1}))
    await first.append(commit("stream-shared"))
    await second.append(commit("stream-shared", expected={"stream-shared": 1}))
    with pytest.raises(VersionConflict):
        await first.append(commit("stream-a", expected={"stream-a": 1, "stream-shared": 1}))
    assert len(await check_sound(first)) == 6


async def test_streams_load_after_a_version(log: EventLog) -> None:
    await grow(log, 5)
    await grow(log, 2, "stream-b")
    assert [row.version for row in await log.load("stream-a")] == [1, 2, 3, 4, 5]
    assert [row.version for row in await log.load("stream-a", after_version=3)] == [4, 5]
    assert await log.load("stream-a", after_version=5) == []
    assert await log.load("stream-a", after_version=99) == []


async def test_the_log_reads_by_page(log: EventLog) -> None:
    await grow(log, 10)
    assert [row.position for row in await log.read(0, 4)] == [1, 2, 3, 4]
    assert [row.position for row in await log.read(8, 4)] == [9, 10]
    assert await log.read(10, 4) == []
    assert await log.read(3, 0) == []
    assert len(await everything(log, page=3)) == 10


async def test_of_many_that_race_one_wins_and_no_neighbour_is_harmed(log: EventLog) -> None:
    racing = [log.append(commit("stream-a")) for _ in range(50)]
    neighbours = [log.append(commit(new_id("stream"))) for _ in range(50)]
    mixed = [append for pair in zip(racing, neighbours, strict=True) for append in pair]
    answers = await asyncio.gather(*mixed, return_exceptions=True)
    assert sum(isinstance(answer, Receipt) for answer in answers[::2]) == 1
    assert sum(isinstance(answer, VersionConflict) for answer in answers[::2]) == 49
    assert all(isinstance(answer, Receipt) for answer in answers[1::2])
    assert len(await check_sound(log)) == 51


async def test_replicas_append_without_gaps_and_each_race_has_one_winner(open_log: Open) -> None:
    replicas = [await open_log() for _ in range(3)]
    won: list[tuple[str, int]] = []

    async def contend(log: EventLog, own: str) -> None:
        """Append to a stream of one's own, and to one that all fight for, deciding again after each lost race."""
        for at in range(8):
            await log.append(commit(own, expected={own: at}))
            version = len(await log.load("stream-shared"))
            try:
                receipt = await log.append(commit("stream-shared", expected={"stream-shared": version}))
            except VersionConflict:
                continue
            won.append((receipt.stream, receipt.version))

    await asyncio.gather(*(contend(log, new_id("stream")) for log in replicas for _ in range(4)))
    rows = await check_sound(replicas[0])
    shared = [row.version for row in rows if row.stream == "stream-shared"]
    assert sorted(version for _, version in won) == shared
    assert len(rows) == 3 * 4 * 8 + len(shared)
    assert await everything(replicas[1]) == rows


async def test_a_replica_sees_what_another_appended(open_log: Open) -> None:
    first, second = await open_log(), await open_log()
    await first.append(commit("stream-a"))
    assert (await second.append(commit("stream-a", expected={"stream-a": 1}))).version == 2
    assert (await first.append(commit("stream-a", expected={"stream-a": 2}))).version == 3
    with pytest.raises(VersionConflict):
        await second.append(commit("stream-a", expected={"stream-a": 2}))
    assert (await first.head()) == (await second.head())
    await check_sound(first)

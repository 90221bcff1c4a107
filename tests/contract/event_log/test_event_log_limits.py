"""What no event log keeps, and that its refusal harms nobody else."""

import asyncio
from typing import Any, Final

import pytest

from tests.support.event_logs import check_sound, commit, new_id
from torpor_contracts.errors import InvariantViolation, Rejected
from torpor_contracts.replies import Receipt
from torpor_eventlog.planning import DATA_BYTES_MAX, EVENTS_MAX
from torpor_eventlog.port import EventLog

pytestmark = pytest.mark.anyio


FIELDS: Final = ("command_id", "causation_id", "correlation_id", "tenant_id")


async def test_texts_that_cannot_be_kept_are_refused_alone(log: EventLog) -> None:
    neighbours = 0
    for text in ("", "nul\x00", "half\ud800", "x" * 256, "ü" * 128):
        bad = [commit(text)]
        for field in FIELDS:
            texts: dict[str, Any] = {field: text}
            bad.append(commit("stream-bad", **texts))
        for one in bad:
            answers = await asyncio.gather(
                log.append(one), log.append(commit(new_id("stream"))), return_exceptions=True
            )
            assert isinstance(answers[0], Rejected)
            assert answers[0].code == "illegal-text"
            assert isinstance(answers[1], Receipt)
            neighbours += 1
    assert len(await check_sound(log)) == neighbours


async def test_the_longest_texts_can_be_kept(log: EventLog) -> None:
    longest: dict[str, Any] = dict.fromkeys(FIELDS, "ü" * 127)
    receipt = await log.append(commit("ß" * 127, **longest))
    assert receipt.version == 1
    await check_sound(log)


async def test_the_largest_events_can_be_kept_and_larger_ones_are_refused(log: EventLog) -> None:
    largest = b'"' + bytes(range(256)) * (DATA_BYTES_MAX // 256 - 1) + b'"'
    largest += b" " * (DATA_BYTES_MAX - len(largest))
    receipts = await asyncio.gather(*(log.append(commit(new_id("stream"), data=largest)) for _ in range(12)))
    assert sorted(receipt.position for receipt in receipts) == list(range(1, 13))
    with pytest.raises(Rejected) as refused:
        await log.append(commit("stream-large", data=largest + b" "))
    assert refused.value.code == "event-too-large"
    assert all(row.data == largest for row in await check_sound(log))


async def test_a_commit_of_very_many_events_is_kept_whole_and_more_are_refused(log: EventLog) -> None:
    receipt = await log.append(commit(*["stream-a"] * EVENTS_MAX))
    assert (receipt.version, receipt.position) == (EVENTS_MAX, EVENTS_MAX)
    with pytest.raises(Rejected) as refused:
        await log.append(commit(*["stream-b"] * (EVENTS_MAX + 1)))
    assert refused.value.code == "too-many-events"
    assert len(await check_sound(log)) == EVENTS_MAX


async def test_what_only_a_mistake_of_ours_can_send_is_a_broken_invariant(log: EventLog) -> None:
    for wrong in (
        commit(command_id="cmd-nothing"),
        commit("stream-a", expected={}),
        commit("stream-a", request_digest=b"short"),
        commit("stream-a", occurred_at_us=-1),
        commit("stream-a", occurred_at_us=1 << 63),
    ):
        with pytest.raises(InvariantViolation):
            await log.append(wrong)
    assert await check_sound(log) == []

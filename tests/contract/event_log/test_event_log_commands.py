"""What every event log promises of a command that is given again."""

import asyncio

import pytest

from tests.support.event_logs import Open, check_sound, commit, grow, new_id
from torpor_contracts.errors import Rejected
from torpor_contracts.ids import CommandId
from torpor_contracts.replies import Receipt
from torpor_eventlog.port import EventLog

pytestmark = pytest.mark.anyio


async def test_the_same_command_gets_its_first_receipt_whatever_it_expects_now(log: EventLog) -> None:
    first = await log.append(commit("stream-a", command_id="cmd-again"))
    await grow(log, 3)
    again = commit("stream-a", command_id="cmd-again")
    assert await log.append(again) == first
    assert await log.append(commit("stream-a", command_id="cmd-again", expected={"stream-a": 4})) == first
    assert await log.append(commit(command_id="cmd-again")) == first
    assert await log.receipt(CommandId("cmd-again")) == first
    assert len(await check_sound(log)) == 4


async def test_a_command_of_many_events_gets_its_first_receipt(log: EventLog) -> None:
    first = await log.append(commit("stream-a", "stream-b", "stream-b", command_id="cmd-again"))
    assert (first.stream, first.position) == ("stream-a", 1)
    assert await log.append(commit("stream-a", "stream-b", "stream-b", command_id="cmd-again")) == first
    assert len(await check_sound(log)) == 3


async def test_the_same_id_for_another_request_is_refused(log: EventLog) -> None:
    await log.append(commit("stream-a", command_id="cmd-reused"))
    with pytest.raises(Rejected) as refused:
        await log.append(commit("stream-b", command_id="cmd-reused", request=b"another"))
    assert refused.value.code == "command-id-reused"
    assert await log.load("stream-b") == []


async def test_one_command_given_twice_at_once_happens_once(log: EventLog) -> None:
    answers = await asyncio.gather(*(log.append(commit("stream-a", command_id="cmd-twice")) for _ in range(20)))
    assert set(answers) == {await log.receipt(CommandId("cmd-twice"))}
    assert len(await check_sound(log)) == 1


async def test_one_id_given_to_two_requests_at_once_happens_once(log: EventLog) -> None:
    answers = await asyncio.gather(
        log.append(commit("stream-a", command_id="cmd-twice")),
        log.append(commit("stream-b", command_id="cmd-twice", request=b"another")),
        return_exceptions=True,
    )
    assert [type(answer) for answer in answers] == [Receipt, Rejected]
    assert len(await check_sound(log)) == 1


async def test_one_command_at_two_replicas_at_once_happens_once(open_log: Open) -> None:
    replicas = [await open_log() for _ in range(2)]
    for _ in range(20):
        name, stream = new_id("cmd"), new_id("stream")
        answers = await asyncio.gather(*(log.append(commit(stream, command_id=name)) for log in replicas for _ in "ab"))
        assert len(set(answers)) == 1
    assert len(await check_sound(replicas[0])) == 20

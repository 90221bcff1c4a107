"""What every event log promises when it is opened, closed, or no longer waited for."""

import asyncio

import pytest

from tests.support.event_logs import Open, check_sound, commit, grow, new_id
from torpor_contracts.errors import Transient, VersionConflict
from torpor_contracts.ids import CommandId
from torpor_contracts.replies import Receipt
from torpor_eventlog.port import EventLog

pytestmark = pytest.mark.anyio


async def test_a_log_goes_on_after_it_was_closed(open_log: Open) -> None:
    first = await open_log()
    receipt = await first.append(commit("stream-a", command_id="cmd-first"))
    await grow(first, 300)
    await first.close()
    second = await open_log()
    assert await second.receipt(CommandId("cmd-first")) == receipt
    assert await second.append(commit("stream-a", command_id="cmd-first")) == receipt
    await grow(second, 300)
    assert len(await check_sound(second)) == 601


async def test_closing_finishes_the_appends_that_wait(open_log: Open) -> None:
    log = await open_log()
    appends = [asyncio.ensure_future(log.append(commit(new_id("stream")))) for _ in range(20)]
    await asyncio.sleep(0)  # let them reach the log
    await log.close()
    assert all(isinstance(receipt, Receipt) for receipt in await asyncio.gather(*appends))
    assert len(await check_sound(await open_log())) == 20


async def test_a_closed_log_says_so(open_log: Open) -> None:
    log = await open_log()
    await log.close()
    await log.close()
    for ask in (
        lambda: log.append(commit("stream-a")),
        lambda: log.read(0, 1),
        lambda: log.load("stream-a"),
        lambda: log.receipt(CommandId("cmd-1")),
        log.head,
    ):
        with pytest.raises(Transient, match="closed"):
            await ask()


async def test_a_caller_that_gives_up_can_ask_again_with_the_same_id(log: EventLog) -> None:
    """Cancelled anywhere between the call and its answer: the command happens once or not yet, never twice."""
    for turns in range(12):
        name, stream = new_id("cmd"), new_id("stream")
        append = asyncio.ensure_future(log.append(commit(stream, command_id=name)))
        neighbour = asyncio.ensure_future(log.append(commit(new_id("stream"))))
        for _ in range(turns):
            await asyncio.sleep(0)
        append.cancel()
        await asyncio.gather(append, return_exceptions=True)
        assert isinstance(await neighbour, Receipt)
        receipt = await log.append(commit(stream, command_id=name))
        assert await log.receipt(CommandId(name)) == receipt
        assert len(await log.load(stream)) == 1
    await check_sound(log)


async def test_the_hint_names_the_last_position_of_every_commit(open_log: Open) -> None:
    hinted: list[int] = []
    log = await open_log(hinted.append)
    await log.append(commit("stream-a", "stream-b"))
    await log.append(commit("stream-a", command_id="cmd-3", expected={"stream-a": 1}))
    await log.append(commit("stream-a", command_id="cmd-3", expected={"stream-a": 1}))
    with pytest.raises(VersionConflict):
        await log.append(commit("stream-a"))
    await asyncio.sleep(0)
    assert hinted == [2, 3]

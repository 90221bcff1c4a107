"""What sessions rest on is never freed: their own checkpoints, and those of others that they were forked from."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.support.store_world import ACME, StoreWorld
from torpor_contracts.errors import Rejected


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def code(work: Coroutine[Any, Any, object]) -> str:
    with pytest.raises(Rejected) as refused:
        await work
    assert refused.value.advice
    return refused.value.code


@pytest.mark.parametrize("folded", [True, False])
def test_a_checkpoint_is_held_by_its_forks_also_when_its_own_session_is_over(tmp_path: Path, folded: bool) -> None:
    """Whether the view has come as far or not."""

    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        await world.kept("ckp-1", b"1", b"2", b"3")
        await world.captured("ckp-1")
        await world.forked("ckp-1", "s-2")
        await world.forked("ckp-1", "s-3")
        await world.terminated()
        if folded:
            await world.fold()
            assert (await world.ask("checkpoint", "ckp-1")).pinned_by == ["session s-2", "session s-3"]
        assert await code(world.free("ckp-1")) == "checkpoint-referenced"
        await world.terminated("s-2")
        assert await code(world.free("ckp-1")) == "checkpoint-referenced"
        await world.terminated("s-3")
        assert await world.free("ckp-1") is not None
        assert world.packs() == 0

    run(scenario())


def test_a_fork_that_has_a_checkpoint_of_its_own_holds_that_and_so_its_parent(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        put = await world.kept("ckp-1", b"1", b"2", b"3")
        await world.captured("ckp-1")
        await world.forked("ckp-1", "s-2")
        more = await world.put(b"4", b"5", b"3", onto=put)
        assert await world.register("ckp-2", more, "ckp-1", session_id="s-2") is not None
        await world.captured("ckp-2", "s-2")
        await world.terminated()
        assert await code(world.free("ckp-1")) == "checkpoint-referenced"
        await world.terminated("s-2")
        assert await world.free("ckp-2") is not None
        assert await world.free("ckp-1") is not None

    run(scenario())


def test_an_older_checkpoint_of_a_running_session_can_be_freed(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        await world.kept("ckp-1", b"1", b"2", b"3")
        await world.captured("ckp-1")
        assert await code(world.free("ckp-1")) == "checkpoint-referenced"
        await world.kept("ckp-2", b"4", b"5", b"6")
        assert await code(world.free("ckp-2")) == "checkpoint-referenced", "it may be about to be named"
        await world.captured("ckp-2")
        assert await world.free("ckp-1") is not None

    run(scenario())


def test_a_session_that_comes_to_rest_on_it_at_the_last_moment_keeps_it_until_it_goes_on(tmp_path: Path) -> None:
    """Between the last look and the record that it is to be freed: nothing is deleted while somebody rests on it."""

    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        put = await world.kept("ckp-1", b"1", b"2", b"3")
        await world.terminated()
        plain = world.outside.log.append

        async def fork_first(commit: Any) -> Any:
            world.outside.log.append = plain  # type: ignore[method-assign]
            await world.forked("ckp-1", "s-2")
            return await plain(commit)

        world.outside.log.append = fork_first  # type: ignore[method-assign]
        assert await world.free("ckp-1") is not None
        assert (await world.tags("ckp-1"))[-1] == "checkpoint-free-started", "it was freed under a session"
        await world.chunks.verify(ACME, put.packs[0].address)
        await world.fold()
        await world.background("freeing")
        assert (await world.tags("ckp-1"))[-1] == "checkpoint-free-started"
        more = await world.put(b"4", b"5", b"3", onto=put)
        assert await world.register("ckp-2", more, "ckp-1", session_id="s-2") is not None
        assert await code(world.register("ckp-3", more, "ckp-1", session_id="s-9")) == "checkpoint-freed"
        await world.captured("ckp-2", "s-2")
        await world.terminated("s-2")
        await world.free("ckp-2")
        await world.fold()
        await world.background("freeing")
        assert (await world.tags("ckp-1"))[-1] == "checkpoint-freed"
        assert world.packs() == 0

    run(scenario())


def test_the_session_that_made_it_cannot_come_to_rest_on_it_while_it_is_freed(tmp_path: Path) -> None:
    """The decision to free rests on that session's stream: it is looked at again when that has changed."""

    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        await world.kept("ckp-1", b"1", b"2", b"3")
        await world.captured("ckp-1")
        await world.kept("ckp-2", b"4", b"5", b"6")
        await world.captured("ckp-2")
        plain = world.outside.log.append

        async def back_first(commit: Any) -> Any:
            world.outside.log.append = plain  # type: ignore[method-assign]
            await world.captured("ckp-1")
            return await plain(commit)

        world.outside.log.append = back_first  # type: ignore[method-assign]
        assert await code(world.free("ckp-1")) == "checkpoint-referenced"
        assert (await world.tags("ckp-1")) == ["checkpoint-recorded"]

    run(scenario())


def test_the_name_that_its_owner_gave_it_is_shown(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = StoreWorld(tmp_path)
        await world.kept("ckp-1", b"1", b"2", b"3")
        await world.captured("ckp-1", label="before the upgrade")
        await world.fold()
        assert (await world.ask("checkpoint", "ckp-1")).label == "before the upgrade"

    run(scenario())

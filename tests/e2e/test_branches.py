"""Checkpoints of sessions that run on, forks and the way back, by the installed command and by the SDK."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import torpor as sdk
from tests.support.embedded import EmbeddedWhole, torpor
from torpor.client.session import Session

pytestmark = pytest.mark.e2e


def in_session(whole: EmbeddedWhole, act: Callable[[sdk.Torpor, Session], Awaitable[None]]) -> None:
    """Act on a new session that remembers `colour` as blue in its memory."""

    async def run() -> None:
        async with asyncio.timeout(60), sdk.connect(data_dir=whole.data.root) as t:
            session = await t.sessions.create()
            await session.exec("set", "colour", "blue")
            await act(t, session)

    asyncio.run(run())


async def remembered(session: Session) -> str:
    return (await session.exec("get", "colour")).stdout.strip()


def test_a_checkpoint_forks_and_the_way_back_keep_the_memory(whole: EmbeddedWhole) -> None:
    async def act(t: sdk.Torpor, session: Session) -> None:
        made = await session.checkpoint(label="before the change")
        assert made.pause_ms is not None
        assert made.label == "before the change"
        await session.exec("set", "colour", "red")
        forks = await session.fork(3)
        assert [await remembered(fork) for fork in forks] == ["red"] * 3
        (old,) = await session.fork(checkpoint_id=made.checkpoint_id, metadata={"try": "again"})
        assert await remembered(old) == "blue"
        view = await old.show(at_least=old.position)
        assert view.metadata == {"try": "again"}
        assert view.lineage is not None
        assert (view.lineage.session_id, view.lineage.checkpoint_id) == (session.session_id, made.checkpoint_id)
        await forks[0].exec("set", "colour", "green")
        assert await remembered(session) == "red", "the source goes on apart from its forks"
        await session.rollback(made.checkpoint_id)
        assert await remembered(session) == "blue"
        assert (await session.show(at_least=session.position)).incarnation == 2
        labels = {str(view.checkpoint_id): view.label async for view in t.checkpoints.list(session.session_id)}
        assert labels[made.checkpoint_id] == "before the change"

    in_session(whole, act)


def test_a_sleeping_session_is_checkpointed_and_forked_without_waking(whole: EmbeddedWhole) -> None:
    async def act(t: sdk.Torpor, session: Session) -> None:
        await session.suspend()
        asleep = await session.show(at_least=session.position)
        made = await session.checkpoint(label="asleep")
        assert made.checkpoint_id == asleep.checkpoint_id
        (fork,) = await session.fork(session_ids=[f"{session.session_id}-fork"])
        assert fork.session_id == f"{session.session_id}-fork"
        assert await remembered(fork) == "blue"
        assert (await session.show(at_least=session.position)).state == "suspended"

    in_session(whole, act)


def test_what_is_repeated_under_one_command_id_happens_once(whole: EmbeddedWhole) -> None:
    async def act(t: sdk.Torpor, session: Session) -> None:
        name = session.session_id
        once = [await session.checkpoint(command_id=f"check-{name}") for _ in range(2)]
        assert once[0] == once[1]
        forks = [await session.fork(2, command_id=f"fork-{name}") for _ in range(2)]
        assert [fork.session_id for fork in forks[0]] == [fork.session_id for fork in forks[1]]
        asked = await session.fork(2, wait=False)
        assert len({fork.session_id for fork in asked}) == 2

    in_session(whole, act)


def test_what_cannot_be_is_refused_with_advice(whole: EmbeddedWhole) -> None:
    async def act(t: sdk.Torpor, session: Session) -> None:
        foreign = await (await t.sessions.create()).checkpoint()
        for checkpoint_id in ("ckp-nobody", foreign.checkpoint_id):
            with pytest.raises(sdk.CheckpointNotFound, match="checkpoint tree"):
                await session.rollback(checkpoint_id)
            with pytest.raises(sdk.CheckpointNotFound):
                await session.fork(checkpoint_id=checkpoint_id)
        with pytest.raises(sdk.InvalidRequest, match="ckp-"):
            await session.rollback("first")
        for count in (0, -1, 101):
            with pytest.raises(sdk.InvalidRequest, match="1 to 100"):
                await session.fork(count)
        with pytest.raises(sdk.InvalidRequest, match="same id"):
            await session.fork(session_ids=["ses-a", "ses-a"])
        with pytest.raises(sdk.SessionExists):
            await session.fork(session_ids=[foreign.session_id])
        with pytest.raises(sdk.InvalidRequest, match="label"):
            await session.checkpoint(label="x" * 1000)
        with pytest.raises(sdk.StaleIncarnation):
            await session.checkpoint(incarnation=7)
        await session.terminate()
        for refused in (session.checkpoint(), session.fork(2), session.rollback("ckp-nobody")):
            with pytest.raises(sdk.WrongState, match="create another"):
                await refused
        with pytest.raises(sdk.SessionNotFound):
            await t.sessions.handle("ses-nobody").fork(2)

    in_session(whole, act)


def test_the_command_branches_a_session(whole: EmbeddedWhole) -> None:
    session_id = str(whole.call("session", "create")["session_id"])
    made = whole.call("checkpoint", "create", session_id, "--label", "first steps")
    assert made["checkpoint_id"].startswith("ckp-")
    whole.call("session", "exec", session_id, "--", "set", "colour", "red")
    forks = whole.call("session", "fork", session_id, "2")["sessions"]
    assert [fork["state"] for fork in forks] == ["running"] * 2
    said = torpor(whole.data.root, "session", "fork", session_id, "--from", made["checkpoint_id"]).stdout
    assert f"running  from {made['checkpoint_id']}" in said
    back = whole.call("session", "rollback", session_id, made["checkpoint_id"])
    assert (back["state"], back["incarnation"]) == ("running", 2)
    tree = torpor(whole.data.root, "checkpoint", "tree", session_id).stdout
    assert "first steps" in tree
    assert len(tree.splitlines()) == 2
    assert "first steps" in torpor(whole.data.root, "checkpoint", "list", "--session-id", session_id).stdout
    said = torpor(whole.data.root, "session", "checkpoint", session_id).stdout
    assert "stood still" in said
    refused = whole.refused("session", "rollback", session_id, "ckp-nobody")
    assert (refused["code"], refused["exit_code"]) == ("checkpoint-not-found", 1)
    assert whole.refused("session", "fork", session_id, "500")["code"] == "illegal-fork"
    assert whole.refused("session", "fork", session_id, "5", "--id", "ses-one")["code"] == "illegal-fork"

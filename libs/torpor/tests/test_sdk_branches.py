"""What the SDK makes of the events that follow a checkpoint, a fork or a rollback, in whatever order they come."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import msgspec
import pytest
from nats.aio.msg import Msg

import torpor
from tests.support.nats import NatsServer
from torpor_contracts import session as contract
from torpor_contracts import session_branches as branches
from torpor_contracts.ids import CheckpointId, HostId, SessionId, VmId
from torpor_contracts.replies import Receipt, Reply

from .small_scheduler import SmallScheduler

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SESSION = SessionId("ses-1")
HOST = HostId("host-1")
MINE, OTHERS = CheckpointId("ckp-mine"), CheckpointId("ckp-others")
FORKS = [SessionId("ses-a"), SessionId("ses-b")]
FORK_REQUESTED = branches.ForkRequested(
    session_id=SESSION, incarnation=1, checkpoint_id=MINE, session_ids=FORKS, metadata={}, requested_at=NOW
)


def requested(checkpoint_id: CheckpointId = MINE) -> branches.CheckpointRequested:
    return branches.CheckpointRequested(
        session_id=SESSION,
        host_id=HOST,
        vm_id=VmId("vm-1"),
        incarnation=1,
        checkpoint_id=checkpoint_id,
        parent_id=None,
        label="x",
        cause="client",
        attempt=1,
        requested_at=NOW,
        deadline_at=NOW,
    )


def taken(checkpoint_id: CheckpointId = MINE) -> branches.SessionCheckpointed:
    return branches.SessionCheckpointed(
        incarnation=1,
        host_id=HOST,
        checkpoint_id=checkpoint_id,
        fingerprint="f",
        label="x",
        pause_ms=12.5,
        log_position=1,
        taken_at=NOW,
        observed_at=NOW,
    )


def failed(retry_at: datetime | None, checkpoint_id: CheckpointId = MINE) -> branches.CheckpointFailed:
    return branches.CheckpointFailed(
        incarnation=1,
        checkpoint_id=checkpoint_id,
        attempt=1,
        code="disk-full",
        detail="no room",
        observed_at=NOW,
        retry_at=retry_at,
    )


def forked(checkpoint_id: CheckpointId = MINE) -> branches.SessionForked:
    return branches.SessionForked(
        session_id=SESSION,
        incarnation=1,
        checkpoint_id=checkpoint_id,
        session_ids=FORKS,
        log_position=1,
        forked_at=NOW,
    )


STARTED = contract.SessionStarted(vm_id=VmId("vm-1"), host_id=HOST, incarnation=1, observed_at=NOW)
FAILED = contract.SessionFailed(incarnation=1, code="no-host", detail="none", way_out="add one", observed_at=NOW)


def scenario(
    server: NatsServer,
    asked: Sequence[msgspec.Struct],
    then: Sequence[tuple[str, msgspec.Struct]],
    act: Callable[[torpor.Torpor], Awaitable[None]],
) -> None:
    """A command appends `asked`, and is answered; after that comes `then`."""

    async def run() -> None:
        scheduler = await SmallScheduler.connect(server)

        async def take(_message: Msg) -> Reply:
            receipt: Receipt | None = None
            for event in asked:
                receipt = await scheduler.event(SESSION, event)
            for stream, event in then:
                await scheduler.event(stream, event)
            return Reply(receipt=receipt)

        scheduler.on_command = take
        seed = server.seed("tenant-default")
        async with (
            asyncio.timeout(30),
            torpor.connect(nats_url=server.url, nkey_seed_file=seed, tenant="default") as t,
        ):
            await act(t)
        await scheduler.close()

    asyncio.run(run())


def test_a_checkpoint_that_is_tried_again_is_waited_for(nats_server: NatsServer) -> None:
    async def act(t: torpor.Torpor) -> None:
        made = await t.sessions.handle(SESSION).checkpoint()
        assert (made.checkpoint_id, made.pause_ms, made.receipt.position, made.position) == (MINE, 12.5, 1, 5)

    others = [(SESSION, taken(OTHERS)), (SESSION, failed(None, OTHERS))]
    scenario(nats_server, [requested()], [*others, (SESSION, failed(NOW)), (SESSION, taken())], act)


def test_a_checkpoint_that_fails_for_good_says_why(nats_server: NatsServer) -> None:
    async def act(t: torpor.Torpor) -> None:
        with pytest.raises(torpor.CheckpointFailed, match="no room") as raised:
            await t.sessions.handle(SESSION).checkpoint()
        assert (raised.value.code, raised.value.position) == ("disk-full", 2)

    scenario(nats_server, [requested()], [(SESSION, failed(None))], act)


def test_a_checkpoint_without_a_wait_has_its_id_and_no_pause(nats_server: NatsServer) -> None:
    async def act(t: torpor.Torpor) -> None:
        made = await t.sessions.handle(SESSION).checkpoint(wait=False)
        assert (made.checkpoint_id, made.pause_ms, made.taken_at) == (MINE, None, None)

    scenario(nats_server, [requested()], [], act)


def test_forks_are_returned_once_all_of_them_run(nats_server: NatsServer) -> None:
    async def act(t: torpor.Torpor) -> None:
        forks = await t.sessions.handle(SESSION).fork(2)
        assert [(fork.session_id, fork.position) for fork in forks] == [("ses-a", 6), ("ses-b", 5)]

    then = [(SESSION, forked(OTHERS)), (SESSION, forked()), (FORKS[1], STARTED), (FORKS[0], STARTED)]
    scenario(nats_server, [FORK_REQUESTED, requested()], then, act)


def test_forks_from_a_checkpoint_there_is_need_no_other(nats_server: NatsServer) -> None:
    async def act(t: torpor.Torpor) -> None:
        forks = await t.sessions.handle(SESSION).fork(2, checkpoint_id=MINE, wait=False)
        assert [fork.session_id for fork in forks] == FORKS

    scenario(nats_server, [forked()], [], act)


def test_a_fork_that_comes_to_nothing_says_why(nats_server: NatsServer) -> None:
    nothing = branches.ForkFailed(
        incarnation=1, checkpoint_id=MINE, session_ids=FORKS, code="disk-full", detail="no room", observed_at=NOW
    )

    async def act(t: torpor.Torpor) -> None:
        with pytest.raises(torpor.ForkFailed, match="none of the 2 sessions") as raised:
            await t.sessions.handle(SESSION).fork(2)
        assert raised.value.session_ids == ()

    scenario(nats_server, [FORK_REQUESTED, requested()], [(SESSION, failed(None)), (SESSION, nothing)], act)


def test_forks_of_which_some_do_not_start_are_all_named(nats_server: NatsServer) -> None:
    async def act(t: torpor.Torpor) -> None:
        with pytest.raises(torpor.ForkFailed, match="1 of 2 sessions did not start: ses-a") as raised:
            await t.sessions.handle(SESSION).fork(2)
        assert (raised.value.code, raised.value.session_ids) == ("no-host", ("ses-a", "ses-b"))
        assert "add one" in raised.value.advice

    then = [(SESSION, forked()), (FORKS[0], FAILED), (FORKS[1], STARTED)]
    scenario(nats_server, [FORK_REQUESTED, requested()], then, act)


def test_forks_that_do_not_come_up_in_time_are_not_yet(nats_server: NatsServer) -> None:
    async def act(t: torpor.Torpor) -> None:
        with pytest.raises(torpor.NotYet, match="not all of the 2 sessions") as raised:
            await t.sessions.handle(SESSION).fork(2, timeout_s=0.7)
        assert raised.value.receipt.position == 2

    scenario(nats_server, [FORK_REQUESTED, requested()], [(SESSION, forked()), (FORKS[1], STARTED)], act)

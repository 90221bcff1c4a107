"""Branches of a real machine: forks that are nobody's copy, a way back, and wakes that many ask for at once."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import torpor
from tests.support.real_machines import RealWhole, eventually
from torpor.client.api import Torpor

pytestmark = pytest.mark.e2e

FORKS = 8
WATCHER = """
import os, random, sys
from time import sleep
import torpor_guest
if os.fork():
    sys.exit()
os.setsid()
random.seed(1)
def became(epoch):
    with open("/dev/shm/became.new", "w") as file:
        file.write(f"{epoch['epoch']} {epoch['hostname']} {random.getrandbits(64)}")
    os.rename("/dev/shm/became.new", "/dev/shm/became")
torpor_guest.on_epoch(became)
nothing = os.open(os.devnull, os.O_RDWR)
for descriptor in range(3):
    os.dup2(nothing, descriptor)
while True:
    sleep(60)
"""
"""A process that goes on in the background, and draws from its own generator whenever it has become somebody else."""

COUNTER = """
import sys
count, file = 0, open("/root/count", "a", buffering=1)
for line in sys.stdin:
    count += 1
    file.write(f"{count}\\n")
    print(count, flush=True)
"""


def with_sdk(whole: RealWhole, work: Callable[[Torpor], Awaitable[None]]) -> None:
    """Do something with the SDK, and end every session after it."""

    async def run() -> None:
        async with asyncio.timeout(100), torpor.connect(data_dir=whole.data.root) as t:
            try:
                await work(t)
            finally:
                left = [view.session_id async for view in t.sessions.list() if view.state != "terminated"]
                await asyncio.gather(*(t.sessions.handle(one).terminate() for one in left))

    asyncio.run(run())
    eventually(lambda: not whole.machines(), "no machine is left")


async def said(session: Any, *argv: str) -> str:
    result = await session.exec(*argv)
    assert result.ok, result
    return str(result.stdout).strip()


def test_eight_forks_are_eight_machines(real_whole: RealWhole) -> None:
    async def work(t: Torpor) -> None:
        session = await t.sessions.create(session_id="ses-eight", idle_after_s=None)
        await said(session, "python3", "-c", WATCHER)
        forks = await session.fork(FORKS)
        script = (
            "hostname; cat /etc/machine-id; head -c 16 /dev/urandom | od -An -tx1; "
            "cat /proc/sys/kernel/random/uuid; until [ -e /dev/shm/became ]; do sleep 0.05; done; cat /dev/shm/became"
        )
        told = [answer.splitlines() for answer in await asyncio.gather(*(said(f, "sh", "-c", script) for f in forks))]
        for place, what in enumerate(("hostname", "machine-id", "urandom", "uuid", "what a watching process drew")):
            assert len({answer[place] for answer in told}) == FORKS, what
        fresh = await asyncio.gather(
            *(said(f, "python3", "-c", "import uuid, random; print(uuid.uuid4(), random.random())") for f in forks)
        )
        assert len(set(fresh)) == FORKS
        assert [answer[0] for answer in told] == [fork.session_id for fork in forks]
        assert await said(session, "sh", "-c", "[ ! -e /dev/shm/became ] && hostname") == "ses-eight"

    with_sdk(real_whole, work)


def test_a_fork_and_a_rollback_go_on_from_the_same_moment(real_whole: RealWhole) -> None:
    async def work(t: Torpor) -> None:
        session = await t.sessions.create(session_id="ses-back", idle_after_s=None)
        await said(session, "sh", "-c", "mkfifo /run/in /run/out; echo first > /root/file")
        start = f"setsid python3 -u -c '{COUNTER}' <> /run/in >> /run/out 2>&1 &"
        await said(session, "sh", "-c", f"exec 3<>/run/out; {start} echo >> /run/in; read n <&3; echo $n")

        async def counted(where: Any) -> int:
            return int(await said(where, "sh", "-c", "exec 3<>/run/out; echo >> /run/in; read n <&3; echo $n"))

        assert await counted(session) == 2
        made = await session.checkpoint(label="two")
        assert made.pause_ms is not None
        assert await counted(session) == 3
        await said(session, "sh", "-c", "echo later > /root/file")
        (fork,) = await session.fork(checkpoint_id=made.checkpoint_id)
        assert await counted(fork) == 3
        assert await said(fork, "cat", "/root/file") == "first"
        began = time.monotonic()
        await session.rollback(made.checkpoint_id)
        assert await counted(session) == 3, f"after {time.monotonic() - began:.2f} s"
        assert await said(session, "cat", "/root/file", "/root/count") == "first\n1\n2\n3"
        assert (await session.show()).incarnation == 2
        with pytest.raises(torpor.Refused):
            await session.rollback("ckp-of-nobody")

    with_sdk(real_whole, work)


def test_fifty_who_wake_a_session_at_once_find_one_machine(real_whole: RealWhole) -> None:
    async def work(t: Torpor) -> None:
        session = await t.sessions.create(session_id="ses-fifty", idle_after_s=None)
        await session.suspend()
        assert real_whole.machines() == {}
        answers = await asyncio.gather(*(session.exec("sh", "-c", f"echo {number}") for number in range(50)))
        assert sorted(int(answer.stdout) for answer in answers) == list(range(50))
        assert {answer.incarnation for answer in answers} == {2}
        assert len(real_whole.machines()) == 1

    with_sdk(real_whole, work)


def test_a_session_that_is_woken_right_after_it_fell_asleep_is_awake(real_whole: RealWhole) -> None:
    async def work(t: Torpor) -> None:
        session = await t.sessions.create(session_id="ses-restless", idle_after_s=None)
        for cycle in range(1, 6):
            await session.suspend()
            await session.resume()
            assert await said(session, "sh", "-c", f"echo {cycle} >> /root/cycles; wc -l < /root/cycles") == str(cycle)
            assert len(real_whole.machines()) == 1

    with_sdk(real_whole, work)

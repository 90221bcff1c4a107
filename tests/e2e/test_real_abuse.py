"""What programs do to their machine, and what must not come of it: floods, forks without end, full disks and memory."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import torpor
from tests.support.real_machines import RealWhole, eventually
from torpor.client.api import Torpor

pytestmark = pytest.mark.e2e

BOMB = "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass"


def with_session(whole: RealWhole, work: Callable[[Torpor, Any], Awaitable[None]]) -> None:
    """Do something with a session of its own, which must answer in the end, and again when it was put to sleep."""

    async def run() -> None:
        async with asyncio.timeout(100), torpor.connect(data_dir=whole.data.root) as t:
            session = await t.sessions.create(idle_after_s=None)
            await work(t, session)
            assert (await session.exec("echo", "well")).stdout == "well\n"
            await session.suspend()
            assert (await session.exec("echo", "well")).stdout == "well\n"
            await session.terminate()

    asyncio.run(run())
    eventually(lambda: not whole.machines(), "no machine is left")


def test_a_flood_of_output_is_taken_in_order_and_bounded_by_time(real_whole: RealWhole) -> None:
    async def work(_: Torpor, session: Any) -> None:
        taken = 0
        flood = session.exec("sh", "-c", "yes 0123456", program_timeout_s=3.0)
        async for chunk in flood:
            assert chunk.offset == taken
            taken += len(chunk.data)
        assert flood.result.outcome == "timed-out"
        assert taken > 100_000

    with_session(real_whole, work)


def test_forks_without_end_end_with_their_program(real_whole: RealWhole) -> None:
    async def work(_: Torpor, session: Any) -> None:
        ended = await session.exec("python3", "-c", f"import os\n{BOMB}", program_timeout_s=3.0, timeout_s=60.0)
        assert ended.outcome in {"timed-out", "signaled"}
        count = await session.exec("sh", "-c", "ls -d /proc/[0-9]* | wc -l")
        assert int(count.stdout) < 100

    with_session(real_whole, work)


def test_memory_without_end_costs_the_program_and_not_the_machine(real_whole: RealWhole) -> None:
    async def work(_: Torpor, session: Any) -> None:
        hog = "kept = []\nwhile True:\n    kept.append(bytearray(1 << 20))"
        ended = await session.exec("python3", "-c", hog, timeout_s=60.0)
        assert not ended.ok
        assert (await session.show()).incarnation == 1

    with_session(real_whole, work)


def test_a_full_disk_is_the_guests_own(real_whole: RealWhole) -> None:
    async def work(_: Torpor, session: Any) -> None:
        await session.files.write("/root/kept", b"kept")
        most = "fallocate -l $(($(df --output=avail -B1M / | tail -n 1) - 8))M /root/fill"
        ended = await session.exec("sh", "-c", f"{most}; head -c 64M /dev/zero > /root/rest", timeout_s=90.0)
        assert "No space left" in ended.stderr
        with pytest.raises(torpor.Refused) as refused:
            await session.files.write("/root/more", os.urandom(1 << 20))
        assert refused.value.advice
        assert await session.files.read("/root/kept") == b"kept"
        await session.exec("rm", "/root/fill", "/root/rest")

    with_session(real_whole, work)


def test_what_a_session_knows_is_in_no_file_of_ours_as_it_is(real_whole: RealWhole) -> None:
    """Neither its memory nor its disk lies about readable: checkpoints are sealed, and nothing else is kept."""

    async def work(_: Torpor, session: Any) -> None:
        half = os.urandom(16).hex()
        canary = f"canary{half}"
        keep = "echo -n canary > /dev/shm/secret; cat >> /dev/shm/secret; cp /dev/shm/secret /root; sync"
        await session.exec("sh", "-c", keep, stdin=half)
        assert await session.files.read("/root/secret") == canary.encode()
        await session.suspend()
        eventually(lambda: not real_whole.machines(), "it sleeps")
        seen = [path for path in real_whole.data.root.rglob("*") if path.is_file() and holds(path, canary.encode())]
        assert seen == []

    with_session(real_whole, work)


def holds(path: Path, what: bytes) -> bool:
    """Whether a file holds these bytes."""
    tail = b""
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            if what in tail + piece:
                return True
            tail = piece[-len(what) :]
    return False

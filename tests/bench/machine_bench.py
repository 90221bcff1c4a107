"""Sessions on real machines beside the bare driver: how soon they wake, how briefly they stand still, how they fork.

The bare driver does the same to the same machine in the same run, without a log, a store, or a message: it is the
floor. Everything is measured under emulation where the processor does not virtualize.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import torpor
from tests.support.drivers import files_of, run_program
from tests.support.qemu import QemuKit
from tests.support.real_machines import RealWhole
from torpor.bench.figures import Figure, Say, figure, percentile
from torpor.client.api import Torpor
from torpor.client.session import Session
from torpor_contracts.ids import CheckpointId, VmId
from torpor_vm_host.adapters.qemu.driver import QemuDriver
from torpor_vm_host.adapters.qemu.options import SlotPolicy
from torpor_vm_host.ports import VmSpec

TIMES: Final = 25
FORKS_TIMES: Final = 5
FORKS: Final = 5
MANY: Final = 50
WARM_TIMES: Final = 10
SLOTS_S: Final = 3.0
"""So long a pool of slots is left alone, to be filled again."""
NO_SLOTS: Final = {"TORPOR_VM_HOST_SLOTS_WARM": "0", "TORPOR_VM_HOST_SLOTS_BLANK": "0"}
WORK: Final = "seq 1 20000 > /root/work; python3 -c 'print(sum(range(100000)))'; sync"


class WarmKit(QemuKit):
    """The bare driver with a machine or two kept ready."""

    policy = SlotPolicy(warm=1, blank=1)


# --- wake -------------------------------------------------------------------------------------------------------


async def cold(say: Say) -> Sequence[Figure]:
    """A wake with no slot ready: from the command's publication to the first byte that a program writes."""
    async with _bare(QemuKit) as (kit, driver):
        floor = await _bare_wakes(kit, driver, say, 0.0)
    async with _whole(NO_SLOTS) as t:
        ours = await _wakes(t, "echo", "awake", pause_s=0.0)
        action = await _wakes(t, "python3", "-c", "print(6 * 7)", pause_s=0.0)
    p50, floor_p50 = _p50(ours), _p50(floor)
    say(f"cold: {p50:.0f} ms, bare driver {floor_p50:.0f} ms")
    worst = percentile(ours, 0.99) or 0.0
    return [
        figure("wake.cold", p50, "ms", ("at most", 1.5), of="ratio", floor=floor_p50, samples=ours),
        figure("wake.cold_p99", worst, "ms", ("at most", 1000.0), n=len(ours)),
        figure("wake.first_action", _p50(action), "ms", ("at most", 2000.0), samples=action),
    ]


async def warm(say: Say) -> Figure:
    """The same with slots ready."""
    async with _bare(WarmKit) as (kit, driver):
        floor = await _bare_wakes(kit, driver, say, SLOTS_S)
    async with _whole({}) as t:
        ours = await _wakes(t, "echo", "awake", pause_s=SLOTS_S)
    say(f"warm: {_p50(ours):.0f} ms, bare driver {_p50(floor):.0f} ms")
    return figure("wake.warm", _p50(ours), "ms", ("at most", 3.0), of="ratio", floor=_p50(floor), samples=ours)


async def _bare_wakes(kit: QemuKit, driver: QemuDriver, say: Say, pause_s: float) -> list[float]:
    spec = await _worked(kit, driver)
    parts = await driver.checkpoint(spec.vm_id, kit.new_directory())
    await driver.destroy(spec.vm_id)
    taken = []
    times = WARM_TIMES if pause_s else TIMES
    for number in range(times):
        await asyncio.sleep(pause_s)
        again = kit.spec(session_id=spec.session_id, incarnation=number + 2, machine=spec.machine)
        began_s = time.perf_counter()
        await driver.start(again, files_of(CheckpointId("ckp-bench"), parts))
        await run_program(driver, again.vm_id, "echo", "awake")
        taken.append(1000 * (time.perf_counter() - began_s))
        await driver.destroy(again.vm_id)
    say(f"bare driver, {times} times: {_p50(taken):.0f} ms")
    return taken


async def _wakes(t: Torpor, *argv: str, pause_s: float) -> list[float]:
    session = await _session(t)
    taken = []
    for _ in range(WARM_TIMES if pause_s else TIMES):
        await session.suspend()
        await asyncio.sleep(pause_s)
        taken.append(await _first_byte_ms(session, *argv))
    await session.terminate()
    return taken


# --- checkpoint -------------------------------------------------------------------------------------------------


async def pause(say: Say) -> Sequence[Figure]:
    """How long a session stands still for a checkpoint, beside a save of all of its machine's memory."""
    async with _bare(QemuKit) as (kit, driver):
        spec = await _worked(kit, driver)
        full = [await _full_save_ms(driver, spec.vm_id, kit.new_directory() / "all") for _ in range(5)]
        await driver.destroy(spec.vm_id)
    say(f"a save of all memory: {_p50(full):.0f} ms")
    async with _whole({}) as t:
        session = await _session(t)
        pauses = []
        for number in range(TIMES):
            await session.exec("sh", "-c", f"seq 1 {1000 + number} > /root/more")
            made = await session.checkpoint()
            pauses.append(made.pause_ms or 0.0)
        await session.terminate()
    p50 = _p50(pauses)
    return [
        figure("checkpoint.pause", p50, "ms", ("at most", 40.0), samples=pauses),
        figure("checkpoint.pause_to_full", p50, "ms", ("at most", 0.1), of="ratio", floor=_p50(full), n=len(pauses)),
    ]


async def rollback(say: Say) -> Figure:
    """From the command to a session that runs again, in a checkpoint of its own past."""
    async with _whole({}) as t:
        session = await _session(t)
        made = await session.checkpoint()
        taken = []
        for _ in range(TIMES):
            await session.exec("sh", "-c", "date > /root/later")
            taken.append(await _ms(lambda: session.rollback(made.checkpoint_id)))
        await session.terminate()
    say(f"rollback: {_p50(taken):.0f} ms")
    return figure("checkpoint.rollback", _p50(taken), "ms", ("at most", 400.0), samples=taken)


async def _full_save_ms(driver: QemuDriver, vm_id: VmId, into: Path) -> float:
    """Stop the machine, let QEMU write all that it is into a file, and let it run on."""
    process = driver.process_of(vm_id)
    descriptor = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    began_s = time.perf_counter()
    try:
        await process.command("stop")
        await process.command("getfd", {"fdname": "all"}, descriptor=descriptor)
        await process.command("migrate-set-parameters", {"max-bandwidth": 1 << 40})
        await process.command("migrate", {"uri": "fd:all"})
        while (await process.command("query-migrate"))["status"] != "completed":  # noqa: ASYNC110  (QEMU's own state)
            await asyncio.sleep(0.001)
        return 1000 * (time.perf_counter() - began_s)
    finally:
        await process.command("cont")
        os.close(descriptor)
        os.unlink(into)  # noqa: PTH108  (a moment)


# --- fork -------------------------------------------------------------------------------------------------------


async def five(say: Say) -> Figure:
    """From the command to the first output of all five forks of a session that runs."""
    async with _whole({}) as t:
        session = await _session(t)
        taken = []
        for _ in range(FORKS_TIMES):
            began_s = time.perf_counter()
            forks = await session.fork(FORKS)
            await asyncio.gather(*(_answered(fork) for fork in forks))
            taken.append(time.perf_counter() - began_s)
            await asyncio.gather(*(fork.terminate() for fork in forks))
        await session.terminate()
    say(f"five forks have answered after {_p50(taken):.2f} s")
    return figure("fork.five", _p50(taken), "s", ("at most", 2.0), samples=taken)


async def fifty_memory(say: Say) -> Figure:
    """The memory that each of fifty forks of one checkpoint adds to the host, once it has answered."""
    async with _bare(QemuKit) as (kit, driver):
        spec = await _worked(kit, driver)
        parts = await driver.checkpoint(spec.vm_id, kit.new_directory())
        await driver.destroy(spec.vm_id)
        forks = [kit.spec(machine=spec.machine) for _ in range(MANY)]
        each_mib = 0.0
        for number, fork in enumerate(forks, 1):
            await driver.start(fork, files_of(CheckpointId("ckp-bench"), parts))
            await run_program(driver, fork.vm_id, "echo", "here")
            if number % 10 == 0:
                each_mib = sum(_held_mib(driver.process_of(one.vm_id).pid) for one in forks[:number]) / number
                say(f"{number} forks: {each_mib:.1f} MiB each")
        await asyncio.gather(*(driver.destroy(fork.vm_id) for fork in forks))
    return figure("fork.fifty_memory", each_mib, "MiB", ("at most", 30.0), n=MANY)


async def _answered(fork: Session) -> None:
    result = await fork.exec("echo", "here")
    assert result.ok, result


def _held_mib(pid: int) -> float:
    """The memory that a process holds, MiB: its share of what it has in common with others, and its page tables."""
    kib = 0
    for file, name in (("smaps_rollup", "Pss:"), ("status", "VmPTE:")):
        for line in Path(f"/proc/{pid}/{file}").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(name):
                kib += int(line.split()[1])
    return kib / 1024


# --- the two that are compared ----------------------------------------------------------------------------------


@asynccontextmanager
async def _bare(kind: type[QemuKit]) -> AsyncIterator[tuple[QemuKit, QemuDriver]]:
    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as place:
        kit = kind(Path(place))
        driver = kit.driver()
        try:
            yield kit, driver
        finally:
            await driver.close()
            kit.clean_up()


async def _worked(kit: QemuKit, driver: QemuDriver) -> VmSpec:
    """A machine in which the same was done as in the session that is compared."""
    spec = kit.spec()
    await driver.start(spec, None)
    outcome, taken = await run_program(driver, spec.vm_id, "sh", "-c", WORK, timeout_s=60.0)
    assert outcome.exit_code == 0, taken.stderr
    return spec


@asynccontextmanager
async def _whole(env: dict[str, str]) -> AsyncIterator[Torpor]:
    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as place:
        whole = RealWhole(Path(place) / "data", env=env)
        try:
            await asyncio.to_thread(whole.until, "ready")
            async with torpor.connect(data_dir=whole.data.root) as t:
                yield t
        finally:
            await asyncio.to_thread(whole.close)


async def _session(t: Torpor) -> Session:
    session = await t.sessions.create(idle_after_s=None)
    result = await session.exec("sh", "-c", WORK)
    assert result.ok, result
    return session


async def _first_byte_ms(session: Session, *argv: str) -> float:
    began_s = time.perf_counter()
    first_s = 0.0
    running: Any = session.exec(*argv)
    async for _ in running:
        first_s = first_s or time.perf_counter()
    assert running.result.ok, running.result
    return 1000 * (first_s - began_s)


async def _ms(work: Callable[[], Awaitable[object]]) -> float:
    began_s = time.perf_counter()
    await work()
    return 1000 * (time.perf_counter() - began_s)


def _p50(samples: Sequence[float]) -> float:
    return percentile(samples, 0.5) or 0.0


BENCHES = {"wake": [cold, warm], "checkpoint": [pause, rollback], "fork": [five, fifty_memory]}

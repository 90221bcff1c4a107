"""Warm slots: as many as the policy wants and the memory allows, of what is asked for, and never more."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.drivers import eventually, files_of, run_program
from tests.support.qemu import QemuKit
from torpor_contracts.ids import CheckpointId
from torpor_contracts.session import MachineSpec
from torpor_messaging.system import SystemIds
from torpor_vm_host.adapters.qemu.confining import CLAIM, PROCESS, Confining, read_claim
from torpor_vm_host.adapters.qemu.driver import QemuDriver
from torpor_vm_host.adapters.qemu.engine import Engine
from torpor_vm_host.adapters.qemu.options import SlotPolicy
from torpor_vm_host.adapters.qemu.process import AGENT_SOCKET, ERRORS, QMP_SOCKET, QemuProcess, recorded_pid
from torpor_vm_host.adapters.qemu.records import DISK
from torpor_vm_host.adapters.qemu.slots import Slots
from torpor_vm_host.adapters.qemu.template import Template
from torpor_vm_host.adapters.qemu.waiting import Yard
from torpor_vm_host.ports import DriverError

ENGINE = Engine(binary=Path("/bin/false"), version="7.2.0", build="b", accelerator="tcg", tsc_khz=1)
BLANK_MIB = 48


class OneOfMany:
    """Stands for a template: slots compare it, and ask for the digest of its memory and the machine's size."""

    def __init__(self, digest: str) -> None:
        self.memory = self
        self.digest = digest
        self.info = self
        self.machine = MachineSpec()


def template(digest: str = "a") -> Template:
    one: Any = OneOfMany(digest)
    found: Template = one
    return found


class StillProcess(QemuProcess):
    """Stands for a QEMU: it is there until it is ended."""

    def __init__(self, directory: Path) -> None:
        self.pid = os.getpid()
        self.directory = directory
        self.ended = asyncio.Event()

    async def kill(self) -> None:
        self.ended.set()

    def let_go(self) -> None:
        return

    def how_it_ended(self) -> str:
        return "it was ended"


class Stable(Yard):
    """Where such processes are; `broken` makes every start fail."""

    def __init__(self) -> None:
        super().__init__(ENGINE, Confining(None))
        self.made: list[tuple[str, StillProcess]] = []
        self.broken = False
        self.tries = 0

    async def spawn(self, directory: Path, name: str, template: Template, *, wanted: bool) -> QemuProcess:
        assert not wanted, "a slot yields to machines"
        self.tries += 1
        if self.broken:
            raise DriverError("start-failed", "no", retryable=True)
        await self.claim(directory, name)
        for file in (DISK, QMP_SOCKET, AGENT_SOCKET, ERRORS, PROCESS):
            (directory / file).touch()
        process = StillProcess(directory)
        self.made.append((template.memory.digest, process))
        return process

    def living(self, digest: str | None = None) -> list[StillProcess]:
        return [one for of, one in self.made if one.alive and digest in {None, of}]


class Pool:
    """A pool over such a yard; blank slots only, as warm ones need a guest."""

    def __init__(self, root: Path, *, available_mib: int = 10_000, **policy: Any) -> None:
        self.yard = Stable()
        self.root = root
        self.available_mib = available_mib
        self.looked = 0
        wanted = SlotPolicy(**{"warm": 0, "blank": 2, "memory_mib_max": 1000, "blank_mib": BLANK_MIB, **policy})
        ids = SystemIds()
        self.slots = Slots(
            self.yard,
            root / "slots",
            wanted,
            new_name=lambda: ids.new("slot"),
            wall_ns=lambda: 0,
            available_mib=self._look,
        )

    def _look(self) -> int:
        self.looked += 1
        return self.available_mib

    async def has(self, count: int, digest: str | None = None) -> None:
        async def holds() -> bool:
            return len(self.yard.living(digest)) == count == (self.slots.count("blank") if digest is None else count)

        await eventually(holds)

    async def settled(self) -> None:
        """Until the keeper has nothing left to do, however often it is woken."""
        for _ in range(50):
            await asyncio.sleep(0)
            await asyncio.to_thread(lambda: None)

    async def take(self, digest: str = "a", *, of: Template | None = None) -> StillProcess | None:
        directory = self.root / SystemIds().new("vm")
        directory.mkdir()
        taken = await self.slots.take(of or template(digest), "blank", directory, directory.name)
        if taken is None:
            return None
        process = taken[0]
        assert isinstance(process, StillProcess)
        return process


def within(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


def test_a_pool_has_what_the_policy_wants_once_somebody_has_asked(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = Pool(tmp_path)
        await pool.settled()
        assert pool.yard.tries == 0
        pool.slots.want(template())
        await pool.has(2)
        pool.slots.want(template())
        await pool.settled()
        assert pool.yard.tries == 2
        await pool.slots.stop()
        assert pool.yard.living() == []
        assert not list((tmp_path / "slots").iterdir())

    within(scenario)


def test_a_taken_slot_is_the_machines_and_another_takes_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool, one = Pool(tmp_path), template()
        pool.slots.want(one)
        await pool.has(2)
        process = await pool.take(of=one)
        assert process is not None
        claim = read_claim(process.directory)
        assert claim is not None
        assert process.directory.parent == tmp_path
        assert (process.directory / PROCESS).exists()
        assert len(list((tmp_path / "slots").glob(f"*/{CLAIM}"))) <= 2
        await eventually_count(pool, 2)
        await pool.slots.stop()
        assert process.alive, "a machine outlives the pool it came from"

    within(scenario)


async def eventually_count(pool: Pool, count: int) -> None:
    async def holds() -> bool:
        return pool.slots.count("blank") == count

    await eventually(holds)


def test_an_empty_pool_gives_none_and_takes_no_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool, one = Pool(tmp_path, blank=1), template()
        assert await pool.take(of=one) is None
        pool.slots.want(one)
        await pool.has(1)
        taken = [process for process in await asyncio.gather(*(pool.take(of=one) for _ in range(5))) if process]
        assert len({id(process) for process in taken}) == len(taken) >= 1
        assert len(taken) < 5
        await pool.slots.stop()

    within(scenario)


def test_a_slot_of_another_template_is_not_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = Pool(tmp_path)
        pool.slots.want(template("a"))
        await pool.has(2)
        assert await pool.take(of=template("b")) is None
        await pool.slots.stop()

    within(scenario)


def test_memory_bounds_all_slots_together_and_the_latest_wish_comes_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = Pool(tmp_path, memory_mib_max=3 * BLANK_MIB + 1)
        pool.slots.want(template("a"))
        pool.slots.want(template("b"))
        await pool.has(3)
        await pool.settled()
        assert (len(pool.yard.living("b")), len(pool.yard.living("a"))) == (2, 1)
        assert pool.yard.tries == 3
        await pool.slots.stop()

    within(scenario)


def test_no_memory_no_slots(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = Pool(tmp_path, memory_mib_max=BLANK_MIB - 1)
        pool.slots.want(template())
        await pool.settled()
        assert pool.yard.tries == 0
        await pool.slots.stop()

    within(scenario)


def test_a_host_short_of_memory_gets_no_slots_and_is_not_kept_busy(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = Pool(tmp_path, available_mib=500)
        for _ in range(100):
            pool.slots.want(template())
            await pool.settled()
        assert (pool.looked, pool.yard.tries) == (1, 0)
        await pool.slots.stop()

    within(scenario)


def test_a_pool_that_cannot_be_filled_does_not_churn(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = Pool(tmp_path)
        pool.yard.broken = True
        for _ in range(100):
            pool.slots.want(template())
            assert await pool.take() is None
            await pool.settled()
        assert pool.yard.tries == 1
        assert not list((tmp_path / "slots").iterdir())
        await pool.slots.stop()

    within(scenario)


def test_slots_that_die_are_not_made_again_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool, one = Pool(tmp_path, blank=1), template()
        pool.slots.want(one)
        await pool.has(1)
        for _ in range(20):
            for process in pool.yard.living():
                process.ended.set()
            assert await pool.take(of=one) is None
            pool.slots.want(one)
            await pool.settled()
        assert pool.yard.tries <= 2
        await pool.slots.stop()

    within(scenario)


def test_slots_nobody_asks_for_any_more_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = Pool(tmp_path, idle_s=0.3)
        pool.slots.want(template())
        await pool.has(2)
        await pool.has(0)
        pool.slots.want(template())
        await pool.has(2)
        await pool.slots.stop()

    within(scenario)


def test_what_an_earlier_process_left_is_cleared(tmp_path: Path) -> None:
    async def scenario() -> None:
        left = tmp_path / "slots" / "slot-old"
        left.mkdir(parents=True)
        Confining(None).claim(left, "slot-old", ())
        (tmp_path / "slots" / "slot-half").mkdir()
        pool = Pool(tmp_path)
        await pool.slots.clear_leftovers()
        assert not list((tmp_path / "slots").iterdir())

    within(scenario)


# --- real machines ---


class SlottedKit(QemuKit):
    """Real machines, with one slot of each kind."""

    policy = SlotPolicy(warm=1, blank=1)


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[SlottedKit]:
    made = SlottedKit(tmp_path / "host")
    yield made
    made.clean_up()


async def filled(kit: SlottedKit, driver: QemuDriver) -> dict[int, str]:
    """Wait until both slots are there; process -> name."""

    async def holds() -> bool:
        return driver.free_slots("warm") == driver.free_slots("blank") == 1

    await eventually(holds)
    found = {recorded_pid(path.parent): path.parent.name for path in (kit.root / "slots").glob(f"*/{CLAIM}")}
    return {pid: name for pid, name in found.items() if pid is not None}


def test_real_machines_come_from_slots_and_are_nobody_else(kit: SlottedKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        await driver.prepare(kit.machine)
        slots = await filled(kit, driver)
        spec = kit.spec()
        await driver.start(spec, None)
        assert recorded_pid(spec.directory) in slots, "a machine was made though one waited"
        _, taking = await run_program(driver, spec.vm_id, "sh", "-c", "hostname; echo $TORPOR_SESSION_ID")
        assert taking.stdout.decode().split() == [spec.session_id, spec.session_id]
        claim = read_claim(spec.directory)
        assert claim is not None
        assert all(group.name == spec.vm_id for group in claim.directories)
        for group in claim.directories:
            assert str(recorded_pid(spec.directory)) in (group / "cgroup.procs").read_text().split()
        await run_program(driver, spec.vm_id, *kit.counting().argv)
        parts = await driver.checkpoint(spec.vm_id, kit.new_directory())
        await driver.destroy(spec.vm_id)
        assert await driver.remaining(driver.resources(spec)) == []
        slots = await filled(kit, driver)
        again = kit.spec(session_id=spec.session_id, incarnation=2)
        await driver.start(again, files_of(CheckpointId("ckp-1"), parts))
        assert recorded_pid(again.directory) in slots
        _, taking = await run_program(driver, again.vm_id, *kit.counting().argv)
        assert taking.stdout == b"2\n"
        slots = await filled(kit, driver)
        other = kit.driver()  # as after a kill: the slots of before are nobody's, the machine is adopted
        await other.start(kit.spec(), None)
        assert all(recorded_pid(kit.root / "slots" / name) is None for name in slots.values())
        _, taking = await run_program(other, again.vm_id, *kit.counting().argv)
        assert taking.stdout == b"3\n"
        for vm in await other.machines():
            await other.destroy(vm.vm_id)
        await other.close()
        assert not list((kit.root / "slots").iterdir())

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())

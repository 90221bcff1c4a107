"""What every driver promises of machines and checkpoints: this is what entitles the simulation to be believed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.driver_kits import DRIVER_KITS, using
from tests.support.drivers import (
    DriverKit,
    Taking,
    bounded,
    code_of,
    eventually,
    files_of,
    present,
    restored,
    run_program,
    started,
)
from torpor_contracts.ids import CheckpointId, ExecId, VmId
from torpor_contracts.session import ExecSpec, MachineSpec
from torpor_vm_host.ports import VM_GONE, Driver, DriverError

X = ExecId("x-1")


@pytest.fixture(params=sorted(DRIVER_KITS))
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DriverKit]:
    yield from using(request, tmp_path)


async def state_of(driver: Driver, vm_id: VmId) -> str | None:
    vm = await present(driver, vm_id)
    return None if vm is None else vm.state


def test_a_started_machine_is_listed_for_what_it_was_started(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        vm = await present(driver, spec.vm_id)
        assert vm is not None
        assert (vm.session_id, vm.incarnation, vm.state) == (spec.session_id, 1, "running")
        assert await code_of(driver.start(spec, None)) == "vm-exists"
        await driver.destroy(spec.vm_id)

    bounded(scenario)


def test_a_host_offers_something_and_says_what_it_can_load(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        capacity = await driver.capacity()
        assert min(capacity.vcpus, capacity.memory_mib, capacity.disk_mib, capacity.vms_max) >= 1
        assert await driver.fingerprint()
        assert await driver.fingerprint() == await kit.driver().fingerprint()

    bounded(scenario)


def test_memory_and_files_go_on_across_checkpoint_and_restore(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        counting = kit.counting()
        for number in (1, 2):
            _, taking = await run_program(driver, spec.vm_id, *counting.argv)
            assert taking.stdout == b"%d\n" % number
        await run_program(driver, spec.vm_id, "sh", "-c", "echo kept > /root/file")
        for cycle in range(3, 8):
            spec = await restored(kit, driver, spec, incarnation=cycle)
            _, taking = await run_program(driver, spec.vm_id, *counting.argv)
            assert taking.stdout == b"%d\n" % cycle
            _, taking = await run_program(driver, spec.vm_id, "cat", "/root/file")
            assert taking.stdout == b"kept\n"
            _, taking = await run_program(driver, spec.vm_id, "sh", "-c", "env > /tmp/e; cat /tmp/e")
            assert f"TORPOR_INCARNATION={cycle}\n".encode() in taking.stdout
        await driver.destroy(spec.vm_id)

    bounded(scenario)


def test_one_checkpoint_can_be_started_from_again_and_again(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        await run_program(driver, spec.vm_id, *kit.counting().argv)
        parts = await driver.checkpoint(spec.vm_id, kit.new_directory())
        await driver.destroy(spec.vm_id)
        for _ in range(3):
            again = kit.spec(machine=spec.machine)
            await driver.start(again, files_of(CheckpointId("ckp-1"), parts))
            _, taking = await run_program(driver, again.vm_id, *kit.counting().argv)
            assert taking.stdout == b"2\n"
            await driver.destroy(again.vm_id)

    bounded(scenario)


def test_a_checkpointed_machine_stands_still_until_it_is_resumed(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        await driver.checkpoint(spec.vm_id, kit.new_directory())
        assert await state_of(driver, spec.vm_id) == "paused"
        await driver.resume(spec.vm_id)
        await driver.resume(spec.vm_id)
        assert await state_of(driver, spec.vm_id) == "running"
        outcome, _ = await run_program(driver, spec.vm_id, "true")
        assert outcome.exit_code == 0
        await driver.destroy(spec.vm_id)

    bounded(scenario)


def test_a_paused_machine_gives_the_same_checkpoint_again(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        await run_program(driver, spec.vm_id, *kit.counting().argv)
        await driver.checkpoint(spec.vm_id, kit.new_directory())
        parts = await kit.driver().checkpoint(spec.vm_id, kit.new_directory())
        await driver.destroy(spec.vm_id)
        again = kit.spec(machine=spec.machine)
        await driver.start(again, files_of(CheckpointId("ckp-1"), parts))
        _, taking = await run_program(driver, again.vm_id, *kit.counting().argv)
        assert taking.stdout == b"2\n"
        await driver.destroy(again.vm_id)

    bounded(scenario)


def test_after_a_failed_checkpoint_the_machine_runs_on(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        await run_program(driver, spec.vm_id, *kit.counting().argv)
        spoiled = kit.new_directory()
        kit.spoil_next_checkpoint(spoiled)
        with pytest.raises(DriverError):
            await driver.checkpoint(spec.vm_id, spoiled)
        await driver.resume(spec.vm_id)
        _, taking = await run_program(driver, spec.vm_id, *kit.counting().argv)
        assert taking.stdout == b"2\n"
        assert await driver.checkpoint(spec.vm_id, kit.new_directory())
        await driver.destroy(spec.vm_id)

    bounded(scenario)


@pytest.mark.parametrize("spoil", ["memory", "devices", "disk"])
@pytest.mark.parametrize("how", ["emptied", "cut", "missing"])
def test_a_checkpoint_that_is_not_whole_is_refused_and_leaves_nothing(kit: DriverKit, spoil: str, how: str) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        parts = await driver.checkpoint(spec.vm_id, kit.new_directory())
        await driver.resume(spec.vm_id)
        (part,) = [part for part in parts if part.kind == spoil]
        content = part.path.read_bytes()
        part.path.write_bytes(b"" if how == "emptied" else content[: len(content) // 2])
        kept = [one for one in parts if how != "missing" or one.kind != spoil]
        again = kit.spec(machine=spec.machine)
        code = await code_of(driver.start(again, files_of(CheckpointId("ckp-1"), kept)))
        assert code in {"checkpoint-corrupt", "checkpoint-mismatched"}
        await driver.destroy(again.vm_id)
        assert await driver.remaining(driver.resources(again)) == []
        outcome, _ = await run_program(driver, spec.vm_id, "true")
        assert outcome.exit_code == 0
        await driver.destroy(spec.vm_id)

    bounded(scenario)


def test_parts_of_different_generations_are_refused(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        old = {part.kind: part for part in await driver.checkpoint(spec.vm_id, kit.new_directory())}
        await driver.resume(spec.vm_id)
        await run_program(driver, spec.vm_id, "sh", "-c", "echo newer > /root/file; sync")
        new = {part.kind: part for part in await driver.checkpoint(spec.vm_id, kit.new_directory())}
        mixed = [new["memory"], new["devices"], old["disk"]]
        again = kit.spec(machine=spec.machine)
        code = await code_of(driver.start(again, files_of(CheckpointId("ckp-1"), mixed)))
        assert code == "checkpoint-mismatched"
        await driver.destroy(again.vm_id)
        await driver.destroy(spec.vm_id)

    bounded(scenario)


def test_a_machine_of_another_size_is_not_restored(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        parts = await driver.checkpoint(spec.vm_id, kit.new_directory())
        larger = MachineSpec(memory_mib=2 * spec.machine.memory_mib)
        again = kit.spec(machine=larger)
        code = await code_of(driver.start(again, files_of(CheckpointId("ckp-1"), parts)))
        assert code == "checkpoint-mismatched"
        await driver.destroy(again.vm_id)
        await driver.destroy(spec.vm_id)

    bounded(scenario)


def test_an_unknown_image_is_refused(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = kit.spec(machine=MachineSpec(image="no-such-image"))
        assert await code_of(driver.start(spec, None)) == "image-unknown"
        await driver.destroy(spec.vm_id)

    bounded(scenario)


def test_destroy_leaves_nothing_and_may_be_repeated(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        held = driver.resources(spec)
        assert held
        assert await driver.remaining(held)
        following = asyncio.ensure_future(driver.exec(spec.vm_id, X, ExecSpec(argv=["sleep", "60"]), Taking()))

        async def is_there() -> bool:
            return bool(await driver.execs(spec.vm_id))

        await eventually(is_there)
        await driver.destroy(spec.vm_id)
        assert await code_of(following) == VM_GONE
        await driver.destroy(spec.vm_id)
        await driver.destroy(VmId("vm-never-was"))
        assert await driver.remaining(held) == []
        assert await present(driver, spec.vm_id) is None
        assert await code_of(driver.execs(spec.vm_id)) == VM_GONE

    bounded(scenario)


def test_a_frozen_machine_runs_nothing(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        following = asyncio.ensure_future(driver.exec(spec.vm_id, X, ExecSpec(argv=["sleep", "0.2"]), Taking()))

        async def is_there() -> bool:
            return bool(await driver.execs(spec.vm_id))

        await eventually(is_there)
        await driver.freeze(spec.vm_id)
        await driver.freeze(spec.vm_id)
        assert await state_of(driver, spec.vm_id) == "paused"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(following, 0.5)
        await driver.destroy(spec.vm_id)

    bounded(scenario)

"""What every driver promises of checkpoints of machines that run on: all of one moment, and nobody is held up long."""

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
    run_program,
    started,
)
from torpor_contracts.ids import CheckpointId, ExecId, VmId
from torpor_contracts.session import ExecSpec
from torpor_vm_host.ports import VM_GONE, Driver, DriverError, Output, PartFile, VmSpec

X = ExecId("x-1")
CKP = CheckpointId("ckp-1")


@pytest.fixture(params=sorted(DRIVER_KITS))
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DriverKit]:
    yield from using(request, tmp_path)


async def nothing() -> None:
    """Do nothing at the pause."""


async def count(kit: DriverKit, driver: Driver, vm_id: VmId) -> bytes:
    return (await run_program(driver, vm_id, *kit.counting().argv))[1].stdout


async def taken(kit: DriverKit, driver: Driver, vm_id: VmId) -> list[PartFile]:
    return (await driver.checkpoint_live(vm_id, kit.new_directory(), nothing)).parts


async def forked(kit: DriverKit, driver: Driver, spec: VmSpec, parts: list[PartFile]) -> VmId:
    fork = kit.spec(machine=spec.machine)
    await driver.start(fork, files_of(CKP, parts))
    return fork.vm_id


def test_the_machine_runs_on_and_the_checkpoint_is_of_the_moment(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        assert await count(kit, driver, spec.vm_id) == b"1\n"
        await run_program(driver, spec.vm_id, "sh", "-c", "echo then > /root/file; sync")
        paused: list[str] = []

        async def at_pause() -> None:
            vm = await present(driver, spec.vm_id)
            paused.append("gone" if vm is None else vm.state)

        live = await driver.checkpoint_live(spec.vm_id, kit.new_directory(), at_pause)
        assert paused == ["paused"]
        assert live.pause_ms >= 0
        vm = await present(driver, spec.vm_id)
        assert vm is not None
        assert vm.state == "running"
        assert await count(kit, driver, spec.vm_id) == b"2\n"
        await run_program(driver, spec.vm_id, "sh", "-c", "echo now > /root/file; sync")
        fork = await forked(kit, driver, spec, live.parts)
        assert (await run_program(driver, fork, "cat", "/root/file"))[1].stdout == b"then\n"
        assert await count(kit, driver, fork) == b"2\n"
        assert await count(kit, driver, spec.vm_id) == b"3\n"
        assert (await run_program(driver, spec.vm_id, "cat", "/root/file"))[1].stdout == b"now\n"
        for vm_id in (spec.vm_id, fork):
            await driver.destroy(vm_id)

    bounded(scenario)


def test_checkpoints_of_one_machine_are_each_of_their_moment(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        kept = []
        for number in range(1, 4):
            assert await count(kit, driver, spec.vm_id) == b"%d\n" % number
            kept.append(await taken(kit, driver, spec.vm_id))
        await driver.destroy(spec.vm_id)
        for number, parts in enumerate(kept, start=2):
            fork = await forked(kit, driver, spec, parts)
            assert await count(kit, driver, fork) == b"%d\n" % number
            await driver.destroy(fork)

    bounded(scenario)


def test_forks_do_not_touch_each_other_nor_what_they_came_from(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        await count(kit, driver, spec.vm_id)
        parts = await taken(kit, driver, spec.vm_id)
        forks = [await forked(kit, driver, spec, parts) for _ in range(3)]
        for number, fork in enumerate(forks):
            await run_program(driver, fork, "sh", "-c", f"echo {number} > /root/own; sync")
            for expected in range(2, 3 + number):
                assert await count(kit, driver, fork) == b"%d\n" % expected
        for number, fork in enumerate(forks):
            assert (await run_program(driver, fork, "cat", "/root/own"))[1].stdout == b"%d\n" % number
        assert (await run_program(driver, spec.vm_id, "cat", "/root/own"))[0].exit_code == 1
        assert await count(kit, driver, spec.vm_id) == b"2\n"
        for vm_id in (spec.vm_id, *forks):
            await driver.destroy(vm_id)

    bounded(scenario)


def test_a_program_goes_on_in_the_machine_and_in_its_fork(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        taking = Taking()
        program = ExecSpec(argv=["sh", "-c", "echo before; sleep 0.8; echo after; exit 5"])
        following = asyncio.ensure_future(driver.exec(spec.vm_id, X, program, taking))

        async def has_begun() -> bool:
            return taking.stdout == b"before\n"

        await eventually(has_begun)
        parts = await taken(kit, driver, spec.vm_id)
        outcome = await following
        assert (outcome.exit_code, taking.stdout) == (5, b"before\nafter\n")
        fork = await forked(kit, driver, spec, parts)
        outputs: list[Output] = []

        async def take(output: Output) -> None:
            outputs.append(output)

        outcome = await driver.attach(fork, X, take)
        assert outcome.exit_code == 5
        for output in outputs:
            assert taking.stdout[output.offset :].startswith(output.data)
        assert b"".join(output.data for output in outputs).endswith(b"after\n")
        for vm_id in (spec.vm_id, fork):
            await driver.destroy(vm_id)

    bounded(scenario)


@pytest.mark.parametrize("how", ["no directory", "the pause fails"])
def test_after_a_failed_one_the_machine_runs_on(kit: DriverKit, how: str) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        await count(kit, driver, spec.vm_id)
        directory = kit.new_directory()

        async def at_pause() -> None:
            if how == "the pause fails":
                raise DriverError("no-luck", "nobody could say how far the log is", retryable=True)

        if how == "no directory":
            kit.spoil_next_checkpoint(directory)
        with pytest.raises(DriverError):
            await driver.checkpoint_live(spec.vm_id, directory, at_pause)
        await driver.resume(spec.vm_id)
        assert await count(kit, driver, spec.vm_id) == b"2\n"
        fork = await forked(kit, driver, spec, await taken(kit, driver, spec.vm_id))
        assert await count(kit, driver, fork) == b"3\n"
        for vm_id in (spec.vm_id, fork):
            await driver.destroy(vm_id)

    bounded(scenario)


def test_one_that_stands_still_has_nothing_to_capture(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        await driver.freeze(spec.vm_id)
        assert await code_of(driver.checkpoint_live(spec.vm_id, kit.new_directory(), nothing)) == "vm-not-running"
        await driver.resume(spec.vm_id)
        assert await taken(kit, driver, spec.vm_id)
        await driver.destroy(spec.vm_id)
        assert await code_of(driver.checkpoint_live(spec.vm_id, kit.new_directory(), nothing)) == VM_GONE

    bounded(scenario)

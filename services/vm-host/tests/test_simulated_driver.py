"""What is special to the simulated driver: a machine is its file, and a cancelled or failed write never tears it."""

import asyncio
from pathlib import Path

import pytest

from tests.support.drivers import DirectoryKit, Taking, run_program
from torpor_contracts.ids import ExecId
from torpor_contracts.session import ExecSpec
from torpor_vm_host.ports import VM_GONE, DriverError


def test_removing_the_file_ends_the_machine(tmp_path: Path) -> None:
    async def scenario() -> None:
        kit = DirectoryKit(tmp_path)
        driver = kit.driver()
        spec = kit.spec()
        await driver.start(spec, None)
        following = asyncio.ensure_future(
            driver.exec(spec.vm_id, ExecId("x-1"), ExecSpec(argv=["sleep", "60"]), Taking())
        )
        while not await driver.execs(spec.vm_id):  # noqa: ASYNC110  (a guest sets no event)
            await asyncio.sleep(0)
        (tmp_path / "machines" / f"{spec.vm_id}.json").unlink()
        assert await driver.machines() == []
        with pytest.raises(DriverError) as gone:
            await following
        assert gone.value.code == VM_GONE

    asyncio.run(scenario())


def test_a_file_that_is_no_machine_is_a_dead_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        kit = DirectoryKit(tmp_path)
        driver = kit.driver()
        spec = kit.spec()
        await driver.start(spec, None)
        (tmp_path / "machines" / f"{spec.vm_id}.json").write_text("{}")
        (found,) = await kit.driver().machines()
        assert (found.state, found.session_id) == ("dead", None)
        assert found.detail
        with pytest.raises(DriverError, match="vm-unreadable"):
            await kit.driver().adopt(spec.vm_id)
        await kit.driver().destroy(spec.vm_id)
        assert await kit.driver().machines() == []

    asyncio.run(scenario())


def test_a_call_cancelled_while_it_writes_leaves_a_whole_machine(tmp_path: Path) -> None:
    async def scenario() -> None:
        kit = DirectoryKit(tmp_path)
        driver = kit.driver()
        spec = kit.spec()
        await driver.start(spec, None)
        for number in range(30):
            program = ExecSpec(argv=["count"])
            running = asyncio.ensure_future(driver.exec(spec.vm_id, ExecId(f"x-{number}"), program, Taking()))
            for _ in range(number):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        begun = await driver.execs(spec.vm_id)
        _, taking = await run_program(driver, spec.vm_id, "count")
        assert int(taking.stdout) == len(begun) + 1
        assert [path.suffix for path in (tmp_path / "machines").iterdir()] == [".json"]

    asyncio.run(scenario())


def test_a_disk_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "machines").write_bytes(b"in the way")
        kit = DirectoryKit(tmp_path)
        with pytest.raises(DriverError) as failed:
            await kit.driver().start(kit.spec(), None)
        assert failed.value.retryable

    asyncio.run(scenario())

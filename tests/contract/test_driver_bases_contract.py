"""What every driver promises of what its checkpoints build on: another host can have it, and then load them."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.driver_kits import DRIVER_KITS, using
from tests.support.drivers import DriverKit, bounded, code_of, files_of, run_program, started
from torpor_contracts.ids import CheckpointId, VmId
from torpor_vm_host.ports import Base, CheckpointFiles, Driver

CKP = CheckpointId("ckp-1")


@pytest.fixture(params=sorted(DRIVER_KITS))
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DriverKit]:
    yield from using(request, tmp_path)


@pytest.fixture
def other(kit: DriverKit) -> Iterator[DriverKit]:
    elsewhere = kit.elsewhere()
    yield elsewhere
    elsewhere.clean_up()


async def count(kit: DriverKit, driver: Driver, vm_id: VmId) -> bytes:
    return (await run_program(driver, vm_id, *kit.counting().argv))[1].stdout


async def checkpointed(kit: DriverKit, driver: Driver) -> tuple[CheckpointFiles, Base]:
    """A checkpoint of a machine that has counted to one, and what it builds on."""
    spec = await started(kit, driver)
    assert await count(kit, driver, spec.vm_id) == b"1\n"
    base = await driver.base_of(spec.vm_id)
    assert base is not None
    files = files_of(CKP, await driver.checkpoint(spec.vm_id, kit.new_directory()))
    await driver.destroy(spec.vm_id)
    return files, base


def copied(kit: DriverKit, base: Base, damaged: str = "") -> Path:
    """The files of a base in a directory of their own, one of them with a byte that was flipped."""
    directory = kit.new_directory()
    for name, path in base.files.items():
        if name != damaged:
            os.link(path, directory / name)
            continue
        shutil.copyfile(path, directory / name)
        with (directory / name).open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            (byte,) = file.read(1)
            file.seek(path.stat().st_size // 2)
            file.write(bytes([byte ^ 1]))
    return directory


def test_a_host_says_what_its_checkpoints_build_on(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        files, base = await checkpointed(kit, driver)
        assert len(bytes.fromhex(base.name)) == 32
        assert all(path.is_file() for path in base.files.values())
        assert base in await driver.bases()
        assert await driver.lacking(files) is None

    bounded(scenario)


def test_a_checkpoint_goes_on_where_what_it_builds_on_was_received(kit: DriverKit, other: DriverKit) -> None:
    async def scenario() -> None:
        files, base = await checkpointed(kit, kit.driver())
        there = other.driver()
        spec = other.spec(machine=kit.machine)
        assert await there.lacking(files) == base.name
        assert await code_of(there.start(spec, files)) == "template-missing"
        await there.destroy(spec.vm_id)
        assert await there.remaining(there.resources(spec)) == []
        for _ in range(2):
            await there.receive(base.name, copied(other, base))
            assert await there.lacking(files) is None
        again = other.driver()
        assert await again.lacking(files) is None, "it outlives the driver object"
        spec = other.spec(machine=kit.machine)
        await again.start(spec, files)
        assert await count(other, again, spec.vm_id) == b"2\n"
        assert await again.base_of(spec.vm_id) is not None
        onward = files_of(CKP, await again.checkpoint(spec.vm_id, other.new_directory()))
        await again.destroy(spec.vm_id)
        back = kit.driver()
        assert await back.lacking(onward) is None, "its checkpoints build on the same"
        spec = kit.spec()
        await back.start(spec, onward)
        assert await count(kit, back, spec.vm_id) == b"3\n"
        await back.destroy(spec.vm_id)

    bounded(scenario)


def test_what_is_not_what_the_checkpoint_builds_on_is_refused_and_not_kept(kit: DriverKit, other: DriverKit) -> None:
    async def scenario() -> None:
        files, base = await checkpointed(kit, kit.driver())
        there = other.driver()
        smallest = min(base.files, key=lambda name: base.files[name].stat().st_size)
        for name in {smallest, "memory"} & base.files.keys():
            assert await code_of(there.receive(base.name, copied(other, base, name))) == "template-corrupt", name
            assert await there.lacking(files) == base.name
        assert await code_of(there.receive(base.name, other.new_directory())) == "template-corrupt"
        assert await code_of(there.receive("0" * 64, copied(other, base))) == "template-corrupt"
        assert await there.lacking(files) == base.name
        await there.receive(base.name, copied(other, base))
        assert await there.lacking(files) is None

    bounded(scenario)


def test_a_checkpoint_that_cannot_be_read_lacks_nothing(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        broken = kit.new_directory() / "broken"
        broken.write_bytes(b"no part of anything")
        files = CheckpointFiles(checkpoint_id=CKP, files={"memory": broken, "devices": broken, "disk": broken})
        assert await driver.lacking(files) is None
        assert await driver.lacking(CheckpointFiles(checkpoint_id=CKP, files={})) is None

    bounded(scenario)

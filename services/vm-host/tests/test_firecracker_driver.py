"""What the Firecracker driver tells Firecracker and its jailer, and what it makes of their ends and refusals."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.drivers import (
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
from tests.support.firecracker_kits import (
    FirecrackerServerFilesKit,
    FirecrackerServerKit,
    OldFirecrackerServerKit,
    OneImage,
    server_kits,
)
from torpor_contracts.ids import CheckpointId, ExecId, VmId
from torpor_contracts.session import ExecSpec, MachineSpec
from torpor_vm_host.adapters.firecracker import paging
from torpor_vm_host.adapters.firecracker.configuring import Limits
from torpor_vm_host.adapters.firecracker.driver import FirecrackerDriver
from torpor_vm_host.adapters.firecracker.process import Recorded
from torpor_vm_host.adapters.firecracker.template import Workshop
from torpor_vm_host.images.builder import Image, ImageLibrary
from torpor_vm_host.ports import VM_GONE, Driver, DriverError

pytestmark = pytest.mark.skipif(not server_kits(), reason="needs root, namespaces and userfaultfd")
X = ExecId("x-1")


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[FirecrackerServerKit]:
    made = FirecrackerServerKit(tmp_path)
    yield made
    made.clean_up()


@pytest.fixture
def files_kit(tmp_path: Path) -> Iterator[FirecrackerServerFilesKit]:
    made = FirecrackerServerFilesKit(tmp_path)
    yield made
    made.clean_up()


@pytest.fixture
def old_kit(tmp_path: Path) -> Iterator[OldFirecrackerServerKit]:
    made = OldFirecrackerServerKit(tmp_path)
    yield made
    made.clean_up()


def words(told: list[dict[str, Any]]) -> list[str]:
    return [f"{entry['method']} {entry['path']} {entry['status']}" for entry in told]


async def nothing() -> None:
    """Do nothing at the pause."""


async def count(kit: FirecrackerServerKit, driver: Driver, vm_id: VmId) -> bytes:
    _, taking = await run_program(driver, vm_id, *kit.counting().argv)
    return taking.stdout


async def template_id(driver: Driver, machine: MachineSpec) -> str:
    assert isinstance(driver, FirecrackerDriver)
    return f"template-{(await driver.prepare(machine)).info.key[:12]}"


def test_a_template_is_booted_and_snapshot_whole(kit: FirecrackerServerKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        told = kit.told(await template_id(driver, kit.machine))
        assert words(told) == [
            "PUT /logger 204",
            "PUT /metrics 204",
            "PUT /machine-config 204",
            "PUT /boot-source 204",
            "PUT /drives/root 204",
            "PUT /vsock 204",
            "PUT /entropy 204",
            "PUT /actions 204",
            "PATCH /vm 204",
            "PUT /snapshot/create 204",
        ]
        bodies = {entry["path"]: entry["body"] for entry in told}
        assert bodies["/machine-config"]["mem_size_mib"] == kit.machine.memory_mib
        assert bodies["/drives/root"]["rate_limiter"]["bandwidth"]["size"] > 0
        assert bodies["/snapshot/create"]["snapshot_type"] == "Full"

    bounded(scenario)


def test_a_machine_is_jailed_with_limits_as_a_user_of_its_own(kit: FirecrackerServerKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        first, second = await started(kit, driver), await started(kit, driver)
        options = kit.jailed(first.vm_id)
        assert options["uid"] == options["gid"] != kit.jailed(second.vm_id)["uid"]
        assert options["uid"] >= 300_000
        assert options["new_pid_ns"]
        assert options["cgroup_version"] == "2"
        assert f"memory.max={(kit.machine.memory_mib + 96) * 2**20}" in options["cgroup"]
        assert {"cpu.max=100000 100000", "pids.max=17"} < set(options["cgroup"])
        assert any(limit.startswith("fsize=") for limit in options["resource_limit"])
        for spec in (first, second):
            await driver.destroy(spec.vm_id)

    bounded(scenario)


def test_a_checkpoint_is_loaded_page_by_page_from_a_handler(kit: FirecrackerServerKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        (load,) = [entry["body"] for entry in kit.told(spec.vm_id) if entry["path"] == "/snapshot/load"]
        assert load["mem_backend"] == {"backend_type": "File", "backend_path": "memory"}
        await count(kit, driver, spec.vm_id)
        again = await restored(kit, driver, spec)
        assert words(kit.told(again.vm_id)) == [
            "PUT /logger 204",
            "PUT /metrics 204",
            "PUT /snapshot/load 204",
            "PATCH /drives/root 204",
            "PATCH /vm 204",
        ]
        (load,) = [entry["body"] for entry in kit.told(again.vm_id) if entry["path"] == "/snapshot/load"]
        assert load == {
            "snapshot_path": "state",
            "mem_backend": {"backend_type": "Uffd", "backend_path": "faults.sock"},
            "resume_vm": False,
            "track_dirty_pages": True,
            "vsock_override": {"uds_path": "v.sock"},
            "clock_realtime": True,
        }
        assert await count(kit, driver, again.vm_id) == b"2\n"
        await driver.destroy(again.vm_id)

    bounded(scenario)


def test_a_checkpoint_is_loaded_from_a_file_where_that_is_wanted(files_kit: FirecrackerServerFilesKit) -> None:
    async def scenario() -> None:
        kit, driver = files_kit, files_kit.driver()
        spec = await started(kit, driver)
        await count(kit, driver, spec.vm_id)
        again = await restored(kit, driver, spec)
        (load,) = [entry["body"] for entry in kit.told(again.vm_id) if entry["path"] == "/snapshot/load"]
        assert load["mem_backend"] == {"backend_type": "File", "backend_path": "memory"}
        assert await count(kit, driver, again.vm_id) == b"2\n"
        again = await restored(kit, driver, again)
        assert await count(kit, driver, again.vm_id) == b"3\n"
        await driver.destroy(again.vm_id)

    bounded(scenario)


def test_an_old_release_is_told_only_what_it_knows(old_kit: OldFirecrackerServerKit) -> None:
    async def scenario() -> None:
        kit, driver = old_kit, old_kit.driver()
        spec = await started(kit, driver)
        await count(kit, driver, spec.vm_id)
        again = await restored(kit, driver, spec)
        (load,) = [entry["body"] for entry in kit.told(again.vm_id) if entry["path"] == "/snapshot/load"]
        assert load["enable_diff_snapshots"] is True
        assert not {"track_dirty_pages", "vsock_override", "clock_realtime"} & load.keys()
        assert await count(kit, driver, again.vm_id) == b"2\n"
        await driver.destroy(again.vm_id)

    bounded(scenario)


def test_a_checkpoint_of_another_release_is_refused(
    kit: FirecrackerServerKit, old_kit: OldFirecrackerServerKit
) -> None:
    async def scenario() -> None:
        old, driver = old_kit.driver(), kit.driver()
        spec = await started(old_kit, old)
        parts = await old.checkpoint(spec.vm_id, old_kit.new_directory())
        await old.destroy(spec.vm_id)
        again = kit.spec()
        code = await code_of(driver.start(again, files_of(CheckpointId("ckp-1"), parts)))
        assert code == "checkpoint-mismatched"
        assert kit.told(again.vm_id) == []

    bounded(scenario)


def test_a_handler_that_dies_ends_its_machine_at_once(kit: FirecrackerServerKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await restored(kit, driver, await started(kit, driver))
        following = asyncio.ensure_future(driver.exec(spec.vm_id, X, ExecSpec(argv=["sleep", "60"]), Taking()))

        async def is_there() -> bool:
            return bool(await driver.execs(spec.vm_id))

        await eventually(is_there)
        handler = Recorded.find(spec.directory / paging.RECORD)
        assert handler is not None
        os.kill(handler.pid, signal.SIGKILL)
        assert await code_of(following) == VM_GONE
        vm = await present(driver, spec.vm_id)
        assert vm is not None
        assert vm.state == "dead"
        assert await code_of(driver.execs(spec.vm_id)) == VM_GONE
        await driver.destroy(spec.vm_id)
        assert await driver.remaining(driver.resources(spec)) == []

    bounded(scenario)


def test_a_handler_that_died_while_nobody_looked_is_noticed(kit: FirecrackerServerKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await restored(kit, driver, await started(kit, driver))
        await driver.close()
        handler = Recorded.find(spec.directory / paging.RECORD)
        assert handler is not None
        await handler.kill()
        other = kit.driver()
        vm = await present(other, spec.vm_id)
        assert vm is not None
        assert (vm.state, vm.detail) == ("dead", "its page-fault handler is gone")
        assert await code_of(other.adopt(spec.vm_id)) == VM_GONE
        assert await other.remaining(other.resources(spec)) != []
        await other.destroy(spec.vm_id)
        assert await other.remaining(other.resources(spec)) == []

    bounded(scenario)


def test_an_adopted_machine_is_watched_too(kit: FirecrackerServerKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await restored(kit, driver, await started(kit, driver))
        await driver.close()
        other = kit.driver()
        await other.adopt(spec.vm_id)
        handler, machine = (Recorded.find(spec.directory / name) for name in (paging.RECORD, "machine.json"))
        assert handler is not None
        assert machine is not None
        os.kill(handler.pid, signal.SIGKILL)

        async def is_gone() -> bool:
            return not machine.alive

        await eventually(is_gone)
        await other.destroy(spec.vm_id)

    bounded(scenario)


def test_programs_are_followed_across_a_live_checkpoint(kit: FirecrackerServerKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        taking = Taking()
        program = ExecSpec(argv=["sh", "-c", "echo before; while [ ! -e /tmp/go ]; do sleep 0.01; done; echo after"])
        following = asyncio.ensure_future(driver.exec(spec.vm_id, X, program, taking))

        async def has_begun() -> bool:
            return taking.stdout == b"before\n"

        await eventually(has_begun)
        await count(kit, driver, spec.vm_id)
        live = await driver.checkpoint_live(spec.vm_id, kit.new_directory(), nothing)
        assert live.pause_ms > 0
        assert await count(kit, driver, spec.vm_id) == b"2\n"
        await run_program(driver, spec.vm_id, "touch", "/tmp/go")
        assert (await following).exit_code == 0
        assert taking.stdout == b"before\nafter\n"
        vm = await present(driver, spec.vm_id)
        assert vm is not None
        assert vm.state == "running"
        await driver.destroy(spec.vm_id)
        again = kit.spec()
        await driver.start(again, files_of(CheckpointId("ckp-1"), live.parts))
        assert await count(kit, driver, again.vm_id) == b"2\n"
        await driver.destroy(again.vm_id)

    bounded(scenario)


def test_a_paused_machine_has_no_live_checkpoint(kit: FirecrackerServerKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        await driver.freeze(spec.vm_id)
        assert await code_of(driver.checkpoint_live(spec.vm_id, kit.new_directory(), nothing)) == "vm-not-running"
        await driver.destroy(spec.vm_id)

    bounded(scenario)


def test_after_a_checkpoint_that_failed_all_of_memory_is_written(kit: FirecrackerServerKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        await driver.checkpoint(spec.vm_id, kit.new_directory())
        spoiled = kit.new_directory()
        kit.spoil_next_checkpoint(spoiled)
        assert await code_of(driver.checkpoint(spec.vm_id, spoiled)) == "checkpoint-failed"
        for _ in range(2):
            await driver.checkpoint(spec.vm_id, kit.new_directory())
        kinds = [entry["body"]["snapshot_type"] for entry in kit.told(spec.vm_id) if "snapshot/create" in entry["path"]]
        assert kinds == ["Diff", "Diff", "Full", "Diff"]
        await driver.destroy(spec.vm_id)

    bounded(scenario)


def test_a_refusal_of_firecracker_is_told_in_its_words(kit: FirecrackerServerKit) -> None:
    class Wanting(FirecrackerServerKit):
        def workshop(self) -> Workshop:
            whole = super().workshop()
            return msgspec.structs.replace(
                whole, limits=Limits(disk_bytes_per_s=100 * 2**60), cache=self.root / "templates"
            )

    async def scenario() -> None:
        (kit.root / "wanting").mkdir()
        wanting = Wanting(kit.root / "wanting")
        driver = wanting.driver()
        with pytest.raises(DriverError, match=r"firecracker-refused: PUT /drives/root: 400 .*out of range"):
            await driver.start(wanting.spec(), None)

    bounded(scenario)


class ChangedImage(OneImage):
    """Another image of the same name."""

    def find(self, recipe: str | Path) -> Image | None:
        found = super().find(recipe)
        assert found is not None
        return msgspec.structs.replace(found, info=msgspec.structs.replace(found.info, key="0" * 64))


class ChangedKit(FirecrackerServerKit):
    """The same host, after its image has changed."""

    def library(self) -> ImageLibrary:
        return ChangedImage(self.root, super().library().cache, self.root)


def test_a_changed_image_leaves_checkpoints_and_machines_of_the_old_one(kit: FirecrackerServerKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec, other = await started(kit, driver), await started(kit, driver)
        await count(kit, driver, spec.vm_id)
        await count(kit, driver, other.vm_id)
        parts = await driver.checkpoint(spec.vm_id, kit.new_directory())
        await driver.destroy(spec.vm_id)
        await driver.close()

        changed = ChangedKit(kit.root)
        driver = changed.driver()
        assert await template_id(driver, kit.machine) != await template_id(kit.driver(), kit.machine)
        again = changed.spec()
        await driver.start(again, files_of(CheckpointId("ckp-1"), parts))
        assert await count(kit, driver, again.vm_id) == b"2\n"
        again = await restored(changed, driver, again)
        assert await count(kit, driver, again.vm_id) == b"3\n"

        other = await restored(changed, driver, other)
        assert await count(kit, driver, other.vm_id) == b"2\n"
        for one in (again, other):
            await driver.destroy(one.vm_id)

    bounded(scenario)


def test_more_than_firecracker_gives_is_refused(kit: FirecrackerServerKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        for machine in (MachineSpec(vcpus=33, memory_mib=4, disk_mib=4), MachineSpec(memory_mib=4, disk_mib=1)):
            assert await code_of(driver.start(kit.spec(machine=machine), None)) == "machine-refused"

    bounded(scenario)

"""What goes wrong around real machines: full disks, another QEMU, templates that are gone, guests that are silent."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.drivers import Taking, code_of, eventually, files_of, present, run_program, started
from tests.support.qemu import QemuKit
from torpor_contracts.ids import CheckpointId, ExecId
from torpor_contracts.session import ExecSpec
from torpor_vm_host.adapters.qemu import guest, machine
from torpor_vm_host.adapters.qemu.booting import Booting
from torpor_vm_host.adapters.qemu.confining import CLAIM, Confining
from torpor_vm_host.adapters.qemu.driver import TEMPLATES, QemuDriver
from torpor_vm_host.adapters.qemu.engine import find_engine
from torpor_vm_host.images.builder import ImageLibrary
from torpor_vm_host.images.library import default_library, recipes_home
from torpor_vm_host.ports import VM_GONE, DriverError

CKP = CheckpointId("ckp-1")
STOP_THE_AGENT = "import ctypes, signal; ctypes.CDLL(None).ptrace(16, 1, 0, 0); signal.pause()"
"""PTRACE_ATTACH to the first process, which is the agent."""


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[QemuKit]:
    made = QemuKit(tmp_path / "host")
    yield made
    made.clean_up()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Make a small file system."""
    made: list[Path] = []

    def mount(size: str) -> Path:
        place = tmp_path / f"disk-{len(made)}"
        place.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
        if subprocess.run(["mount", *options, place], check=False, capture_output=True).returncode != 0:
            pytest.skip("mounting a small file system needs root")
        made.append(place)
        return place

    yield mount
    for place in made:
        subprocess.run(["umount", "-l", place], check=True)


def within(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


async def nothing() -> None:
    return


async def error_of(call: Awaitable[object]) -> DriverError | None:
    try:
        await call
    except DriverError as error:
        return error
    return None


def fill(place: Path, leaving: int) -> Path:
    """Leave so many bytes of a small file system."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(max(0, file.tell() // 4096 * 4096 - leaving))
    return ballast


def test_a_full_disk_fails_checkpoints_at_any_step_and_the_machine_runs_on(
    kit: QemuKit, disk: Callable[[str], Path]
) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        await run_program(driver, spec.vm_id, *kit.counting().argv)
        place = disk("16m")
        for number, leaving in enumerate((0, 8192, 65536, 262_144, 400_000)):
            ballast = await asyncio.to_thread(fill, place, leaving)
            for live in (True, False):
                to = place / f"{number}{live}"
                await asyncio.to_thread(to.mkdir)
                call = driver.checkpoint_live(spec.vm_id, to, nothing) if live else driver.checkpoint(spec.vm_id, to)
                refused = await error_of(call)
                assert refused is not None, (leaving, live)
                assert refused.code == "no-space", (leaving, live, refused)
                await asyncio.to_thread(shutil.rmtree, to)
                await driver.resume(spec.vm_id)
                assert (await run_program(driver, spec.vm_id, "true"))[0].exit_code == 0
            await asyncio.to_thread(ballast.unlink)
        parts = await driver.checkpoint(spec.vm_id, kit.new_directory())
        again = kit.spec()
        await driver.destroy(spec.vm_id)
        await driver.start(again, files_of(CKP, parts))
        _, taking = await run_program(driver, again.vm_id, *kit.counting().argv)
        assert taking.stdout == b"2\n"
        await driver.destroy(again.vm_id)

    within(scenario)


def test_a_full_disk_fails_starts_at_any_step_and_leaves_nothing(kit: QemuKit, disk: Callable[[str], Path]) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        await run_program(driver, spec.vm_id, "sh", "-c", "head -c 3000000 /dev/urandom > /root/f; sync")
        parts = await driver.checkpoint(spec.vm_id, kit.new_directory())
        await driver.destroy(spec.vm_id)
        place = disk("16m")
        vms = kit.root / "vms"
        await asyncio.to_thread(lambda: vms.rmdir() if not list(vms.iterdir()) else vms.rename(kit.root / "old"))
        await asyncio.to_thread(vms.symlink_to, place)
        for leaving in (0, 4096, 8192, 65536, 262_144, 1_000_000):
            for checkpoint in (None, files_of(CKP, parts)):
                one = kit.spec()
                ballast = await asyncio.to_thread(fill, place, leaving)
                refused = await error_of(driver.start(one, checkpoint))
                if refused is None:
                    assert leaving >= 262_144
                    assert (await run_program(driver, one.vm_id, "true"))[0].exit_code == 0
                else:
                    assert refused.retryable
                    assert refused.code == "no-space" or "disk full" in refused.detail, (leaving, refused)
                await asyncio.to_thread(ballast.unlink)
                await driver.destroy(one.vm_id)
                assert await driver.remaining(driver.resources(one)) == []
                await asyncio.to_thread(shutil.rmtree, one.directory)

    within(scenario)


def test_a_guest_whose_disk_the_host_has_no_room_for_waits_and_goes_on(
    kit: QemuKit, disk: Callable[[str], Path]
) -> None:
    async def scenario() -> None:
        place = await asyncio.to_thread(disk, "24m")
        await asyncio.to_thread((kit.root / "vms").rmdir)
        await asyncio.to_thread((kit.root / "vms").symlink_to, place)
        driver = kit.driver()
        spec = await started(kit, driver)
        ballast = await asyncio.to_thread(fill, place, 4 * 2**20)
        writing = (
            "head -c 8000000 /dev/zero | tr '\\0' x > /root/f && sync && wc -c < /root/f && tr -d x < /root/f | wc -c"
        )
        following = asyncio.ensure_future(run_program(driver, spec.vm_id, "sh", "-c", writing))

        async def stands_still() -> bool:
            vm = await present(driver, spec.vm_id)
            return vm is not None and vm.state == "paused"

        await eventually(stands_still)
        await asyncio.to_thread(ballast.unlink)
        await driver.resume(spec.vm_id)
        outcome, taking = await following
        assert (outcome.exit_code, taking.stdout.split()) == (0, [b"8000000", b"0"])
        await driver.destroy(spec.vm_id)

    within(scenario)


def test_a_checkpoint_of_another_qemu_is_refused_before_anything_starts(kit: QemuKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        parts = await driver.checkpoint(spec.vm_id, kit.new_directory())
        await driver.destroy(spec.vm_id)
        other = kit.driver()
        other._engine = msgspec.structs.replace(find_engine("tcg"), version="99.0.0")
        again = kit.spec()
        with pytest.raises(DriverError, match="checkpoint-mismatched") as refused:
            await other.start(again, files_of(CKP, parts))
        assert "99.0.0" in refused.value.detail
        assert not (again.directory / CLAIM).exists()
        await kit.driver().start(again, files_of(CKP, parts))

    within(scenario)


def test_without_its_template_a_checkpoint_is_refused_and_stays(kit: QemuKit, tmp_path: Path) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        parts = await driver.checkpoint(spec.vm_id, kit.new_directory())
        await driver.destroy(spec.vm_id)
        elsewhere = QemuKit(tmp_path / "elsewhere")
        await asyncio.to_thread((elsewhere.root / TEMPLATES).unlink)
        await asyncio.to_thread((tmp_path / "images").symlink_to, default_library().cache)
        library = ImageLibrary(recipes_home(), tmp_path / "images", Path(__file__).parent)
        other = QemuDriver(
            find_engine("tcg"),
            library,
            elsewhere.root,
            confining=Confining.find("if-possible"),
            slots=elsewhere.policy,
            new_id=elsewhere.ids.new,
            wall_ns=time.time_ns,
            progress=lambda _: None,
        )
        assert await code_of(other.start(elsewhere.spec(), files_of(CKP, parts))) == "template-missing"
        await other.close()
        again = kit.spec()
        await driver.start(again, files_of(CKP, parts))
        await driver.destroy(again.vm_id)

    within(scenario)


def test_an_agent_that_never_answers(kit: QemuKit, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said; the machine can still be checkpointed, and be ended."""

    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        taking = Taking()
        program = ExecSpec(argv=["python3", "-c", STOP_THE_AGENT])
        holding = asyncio.ensure_future(driver.exec(spec.vm_id, ExecId("x-1"), program, taking))
        monkeypatch.setattr(guest.GuestChannel.request, "__kwdefaults__", {"timeout_s": 1.0})
        monkeypatch.setattr(machine, "HELLO_S", 1.0)

        async def is_silent() -> bool:
            try:
                await driver.execs(spec.vm_id)
            except DriverError as error:
                return error.code == "guest-silent"
            return False

        await eventually(is_silent)
        assert await code_of(kit.driver().adopt(spec.vm_id)) == "guest-silent"
        holding.cancel()
        last = kit.driver()
        vm = await present(last, spec.vm_id)
        assert vm is not None
        assert vm.state == "running"
        assert len(await last.checkpoint(spec.vm_id, kit.new_directory())) == 3
        await last.destroy(spec.vm_id)
        assert await last.remaining(last.resources(spec)) == []

    within(scenario)


def test_a_guest_whose_kernel_gives_up_is_a_machine_that_ended(kit: QemuKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        panic = "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger"
        assert await code_of(run_program(driver, spec.vm_id, "sh", "-c", panic)) == VM_GONE

        async def is_dead() -> bool:
            vm = await present(driver, spec.vm_id)
            return vm is not None and vm.state == "dead"

        await eventually(is_dead)
        await driver.destroy(spec.vm_id)
        assert await driver.remaining(driver.resources(spec)) == []

    within(scenario)


def test_a_boot_that_does_not_come_up_is_given_up_and_leaves_nothing(kit: QemuKit) -> None:
    async def scenario() -> None:
        place = kit.new_directory()
        out = place / ".making"
        await asyncio.to_thread(out.mkdir)
        image = default_library().find("default")
        assert image is not None
        booting = Booting(find_engine("tcg"), Confining.find("if-possible"), time.time_ns)
        with pytest.raises(DriverError, match="boot-failed"):
            await booting(image, kit.machine, out, within_s=0.3)
        assert await asyncio.to_thread(lambda: [path.name for path in place.iterdir()]) == [".making"]

    within(scenario)

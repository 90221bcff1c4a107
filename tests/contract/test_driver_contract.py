"""What every driver promises, shown for each of them: this is what entitles the simulation to be believed."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.drivers import DRIVER_KITS, DriverKit, Taking, files_of, run_program
from torpor_contracts.ids import CheckpointId, ExecId, VmId
from torpor_contracts.session import ExecSpec, MachineSpec
from torpor_vm_host.ports import EXEC_UNKNOWN, VM_GONE, Driver, DriverError, Output, PresentVm, VmSpec

X = ExecId("x-1")
Scenario = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture(params=sorted(DRIVER_KITS))
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DriverKit]:
    made = DRIVER_KITS[request.param](tmp_path)
    yield made
    made.clean_up()


def run(scenario: Scenario) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await holds():  # noqa: ASYNC110  (what is waited for happens in a guest, which sets no event)
            await asyncio.sleep(0.005)


async def started(kit: DriverKit, driver: Driver, **changes: Any) -> VmSpec:
    spec = kit.spec(**changes)
    await driver.start(spec, None)
    return spec


async def present(driver: Driver, vm_id: VmId) -> PresentVm | None:
    return next((vm for vm in await driver.machines() if vm.vm_id == vm_id), None)


async def state_of(driver: Driver, vm_id: VmId) -> str | None:
    vm = await present(driver, vm_id)
    return None if vm is None else vm.state


async def code_of(call: Awaitable[object]) -> str:
    with pytest.raises(DriverError) as raised:
        await call
    return raised.value.code


async def restored(kit: DriverKit, driver: Driver, spec: VmSpec, incarnation: int = 2) -> VmSpec:
    """Checkpoint a machine, end it, and start it again under a new identity."""
    parts = await driver.checkpoint(spec.vm_id, kit.new_directory())
    await driver.destroy(spec.vm_id)
    again = kit.spec(session_id=spec.session_id, incarnation=incarnation, machine=spec.machine)
    await driver.start(again, files_of(CheckpointId("ckp-1"), parts))
    return again


def test_a_started_machine_is_listed_for_what_it_was_started(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        vm = await present(driver, spec.vm_id)
        assert vm is not None
        assert (vm.session_id, vm.incarnation, vm.state) == (spec.session_id, 1, "running")
        assert await code_of(driver.start(spec, None)) == "vm-exists"
        await driver.destroy(spec.vm_id)

    run(scenario)


def test_a_host_offers_something_and_says_what_it_can_load(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        capacity = await driver.capacity()
        assert min(capacity.vcpus, capacity.memory_mib, capacity.disk_mib, capacity.vms_max) >= 1
        assert await driver.fingerprint()
        assert await driver.fingerprint() == await kit.driver().fingerprint()

    run(scenario)


def test_output_and_exit_code_of_a_program(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        outcome, taking = await run_program(driver, spec.vm_id, "echo", "hello", "world")
        assert (outcome.outcome, outcome.exit_code, taking.stdout) == ("exited", 0, b"hello world\n")
        assert outcome.output_bytes == len(b"hello world\n")
        outcome, taking = await run_program(driver, spec.vm_id, "cat", "/nothing/here")
        assert (outcome.outcome, outcome.exit_code, taking.stdout) == ("exited", 1, b"")
        assert b"No such file" in taking.stderr
        outcome, taking = await run_program(driver, spec.vm_id, "sh", "-c", "echo a && exit 7; echo b")
        assert (outcome.exit_code, taking.stdout) == (7, b"a\n")
        outcome, taking = await run_program(driver, spec.vm_id, "cat", stdin="from outside")
        assert taking.stdout == b"from outside"
        outcome, taking = await run_program(driver, spec.vm_id, "env", env={"COLOUR": "grey"})
        assert b"COLOUR=grey\n" in taking.stdout
        await driver.destroy(spec.vm_id)

    run(scenario)


def test_an_unknown_program_ends_as_in_a_shell(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        outcome, taking = await run_program(driver, spec.vm_id, "no-such-program-anywhere")
        assert (outcome.outcome, outcome.exit_code) == ("exited", 127)
        assert b"not found" in taking.stderr
        await driver.destroy(spec.vm_id)

    run(scenario)


def test_much_output_comes_whole_and_in_order(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        _, taking = await run_program(driver, spec.vm_id, "seq", "100000")
        assert taking.stdout == b"".join(b"%d\n" % number for number in range(1, 100_001))
        assert [output.offset for output in taking.taken] == sorted({output.offset for output in taking.taken})
        await driver.destroy(spec.vm_id)

    run(scenario)


def test_programs_run_side_by_side(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        order: list[str] = []

        async def program(seconds: str) -> None:
            await run_program(driver, spec.vm_id, "sleep", seconds)
            order.append(seconds)

        await asyncio.gather(program("0.4"), program("0.1"))
        assert order == ["0.1", "0.4"]
        await driver.destroy(spec.vm_id)

    run(scenario)


def test_a_program_is_ended_when_its_time_is_over(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        outcome, taking = await run_program(driver, spec.vm_id, "sh", "-c", "echo begun; sleep 60", timeout_s=0.3)
        assert (outcome.outcome, outcome.exit_code, taking.stdout) == ("timed-out", None, b"begun\n")
        await driver.destroy(spec.vm_id)

    run(scenario)


def test_a_program_can_be_killed(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        running = asyncio.ensure_future(driver.exec(spec.vm_id, X, ExecSpec(argv=["sleep", "60"]), Taking()))

        async def is_there() -> bool:
            return any(one.exec_id == X and one.running for one in await driver.execs(spec.vm_id))

        await eventually(is_there)
        await driver.kill(spec.vm_id, X, 9)
        assert (await running).outcome == "signaled"
        await driver.kill(spec.vm_id, X, 9)
        assert await code_of(driver.kill(spec.vm_id, ExecId("x-none"), 9)) == EXEC_UNKNOWN
        await driver.destroy(spec.vm_id)

    run(scenario)


def test_a_program_is_known_by_its_id_until_it_is_forgotten(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        taking = Taking()
        outcome = await driver.exec(spec.vm_id, X, ExecSpec(argv=["sh", "-c", "echo once; exit 3"]), taking)
        assert await code_of(driver.exec(spec.vm_id, X, ExecSpec(argv=["true"]), taking)) == "exec-exists"
        assert [(one.exec_id, one.running) for one in await driver.execs(spec.vm_id)] == [(X, False)]
        assert await driver.attach(spec.vm_id, X, taking) == outcome
        assert taking.stdout == b"once\n"
        await driver.forget(spec.vm_id, X)
        await driver.forget(spec.vm_id, X)
        assert await driver.execs(spec.vm_id) == []
        assert await code_of(driver.attach(spec.vm_id, X, taking)) == EXEC_UNKNOWN
        await driver.destroy(spec.vm_id)

    run(scenario)


def test_output_waits_for_who_takes_it(kit: DriverKit) -> None:
    """A reader that does not take its output holds the program up, and loses nothing when it is cut off."""

    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        first: list[Output] = []

        async def take_one_then_hang(output: Output) -> None:
            if first:
                await asyncio.Event().wait()
            first.append(output)

        program = ExecSpec(argv=["sh", "-c", "seq 50000; seq 50000; seq 50000; echo end"])
        running = asyncio.ensure_future(driver.exec(spec.vm_id, X, program, take_one_then_hang))

        async def one_is_taken() -> bool:
            return bool(first)

        await eventually(one_is_taken)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        taking = Taking()
        for output in first:
            await taking(output)
        outcome = await kit.driver().attach(spec.vm_id, X, taking)
        whole = b"".join(b"%d\n" % number for number in range(1, 50_001)) * 3 + b"end\n"
        assert taking.stdout == whole
        assert outcome.output_bytes == len(whole)
        await driver.destroy(spec.vm_id)

    run(scenario)


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

    run(scenario)


def test_a_program_goes_on_across_checkpoint_and_restore(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        taking = Taking()
        program = ExecSpec(argv=["sh", "-c", "echo before; sleep 0.6; echo after; exit 5"])
        following = asyncio.ensure_future(driver.exec(spec.vm_id, X, program, taking))

        async def has_begun() -> bool:
            return taking.stdout == b"before\n"

        await eventually(has_begun)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        spec = await restored(kit, driver, spec)
        (known,) = await driver.execs(spec.vm_id)
        assert known.exec_id == X
        assert 0 < known.remaining_s <= 3600
        outcome = await driver.attach(spec.vm_id, X, taking)
        assert (outcome.outcome, outcome.exit_code) == ("exited", 5)
        assert taking.stdout == b"before\nafter\n"
        await driver.destroy(spec.vm_id)

    run(scenario)


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

    run(scenario)


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

    run(scenario)


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

    run(scenario)


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

    run(scenario)


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

    run(scenario)


def test_parts_of_different_generations_are_refused(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        old = {part.kind: part for part in await driver.checkpoint(spec.vm_id, kit.new_directory())}
        await driver.resume(spec.vm_id)
        await run_program(driver, spec.vm_id, "sh", "-c", "echo newer > /root/file")
        new = {part.kind: part for part in await driver.checkpoint(spec.vm_id, kit.new_directory())}
        mixed = [new["memory"], new["devices"], old["disk"]]
        again = kit.spec(machine=spec.machine)
        code = await code_of(driver.start(again, files_of(CheckpointId("ckp-1"), mixed)))
        assert code == "checkpoint-mismatched"
        await driver.destroy(again.vm_id)
        await driver.destroy(spec.vm_id)

    run(scenario)


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

    run(scenario)


def test_an_unknown_image_is_refused(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = kit.spec(machine=MachineSpec(image="no-such-image"))
        assert await code_of(driver.start(spec, None)) == "image-unknown"
        await driver.destroy(spec.vm_id)

    run(scenario)


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

    run(scenario)


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

    run(scenario)


def test_machines_and_programs_outlive_the_driver_object(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        await run_program(driver, spec.vm_id, *kit.counting().argv)
        taking = Taking()
        program = ExecSpec(argv=["sh", "-c", "echo one; sleep 0.3; echo two"])
        following = asyncio.ensure_future(driver.exec(spec.vm_id, X, program, taking))

        async def has_begun() -> bool:
            return taking.stdout == b"one\n"

        await eventually(has_begun)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await driver.close()
        del driver

        other = kit.driver()
        vm = await present(other, spec.vm_id)
        assert vm is not None
        assert (vm.session_id, vm.incarnation, vm.state) == (spec.session_id, 1, "running")
        await other.adopt(spec.vm_id)
        outcome = await other.attach(spec.vm_id, X, taking)
        assert (outcome.exit_code, taking.stdout) == (0, b"one\ntwo\n")
        _, counted = await run_program(other, spec.vm_id, *kit.counting().argv)
        assert counted.stdout == b"2\n"
        await other.destroy(spec.vm_id)
        assert await code_of(other.adopt(spec.vm_id)) == VM_GONE

    run(scenario)

"""What every driver promises of programs: their output whole, their ends known, whoever follows them and when."""

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
    present,
    restored,
    run_program,
    started,
)
from torpor_contracts.ids import ExecId
from torpor_contracts.session import ExecSpec
from torpor_vm_host.ports import EXEC_UNKNOWN, VM_GONE, Output

X = ExecId("x-1")


@pytest.fixture(params=sorted(DRIVER_KITS))
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DriverKit]:
    yield from using(request, tmp_path)


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

    bounded(scenario)


def test_an_unknown_program_ends_as_in_a_shell(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        outcome, taking = await run_program(driver, spec.vm_id, "no-such-program-anywhere")
        assert (outcome.outcome, outcome.exit_code) == ("exited", 127)
        assert b"not found" in taking.stderr
        await driver.destroy(spec.vm_id)

    bounded(scenario)


def test_much_output_comes_whole_and_in_order(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        _, taking = await run_program(driver, spec.vm_id, "seq", "100000")
        assert taking.stdout == b"".join(b"%d\n" % number for number in range(1, 100_001))
        assert [output.offset for output in taking.taken] == sorted({output.offset for output in taking.taken})
        await driver.destroy(spec.vm_id)

    bounded(scenario)


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

    bounded(scenario)


def test_a_program_is_ended_when_its_time_is_over(kit: DriverKit) -> None:
    async def scenario() -> None:
        driver = kit.driver()
        spec = await started(kit, driver)
        outcome, taking = await run_program(driver, spec.vm_id, "sh", "-c", "echo begun; sleep 60", timeout_s=0.3)
        assert (outcome.outcome, outcome.exit_code, taking.stdout) == ("timed-out", None, b"begun\n")
        await driver.destroy(spec.vm_id)

    bounded(scenario)


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

    bounded(scenario)


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

    bounded(scenario)


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

    bounded(scenario)


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

    bounded(scenario)


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

    bounded(scenario)

"""ExecVm: recorded first, at most once, followed to its end whoever dies; output whole, in order and within bounds."""

from pathlib import Path

import pytest

from tests.support.vm_host_world import TENANT, HostWorld, exec_vm, in_virtual_time, stop_vm
from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.vm import VmExecEnded, VmExecStarted


async def running(root: Path, **settings: object) -> HostWorld:
    world = HostWorld(root, **settings)
    await world.boot()
    await world.command(world.start_vm())
    return world


def test_a_program_is_recorded_then_run_then_its_end_recorded(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        receipt = await world.command(exec_vm("sh", "-c", "echo hello; exit 3"))
        assert receipt is not None
        assert (await world.tags())[:3] == ["vm-claimed", "vm-started", "vm-exec-started"]
        end: VmExecEnded = await world.ended()
        assert (end.outcome, end.exit_code, end.output_bytes) == ("exited", 3, 6)
        await world.look()
        output, last = world.read()
        assert output == b"hello\n"
        assert last is not None
        assert (last["Torpor-End"], last["Torpor-Exit-Code"], last["Torpor-Offset"]) == ("exited", "3", "6")
        assert last["Torpor-Incarnation"] == "1"

    in_virtual_time(scenario)


def test_the_command_is_done_while_the_program_runs_and_others_run_beside_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        began_s = world.clock.monotonic_s()
        await world.command(exec_vm("sleep", "50", exec_id="x-long"))
        await world.command(exec_vm("echo", "short", exec_id="x-short"))
        await world.ended("x-short")
        assert world.clock.monotonic_s() - began_s < 1
        await world.ended("x-long")
        assert 50 <= world.clock.monotonic_s() - began_s < 51

    in_virtual_time(scenario)


def test_a_program_is_begun_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        first = await world.command(exec_vm("count"), command_id="acme/exec")
        assert await world.command(exec_vm("count"), command_id="acme/exec") == first
        await world.ended()
        assert await world.command(exec_vm("count")) is None
        await world.look()
        assert world.read().output == b"1\n"
        assert (await world.tags()).count("vm-exec-started") == 1

    in_virtual_time(scenario)


def test_time_outs_and_unknown_programs_are_ends_like_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(exec_vm("sleep", "60", exec_id="x-slow", timeout_s=2.0))
        end: VmExecEnded = await world.ended("x-slow")
        assert (end.outcome, end.exit_code) == ("timed-out", None)
        await world.command(exec_vm("python3", "-c", "1", exec_id="x-unknown"))
        end = await world.ended("x-unknown")
        assert (end.outcome, end.exit_code) == ("exited", 127)
        await world.look()
        assert b"simulated machine" in world.read("x-unknown").output

    in_virtual_time(scenario)


def test_too_many_programs_are_told_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path, execs_max=2)
        for number in range(3):
            await world.command(exec_vm("sleep", "10", exec_id=f"x-{number}"))
        end: VmExecEnded = await world.ended("x-2")
        assert end.outcome == "failed"
        assert end.detail.startswith("too-many-programs")
        assert (await world.tags()).count("vm-exec-started") == 2

    in_virtual_time(scenario)


def test_a_program_for_no_running_machine_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = HostWorld(tmp_path)
        await world.boot()
        with pytest.raises(Rejected, match="vm-not-running"):
            await world.command(exec_vm("true"))
        await world.command(world.start_vm())
        with pytest.raises(Rejected, match="stale-incarnation"):
            await world.command(exec_vm("true", incarnation=2))
        await world.command(stop_vm())
        with pytest.raises(Rejected, match="vm-not-running"):
            await world.command(exec_vm("true"))

    in_virtual_time(scenario)


def test_output_beyond_the_limit_is_dropped_and_said_to_be(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path, output_bytes_max=100_000)
        await world.command(exec_vm("seq", "100000"))
        end: VmExecEnded = await world.ended()
        assert (end.outcome, end.exit_code, end.output_bytes) == ("exited", 0, 100_000)
        assert end.detail.startswith("output-cut")
        await world.look()
        assert len(world.read().output) == 100_000
        assert max(len(message.data) for message in world.bus.stored) <= 64 * 1024

    in_virtual_time(scenario)


def test_bytes_are_passed_on_as_they_are(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        text = "ä€😀" * 20_000
        await world.command(exec_vm("cat", stdin=text))
        await world.ended()
        await world.look()
        assert world.read().output.decode() == text

    in_virtual_time(scenario)


def test_while_output_cannot_be_stored_the_program_waits_and_nothing_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        world.bus.storing_away = True
        await world.command(exec_vm("sh", "-c", "echo one; sleep 1; echo two", timeout_s=100_000.0))
        await world.clock.sleep(600)
        assert (await world.tags())[-1] == "vm-exec-started"
        world.bus.storing_away = False
        await world.look()
        await world.ended()
        await world.look()
        assert world.read().output == b"one\ntwo\n"

    in_virtual_time(scenario)


@pytest.mark.parametrize("point", ["append vm-exec-started", "appended vm-exec-started", "exec"])
def test_dying_before_the_program_is_begun_never_begins_it_twice(tmp_path: Path, point: str) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        if point == "exec":
            world.points.plans[point] = world.process.kill
            await world.command(exec_vm("count"), command_id="acme/exec")
            await world.crash()
        else:
            await world.killed_by(point, exec_vm("count"), command_id="acme/exec")
        await world.boot()
        await world.command(exec_vm("count"), command_id="acme/exec")
        end: VmExecEnded = await world.ended()
        counted = 0 if end.outcome == "failed" else 1
        if end.outcome == "failed":
            assert end.detail.startswith("outcome-unknown")
        await world.command(exec_vm("count", exec_id="x-2"))
        await world.ended("x-2")
        await world.look()
        assert world.read("x-2").output == f"{counted + 1}\n".encode()
        assert (await world.tags()).count("vm-exec-ended") == 2

    in_virtual_time(scenario)


def test_a_host_comes_up_although_the_output_of_a_program_it_never_began_cannot_be_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.killed_by("appended vm-exec-started", exec_vm("count"), command_id="acme/exec")
        world.bus.storing_away = True
        await world.boot()
        end: VmExecEnded = await world.ended()
        assert end.outcome == "failed"
        assert world.state_of() == "running"

    in_virtual_time(scenario)


@pytest.mark.parametrize("after_s", [0.0, 0.5, 2.0, 30.0])
def test_a_program_outlives_its_vm_host_and_its_end_is_recorded_once(tmp_path: Path, after_s: float) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(exec_vm("sh", "-c", "echo one; sleep 1; echo two; exit 4"))
        await world.clock.sleep(0.2)
        await world.crash()
        await world.clock.sleep(after_s)
        await world.boot()
        end: VmExecEnded = await world.ended()
        assert (end.outcome, end.exit_code) == ("exited", 4)
        await world.look()
        output, last = world.read()
        assert output == b"one\ntwo\n"
        assert last is not None
        assert (await world.tags()).count("vm-exec-ended") == 1

    in_virtual_time(scenario)


@pytest.mark.parametrize("point", ["append vm-exec-ended", "appended vm-exec-ended", "forget"])
def test_dying_while_an_end_is_recorded_records_it_once(tmp_path: Path, point: str) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        world.points.plans[point] = world.kill
        await world.command(exec_vm("echo", "x"))
        await world.process.ended()
        await world.reboot()
        end: VmExecEnded = await world.ended()
        assert end.outcome == "exited"
        await world.look()
        assert (await world.tags()).count("vm-exec-ended") == 1
        await world.command(world.suspend_vm())
        (address,) = [address for _, address in world.chunks.packs]
        memory = world.chunks.content(TENANT, address, "memory")
        assert memory is not None
        assert b"x-1" not in memory, "what is recorded is not carried into the checkpoint"

    in_virtual_time(scenario)


def test_the_log_being_away_for_a_moment_does_not_lose_the_program(tmp_path: Path) -> None:
    """The append is committed but not answered; the same process tries again and begins what it had meant to."""

    async def scenario() -> None:
        world = await running(tmp_path)

        def unanswered() -> None:
            raise Transient("the log answers nothing")

        world.points.plans["appended vm-exec-started"] = unanswered
        with pytest.raises(Transient, match="answers nothing"):
            await world.command(exec_vm("count"), command_id="acme/exec")
        assert isinstance((await world.events())[-1], VmExecStarted)
        await world.command(exec_vm("count"), command_id="acme/exec")
        end: VmExecEnded = await world.ended()
        assert (end.outcome, end.exit_code) == ("exited", 0)

    in_virtual_time(scenario)


def test_the_programs_of_a_machine_that_ends_get_no_end_of_their_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = await running(tmp_path)
        await world.command(exec_vm("sleep", "100"))
        await world.command(stop_vm())
        await world.look()
        assert (await world.tags())[-2:] == ["vm-stopped", "vm-released"]
        assert world.read().end is None

    in_virtual_time(scenario)

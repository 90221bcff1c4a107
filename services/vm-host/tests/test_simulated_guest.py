"""The simulated guest: what it knows, what it says of the rest, and that its time is exact however one looks."""

import pytest

from torpor_contracts.ids import ExecId, SessionId, TenantId, VmId
from torpor_contracts.session import ExecSpec, MachineSpec
from torpor_vm_host.adapters.simulated.guest import COMMANDS, US_PER_S, advance, kill, spawn, taken
from torpor_vm_host.adapters.simulated.machine import PIPE_BYTES_MAX, Machine, Process
from torpor_vm_host.adapters.simulated.shell import NotUnderstood, steps_of

START = 1_900_000_000 * US_PER_S


def machine(**changes: object) -> Machine:
    values: dict[str, object] = {
        "vm_id": VmId("vm-1"),
        "tenant_id": TenantId("acme"),
        "session_id": SessionId("s-1"),
        "incarnation": 3,
        "spec": MachineSpec(),
        "state": "running",
    }
    return Machine(**(values | changes))  # type: ignore[arg-type]


def run(one: Machine, *argv: str, at_s: float = 0.0, **spec: object) -> Process:
    exec_id = ExecId(f"x-{len(one.processes)}")
    program = ExecSpec(argv=list(argv), **spec)  # type: ignore[arg-type]
    process = spawn(one, exec_id, program, START + int(at_s * US_PER_S))
    advance(one, START + int(at_s * US_PER_S))
    return process


def text(process: Process, stream: str = "stdout") -> str:
    return b"".join(piece.data for piece in process.written if piece.stream == stream).decode()


def code(process: Process) -> int | None:
    assert process.end is not None, "it runs still"
    return process.end.exit_code


@pytest.mark.parametrize(
    ("argv", "out", "exit_code"),
    [
        (["echo", "a", "b"], "a b\n", 0),
        (["echo", "-n", "a"], "a", 0),
        (["true"], "", 0),
        (["false"], "", 1),
        (["/bin/echo", "a"], "a\n", 0),
        (["exit", "300"], "", 44),
        (["pwd"], "/root\n", 0),
        (["whoami"], "root\n", 0),
        (["hostname"], "s-1\n", 0),
        (["seq", "3"], "1\n2\n3\n", 0),
        (["seq", "999999999"], "", 2),
        (["sleep", "soon"], "", 2),
        (["exit", "x"], "", 2),
        (["sh", "-c", "echo a; echo b"], "a\nb\n", 0),
        (["sh", "-c", "false && echo no; echo yes"], "yes\n", 0),
        (["sh", "-c", "true && echo yes && false && echo no"], "yes\n", 1),
        (["sh", "-c", "echo 'a  b' \"c d\" e\\ f"], "a  b c d e f\n", 0),
        (["sh", "-c", "exit 3; echo no"], "", 3),
        (["bash", "-c", "echo x > f && cat f"], "x\n", 0),
        (["sh", "-c", "echo x > f; echo y >> f; cat f"], "x\ny\n", 0),
        (["sh", "-c", "write f a b\nappend f c\ncat f"], "a b\nc\n", 0),
        (["sh", "-c", "cd /tmp; pwd"], "/tmp\n", 0),
        (["sh", "-c", "set colour grey; get colour"], "grey\n", 0),
        (["get", "nothing"], "", 1),
        (["sh", "-c", "write d/f x; write g y; ls; ls d; rm d/f; ls d"], "d\ng\nf\n", 0),
        (["sh", "-c", ""], "", 0),
    ],
)
def test_what_it_knows(argv: list[str], out: str, exit_code: int) -> None:
    process = run(machine(), *argv)
    assert (text(process), code(process)) == (out, exit_code)


@pytest.mark.parametrize(
    "argv",
    [
        ["python3", "-c", "print(1)"],
        ["sh", "-c", "echo a | cat"],
        ["sh", "-c", "echo $HOME"],
        ["sh", "-c", 'echo "$HOME"'],
        ["sh", "-c", "echo `date`"],
        ["sh", "-c", "echo a &"],
        ["sh", "-c", "cat < f"],
        ["sh", "-c", "echo 'open"],
        ["sh", "-c", "&& echo"],
        ["sh", "-c", "echo a >"],
        ["sh", "-c", "> f"],
        ["sh", "-c", "echo *"],
        ["sh", "script.sh"],
    ],
)
def test_what_it_does_not_know_it_says(argv: list[str]) -> None:
    process = run(machine(), *argv)
    assert code(process) == 127
    said = text(process, "stderr")
    assert "simulated machine" in said
    assert all(name in said for name in COMMANDS)


def test_no_argv_at_all_is_not_understood() -> None:
    with pytest.raises(NotUnderstood):
        steps_of([])


def test_a_text_with_quotes_keeps_what_a_shell_would_keep() -> None:
    (step,) = steps_of(["sh", "-c", "echo '$HOME & more' > out"])
    assert (step.argv, step.into, step.appends) == (["echo", "$HOME & more"], "out", False)


def test_the_environment_says_who_it_is() -> None:
    out = text(run(machine(), "env", env={"COLOUR": "grey"}))
    assert "TORPOR_SESSION_ID=s-1\n" in out
    assert "TORPOR_INCARNATION=3\n" in out
    assert "COLOUR=grey\n" in out


def test_a_file_too_large_leaves_no_space() -> None:
    one = machine(spec=MachineSpec(disk_mib=1))
    one.files["/root/other"] = b"x" * 1_000_000
    process = run(one, "sh", "-c", "seq 60000 > f; cat f")
    assert "No space left" in text(process, "stderr")
    assert "/root/f" not in one.files


@pytest.mark.parametrize("looks", [[0.0, 1.0, 2.0, 2.5, 3.0, 9.0], [9.0], [2.5, 9.0]])
def test_time_is_exact_however_seldom_one_looks(looks: list[float]) -> None:
    one = machine()
    slow = run(one, "sh", "-c", "sleep 1; echo 1 >> f; sleep 2; echo 3 >> f; date")
    other = run(one, "sh", "-c", "sleep 2; echo 2 >> f")
    for look in looks:
        advance(one, START + int(look * US_PER_S))
    assert one.files["/root/f"] == b"1\n2\n3\n"
    assert slow.at_us == START + 3 * US_PER_S
    assert other.at_us == START + 2 * US_PER_S


def test_a_time_out_cuts_a_sleep_at_its_moment() -> None:
    one = machine()
    process = run(one, "sh", "-c", "sleep 5; echo never", timeout_s=2.0)
    advance(one, START + 100 * US_PER_S)
    assert process.end is not None
    assert (process.end.outcome, process.at_us) == ("timed-out", START + 2 * US_PER_S)
    assert text(process) == ""


def test_a_paused_machine_stands_still() -> None:
    one = machine()
    process = run(one, "sh", "-c", "sleep 5; echo on", timeout_s=10.0)
    advance(one, START + 2 * US_PER_S)
    one.pause(START + 2 * US_PER_S)
    advance(one, START + 1000 * US_PER_S)
    assert process.end is None
    one.run(START + 1000 * US_PER_S)
    advance(one, START + 1002 * US_PER_S)
    assert process.end is None
    advance(one, START + 1003 * US_PER_S)
    assert (code(process), text(process)) == (0, "on\n")


def test_a_program_waits_for_its_output_to_be_taken() -> None:
    one = machine()
    process = run(one, "sh", "-c", "seq 50000; write f done")
    assert process.held_up
    assert "/root/f" not in one.files
    while process.held_up:
        taken(process, process.written[0].offset, START + 7 * US_PER_S)
    advance(one, START + 7 * US_PER_S)
    assert one.files["/root/f"] == b"done\n"
    assert process.at_us == START + 7 * US_PER_S
    assert process.written_bytes > PIPE_BYTES_MAX


def test_output_is_taken_once() -> None:
    process = run(machine(), "echo", "a")
    taken(process, 5, START)
    assert text(process) == "a\n"
    taken(process, 0, START)
    taken(process, 0, START)
    assert text(process) == ""


def test_killed_is_signaled_and_stays_so() -> None:
    one = machine()
    process = run(one, "sleep", "60")
    kill(process, 15)
    advance(one, START + 100 * US_PER_S)
    kill(process, 9)
    assert process.end is not None
    assert (process.end.outcome, process.end.detail) == ("signaled", "signal 15")


def test_fail_after_fails_then() -> None:
    one = machine()
    process = run(one, "fail-after", "3")
    advance(one, START + 3 * US_PER_S)
    assert (code(process), process.at_us) == (1, START + 3 * US_PER_S)


def test_no_sleep_is_too_long_to_be_written_down() -> None:
    process = run(machine(), "sleep", "1e300", timeout_s=1e300)
    assert process.wakes_us is not None
    assert process.wakes_us < 1 << 63

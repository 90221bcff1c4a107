"""Programs as the host runs them: streams, input, terminals, signals, time-outs, back-pressure, ends that are kept."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.guest_agent import AgentProcess, AgentRefused, running_agent
from torpor_guest_agent.program import UNCONFIRMED_BYTES_MAX
from torpor_guest_agent.programs import ENDED_KEPT_MAX, STDIN_BYTES_MAX


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with running_agent(tmp_path) as running:
        yield running


def test_output_exit_code_and_environment(agent: AgentProcess) -> None:
    end, output = agent.run("sh", "-c", "echo out; echo err >&2; exit 7", env={"A": "1"})
    assert (end["outcome"], end["exit_code"], end["signal"], end["offset"]) == ("exited", 7, None, 8)
    assert output == b"out\n"
    assert b"".join(e.body for e in agent.events if e.header.get("stream") == "stderr") == b"err\n"
    _, output = agent.run("env", env={"COLOUR": "grey"})
    lines = output.splitlines()
    assert {b"COLOUR=grey", b"TORPOR_SESSION_ID=s-1", b"TORPOR_INCARNATION=1", b"HOME=/root"} <= set(lines)


def test_a_program_starts_where_and_as_whom_it_is_asked_to(agent: AgentProcess, tmp_path: Path) -> None:
    _, output = agent.run("pwd", cwd=str(tmp_path))
    assert output == f"{tmp_path}\n".encode()
    if os.getuid() == 0:
        _, output = agent.run("sh", "-c", "id -un; id -gn; echo $HOME", user="nobody")
        assert output.split()[:2] == [b"nobody", b"nogroup"]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({"argv": ["no-such-program-anywhere"]}, "not-found"),
        ({"argv": ["/etc/passwd"]}, "not-permitted"),
        ({"argv": ["true"], "cwd": "/no/such/place"}, "no-such-directory"),
        ({"argv": ["true"], "user": "nobody-at-all"}, "no-such-user"),
        ({"argv": []}, "cannot-start"),
        ({"argv": ["tr\0ue"]}, "cannot-start"),
        ({"argv": ["x" * 300_000]}, "name-too-long"),
        ({"argv": ["true", 7]}, "cannot-start"),
        ({"argv": 7}, "malformed-request"),
        ({}, "malformed-request"),
    ],
)
def test_what_cannot_start_says_why_and_leaves_nothing(
    agent: AgentProcess, request_: dict[str, object], code: str
) -> None:
    before = descriptors(agent)
    with pytest.raises(AgentRefused) as refused:
        agent.request("exec", **({"exec_id": "x-bad", "cwd": "/"} | request_))
    assert refused.value.code == code
    assert agent.request("programs").header["programs"] == []
    assert descriptors(agent) == before


def descriptors(agent: AgentProcess) -> int:
    return psutil.Process(agent.process.pid).num_fds()


def test_nothing_is_left_open_by_programs_that_ended(agent: AgentProcess) -> None:
    agent.run("true")
    before = descriptors(agent)
    for number in range(20):
        agent.run("sh", "-c", f"cat; echo {number}")
        agent.start(f"in-{number}", "cat", stdin=b"abc")
        agent.end_of(f"in-{number}")
        agent.start(f"pty-{number}", "true", pty={"rows": 2, "columns": 20})
        agent.end_of(f"pty-{number}")
    assert descriptors(agent) == before


def test_input_is_fed_in_pieces_and_ended(agent: AgentProcess) -> None:
    agent.start("x", "cat", stdin=b"one ", stdin_open=True)
    agent.request("stdin", b"two ", exec_id="x")
    agent.request("stdin", b"three", exec_id="x", ends=True)
    assert agent.end_of("x")["exit_code"] == 0
    assert agent.output_of("x") == b"one two three"
    with pytest.raises(AgentRefused, match="stdin-closed"):
        agent.request("stdin", b"more", exec_id="x")


def test_input_that_is_not_read_is_bounded_and_given_up_with_its_reader(agent: AgentProcess) -> None:
    agent.start("x", "sleep", "60", stdin_open=True)
    piece = b"z" * 255_000
    for _ in range(STDIN_BYTES_MAX // len(piece)):
        agent.request("stdin", piece, exec_id="x")
    with pytest.raises(AgentRefused, match="stdin-full"):
        agent.request("stdin", piece, exec_id="x")
    agent.request("signal", exec_id="x", signal=9)
    assert agent.end_of("x")["signal"] == 9
    agent.start("y", "head", "-c", "5", stdin=b"q" * 200_000, stdin_open=True)
    assert agent.end_of("y")["exit_code"] == 0
    assert agent.output_of("y") == b"qqqqq"


def test_much_input_goes_through(agent: AgentProcess) -> None:
    agent.start("x", "wc", "-c", stdin_open=True)
    for _ in range(12):
        agent.request("stdin", b"w" * 250_000, exec_id="x")
    agent.request("stdin", exec_id="x", ends=True)
    agent.end_of("x")
    assert agent.output_of("x").split() == [b"3000000"]


def test_a_terminal_echoes_has_a_size_and_is_resized(agent: AgentProcess) -> None:
    script = "stty size; trap 'stty size; exit 3' WINCH; read line; echo got $line; while :; do sleep 0.05; done"
    agent.start("x", "sh", "-c", script, pty={"rows": 11, "columns": 40}, stdin_open=True)
    agent.wait(lambda: b"11 40" in agent.output_of("x"))
    agent.request("stdin", b"hello\n", exec_id="x")
    agent.wait(lambda: b"hello\r\ngot hello\r\n" in agent.output_of("x"))
    agent.request("resize", exec_id="x", rows=33, columns=99)
    assert agent.end_of("x")["exit_code"] == 3
    assert agent.output_of("x").endswith(b"33 99\r\n")
    with pytest.raises(AgentRefused, match="no-terminal"):
        agent.request("resize", exec_id="x", rows=1, columns=1)


def test_the_interrupt_character_reaches_who_is_in_the_foreground(agent: AgentProcess) -> None:
    agent.start("x", "cat", stdin=b"here\n", pty={"rows": 5, "columns": 20}, stdin_open=True)
    agent.wait(lambda: agent.output_of("x").count(b"here") == 2)  # the terminal's echo, and the program's
    agent.request("stdin", b"\x03", exec_id="x")
    assert agent.end_of("x")["signal"] == signal.SIGINT


def test_signals_reach_the_whole_group(agent: AgentProcess) -> None:
    agent.start("x", "sh", "-c", "sleep 60 & echo $!; wait")
    agent.wait(lambda: b"\n" in agent.output_of("x"))
    child = int(agent.output_of("x"))
    agent.request("signal", exec_id="x", signal=15)
    end = agent.end_of("x")
    assert (end["outcome"], end["signal"], end["exit_code"]) == ("signaled", 15, None)
    agent.wait(lambda: agent.request("ping") is not None and not psutil.pid_exists(child))
    agent.request("signal", exec_id="x", signal=9)
    with pytest.raises(AgentRefused, match="no-such-program"):
        agent.request("signal", exec_id="nobody", signal=9)


def test_a_program_that_ignores_its_end_of_time_is_killed(agent: AgentProcess) -> None:
    began = time.monotonic()
    agent.start("x", "sh", "-c", "trap '' TERM; echo on; while :; do sleep 0.1; done", timeout_s=0.2)
    end = agent.end_of("x")
    assert (end["outcome"], end["signal"]) == ("timed-out", 9)
    assert time.monotonic() - began >= 2
    agent.start("y", "sleep", "60", timeout_s=0.1)
    assert agent.end_of("y")["outcome"] == "timed-out"


def test_a_group_that_forks_without_end_is_ended_with_its_time(agent: AgentProcess) -> None:
    """Each process starts another and goes; the leader is long gone when its time is over."""
    agent.start("x", "sh", "-c", 'f() { sleep 0.05; f & }; f; echo "$$"', timeout_s=1)
    end = agent.end_of("x")
    assert end["outcome"] in {"exited", "timed-out"}
    group = int(agent.output_of("x"))
    agent.wait(lambda: agent.request("ping") is not None and not members_of(group))


def members_of(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def test_a_program_whose_children_hold_its_pipes_ends_all_the_same(agent: AgentProcess) -> None:
    agent.start("x", "sh", "-c", "sleep 30 & echo done")
    assert agent.end_of("x")["exit_code"] == 0
    assert agent.output_of("x") == b"done\n"


def test_a_flood_is_held_up_until_it_is_confirmed(agent: AgentProcess) -> None:
    agent.start("x", "sh", "-c", "yes | head -c 3000000; echo end")
    agent.wait(lambda: len(agent.output_of("x")) > UNCONFIRMED_BYTES_MAX)
    for _ in range(5):
        agent.request("ping")
    held = len(agent.output_of("x"))
    assert held <= UNCONFIRMED_BYTES_MAX + 2 * 65536
    while not any(e.header.get("event") == "end" for e in agent.events):
        agent.request("confirm", exec_id="x", offset=len(agent.output_of("x")))
    assert agent.output_of("x") == b"y\n" * 1_500_000 + b"end\n"
    assert agent.end_of("x")["offset"] == 3_000_004


def test_attaching_sends_again_what_was_not_confirmed(agent: AgentProcess) -> None:
    agent.start("x", "sh", "-c", "echo one; echo two; exit 4")
    agent.end_of("x")
    whole = agent.output_of("x")
    agent.events.clear()
    described = agent.request("attach", exec_id="x").header
    assert agent.end_of("x")["exit_code"] == 4
    assert agent.output_of("x") == whole
    assert described["first_offset"] == 0
    agent.events.clear()
    agent.request("attach", exec_id="x", offset=len(whole))
    assert agent.end_of("x")["exit_code"] == 4
    assert agent.output_of("x") == b""
    agent.request("forget", exec_id="x")
    agent.request("forget", exec_id="x")
    with pytest.raises(AgentRefused, match="no-such-program"):
        agent.request("attach", exec_id="x")


def test_a_new_host_hears_nothing_of_what_the_old_one_did_not_read(agent: AgentProcess) -> None:
    agent.start("x", "sh", "-c", "echo for the old; sleep 0.1; echo more; exit 5")
    known = agent.hello(epoch="epoch-2")["programs"]
    assert [one["exec_id"] for one in known] == ["x"]
    agent.events.clear()
    agent.request("attach", exec_id="x")
    assert agent.end_of("x")["exit_code"] == 5
    by_offset = {e.header["offset"]: e.body for e in agent.events if e.header.get("event") == "output"}
    assert b"".join(by_offset[offset] for offset in sorted(by_offset)) == b"for the old\nmore\n"


def test_one_id_is_one_program(agent: AgentProcess) -> None:
    agent.start("x", "sleep", "60")
    with pytest.raises(AgentRefused, match="exec-exists"):
        agent.start("x", "true")
    (known,) = agent.request("programs").header["programs"]
    assert (known["exec_id"], known["running"], known["remaining_s"]) == ("x", True, None)
    agent.request("forget", exec_id="x")
    assert len(agent.request("programs").header["programs"]) == 1, "one that runs is not forgotten"
    agent.request("signal", exec_id="x", signal=9)
    agent.end_of("x")


def test_many_programs_side_by_side_and_only_so_many_ends_are_kept(agent: AgentProcess) -> None:
    count = ENDED_KEPT_MAX + 20
    for number in range(count):
        agent.start(f"x-{number}", "echo", str(number))
    for number in range(count):
        agent.end_of(f"x-{number}")
        assert agent.output_of(f"x-{number}") == f"{number}\n".encode()
    kept = [one["exec_id"] for one in agent.request("programs").header["programs"]]
    assert len(kept) == ENDED_KEPT_MAX


def test_orphans_are_reaped(agent: AgentProcess) -> None:
    agent.start("x", "sh", "-c", "(sh -c 'exit 3' & echo $!) ; true")
    agent.end_of("x")
    orphan = int(agent.output_of("x"))
    agent.wait(lambda: agent.request("ping") is not None and not psutil.pid_exists(orphan))


def test_a_request_that_makes_no_sense_is_answered_and_harms_nothing(agent: AgentProcess) -> None:
    for op, header, code in (
        ("dance", {}, "unknown-operation"),
        ("signal", {"exec_id": "x"}, "malformed-request"),
        ("read", {"path": "relative"}, "illegal-path"),
        ("clock", {"clock_ns": "noon"}, "malformed-request"),
    ):
        with pytest.raises(AgentRefused) as refused:
            agent.request(op, **header)
        assert refused.value.code == code
    agent.channel.sendall(b"noise \x01\xff\x00{}\x00[]\x00")
    assert agent.request("ping").header["ok"]


def test_the_agent_waits_for_a_host_that_went_away(tmp_path: Path) -> None:
    with running_agent(tmp_path) as agent:
        agent.start("x", "sh", "-c", "echo before; sleep 0.2; echo after")
        agent.wait(lambda: b"before" in agent.output_of("x"))
        agent.channel.close()
        spent_s = psutil.Process(agent.process.pid).cpu_times().user
        assert agent.process.poll() is None
        with pytest.raises(psutil.TimeoutExpired):
            psutil.Process(agent.process.pid).wait(1.5)
        assert psutil.Process(agent.process.pid).cpu_times().user - spent_s < 0.2, "waiting is no work"

"""Who the machine is: told by the host, published as a whole, and learned by programs that watch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.guest_agent import running_agent
from torpor_guest_agent import torpor_guest


def noted(folder: Path) -> list[str]:
    return (folder / "noted").read_text().splitlines()


def test_a_hello_steps_the_clock_reseeds_names_and_publishes(tmp_path: Path) -> None:
    with running_agent(tmp_path) as agent:
        epoch: dict[str, Any] = json.loads((tmp_path / "epoch").read_text())
        assert (epoch["session_id"], epoch["incarnation"], epoch["epoch"]) == ("s-1", 1, "epoch-1")
        assert noted(tmp_path) == ["clock 1", f"entropy {b'entropy'.hex()}", "hostname s-1"]
        assert (tmp_path / "hostname").read_text() == "s-1\n"
        assert (tmp_path / "machine-id").read_text() == "0" * 32 + "\n"
        before = (tmp_path / "hosts").stat().st_ino
        agent.hello(epoch="epoch-2", incarnation=2, clock_ns=5)
        assert json.loads((tmp_path / "epoch").read_text())["epoch"] == "epoch-2"
        assert noted(tmp_path)[3:] == ["clock 5", f"entropy {b'entropy'.hex()}"], "the names are the same still"
        assert (tmp_path / "hosts").stat().st_ino == before
        _, output = agent.run("sh", "-c", "echo $TORPOR_INCARNATION $TORPOR_EPOCH_FILE")
        assert output == f"2 {tmp_path}/epoch\n".encode()


def test_a_new_name_takes_the_place_of_the_old_and_leaves_the_users_lines(tmp_path: Path) -> None:
    with running_agent(tmp_path) as agent:
        with (tmp_path / "hosts").open("a") as hosts:
            hosts.write("10.0.0.1 mine\n")
        agent.hello(hostname="fork-1")
        lines = (tmp_path / "hosts").read_text().splitlines()
        assert "10.0.0.1 mine" in lines
        assert [line for line in lines if "s-1" in line] == []
        assert lines[-1].split()[:2] == ["127.0.1.1", "fork-1"]


def test_what_an_epoch_lacks_is_refused_and_changes_no_name(tmp_path: Path) -> None:
    with running_agent(tmp_path) as agent:
        with pytest.raises(Exception, match="malformed-request"):
            agent.request("hello", b"e", clock_ns=1)
        assert json.loads((tmp_path / "epoch").read_text())["epoch"] == "epoch-1"


def test_a_program_that_watches_the_epoch_becomes_somebody_new(tmp_path: Path) -> None:
    script = """
import random, sys
import torpor_guest
random.seed(1)
state, told = random.getstate(), []
thread = torpor_guest.on_epoch(told.append)
print("watching", flush=True)
sys.stdin.readline()
while not told: thread.join(0.02)
print(told[0]["epoch"], random.getstate() != state)
"""
    with running_agent(tmp_path) as agent:
        environment = {
            "TORPOR_EPOCH_FILE": str(tmp_path / "epoch"),
            "PYTHONPATH": str(Path(torpor_guest.__file__).parent),
        }
        process = subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"watching\n"
        agent.hello(epoch="epoch-9")
        said, _ = process.communicate(b"\n", timeout=20)
        assert said == b"epoch-9 True\n"

"""The demo, as the README begins with it: on a real machine, everything it says is so, and nothing is left behind."""

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.embedded import TORPOR
from tests.support.qemu import need_qemu
from torpor.demo.stage import Stage
from torpor.embedded.layout import DataDir

DEMO = [str(TORPOR), "demo"]
DEMO_S_MAX = 240.0


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    need_qemu()
    yield tmp_path / "demo"
    shutil.rmtree(tmp_path / "demo", ignore_errors=True)


def left(place: Path) -> list[str]:
    return Stage(DataDir(place)).left()


def test_everything_it_says_is_so(place: Path) -> None:
    ended = subprocess.run(
        [*DEMO, "--json", "--data-dir", str(place)], capture_output=True, text=True, timeout=DEMO_S_MAX, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout)
    assert told["fix"] == "largest"
    assert all(claim["holds"] for claim in told["claims"])
    assert len(told["claims"]) >= 15
    assert told["audit"]["ok"]
    positions = [one["position"] for one in told["timeline"]]
    assert positions == sorted(positions)
    assert {"session-suspended.v1", "session-resumed.v1", "session-forked.v1"} <= {o["type"] for o in told["timeline"]}
    assert float(told["bill"]["amount"]) > 0
    assert left(place) == []


def test_ctrl_c_leaves_nothing(place: Path) -> None:
    with subprocess.Popen(
        [*DEMO, "--data-dir", str(place)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if "asleep" in line:
                break
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=DEMO_S_MAX)
    assert running.returncode == 130
    assert left(place) == []


def test_another_wholes_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.db").touch()
    ended = subprocess.run(
        [*DEMO, "--data-dir", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "is no demo's directory" in ended.stderr
    assert (tmp_path / "log.db").exists()

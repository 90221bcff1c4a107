"""What keeps the whole from starting is said, with what to do about it, and nothing is left running."""

import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.embedded import EmbeddedWhole, torpor

pytestmark = pytest.mark.e2e


def refused(data_dir: Path, *options: str, **keywords: dict[str, str]) -> dict[str, str]:
    done = torpor(data_dir, "up", "--driver", "simulated", "--json", *options, **keywords)  # type: ignore[arg-type]
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    error: dict[str, str] = json.loads(done.stdout.splitlines()[-1])["error"]
    assert error["advice"]
    return error


def test_a_busy_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refused(tmp_path / "data", "--nats-port", str(port))
    assert (error["code"], str(port) in error["message"]) == ("port-busy", True)


def test_a_nats_server_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "nats-server"
    old.write_text("#!/bin/sh\necho nats-server: v2.10.4\n")
    old.chmod(0o755)
    error = refused(tmp_path / "data", env={"TORPOR_NATS_SERVER": str(old)})
    assert (error["code"], "2.10.4" in error["message"]) == ("nats-server-too-old", True)


def test_a_nats_server_that_is_not_there(tmp_path: Path) -> None:
    assert refused(tmp_path / "data", env={"TORPOR_NATS_SERVER": "/nowhere/nats"})["code"] == "no-nats-server"


def test_a_data_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    assert refused(tmp_path / "data")["code"] == "not-writable"


def test_a_full_disk(disk_of: Callable[[str], Path]) -> None:
    error = refused(disk_of("8m") / "data")
    assert (error["code"], "MiB" in error["message"]) == ("disk-full", True)


def test_a_read_only_disk(disk_of: Callable[[str], Path]) -> None:
    small_disk = disk_of("8m")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert refused(small_disk / "data")["code"] == "not-writable"


def test_a_driver_that_does_not_exist_is_wrong_usage(tmp_path: Path) -> None:
    done = torpor(tmp_path / "data", "up", "--driver", "hyperspace")
    assert done.returncode == 2
    assert "simulated" in done.stderr


def test_a_driver_that_does_not_work_here_is_refused_as_the_doctor_says(tmp_path: Path) -> None:
    findings = json.loads(torpor(tmp_path / "data", "doctor", "--json").stdout)["findings"]
    drivers = {finding["name"].removeprefix("driver "): finding for finding in findings if "driver" in finding["name"]}
    assert drivers["simulated"]["state"] == "ok"
    for name, finding in drivers.items():
        if finding["state"] != "ok":
            done = torpor(tmp_path / "data", "up", "--driver", name, "--json")
            assert done.returncode == 1
            error = json.loads(done.stdout.splitlines()[-1])["error"]
            assert (error["code"], finding["detail"] in error["message"]) == ("driver-unavailable", True)


def test_two_wholes_run_side_by_side(tmp_path: Path) -> None:
    wholes = [EmbeddedWhole(tmp_path / name) for name in ("one", "two")]
    try:
        urls = {whole.until("ready")["nats_url"] for whole in wholes}
        assert len(urls) == 2
        first = wholes[0].call("session", "create")["session_id"]
        assert wholes[1].call("session", "list") == []
        assert [view["session_id"] for view in wholes[0].call("session", "list")] == [first]
    finally:
        for whole in wholes:
            whole.close()

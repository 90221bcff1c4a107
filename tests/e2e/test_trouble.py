"""Trouble below a running whole: it is said what is wrong, nothing is lost, and no service dies of it."""

import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.embedded import EmbeddedWhole

pytestmark = pytest.mark.e2e


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", place], check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_disk_that_fills_up_is_told_and_survived(small_disk: Path) -> None:
    whole = EmbeddedWhole(small_disk / "data")
    try:
        whole.until("ready")
        session = whole.call("session", "create")["session_id"]
        subprocess.run(["dd", "if=/dev/zero", f"of={small_disk}/fill", "bs=1M"], check=False, capture_output=True)
        error = whole.refused("session", "create", "ses-later", "--command-id", "order-1", "--timeout-s", "12")
        assert (error["code"], error["exit_code"]) == ("unavailable", 3)
        assert any("full" in note and "free some space" in note for note in error["notes"]), error
        (small_disk / "fill").unlink()
        later = whole.call("session", "create", "ses-later", "--command-id", "order-1")
        assert later["state"] == "running"
        assert whole.call("session", "exec", session, "--", "echo", "on")["stdout"] == "on\n"
        assert whole.call("audit", "verify")["ok"]
        assert [process["restarts"] for process in whole.call("status")["processes"]] == [0] * 7
    finally:
        whole.close()


def test_a_locked_log_is_told_and_waited_for(whole: EmbeddedWhole) -> None:
    log = sqlite3.connect(whole.data.log_database, isolation_level=None)
    try:
        log.execute("BEGIN IMMEDIATE")
        error = whole.refused("session", "create", "ses-late", "--command-id", "order-2", "--timeout-s", "15")
        assert (error["code"], error["exit_code"]) == ("unavailable", 3)
        assert any("locked" in note or "busy" in note for note in error["notes"]), error
        log.execute("ROLLBACK")
    finally:
        log.close()
    assert whole.call("session", "create", "ses-late", "--command-id", "order-2")["state"] == "running"
    assert [process["restarts"] for process in whole.call("status")["processes"]] == [0] * 7

"""Trouble below a running whole: it is said what is wrong, nothing is lost, and no service dies of it."""

import json
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.embedded import EmbeddedWhole, RefusedError, torpor

pytestmark = pytest.mark.e2e

READY_S_MAX = 60.0


def restarts_once_ready(whole: EmbeddedWhole) -> dict[str, int]:
    """How often each process was started again, once all answer: the server may be starting just now."""
    deadline = time.monotonic() + READY_S_MAX
    while True:
        try:
            status = whole.call("status")
        except RefusedError:
            if time.monotonic() > deadline:
                raise
        else:
            return {process["name"]: process["restarts"] for process in status["processes"]}


def test_a_disk_that_fills_up_is_told_and_survived(disk_of: Callable[[str], Path]) -> None:
    small_disk = disk_of("1g")
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
        restarts = restarts_once_ready(whole)
        restarts.pop("nats-server")  # its streams may have to be got going again
        assert set(restarts.values()) == {0}
    finally:
        whole.close()


def test_a_small_disk_that_fills_up_under_the_streams_is_got_over(disk_of: Callable[[str], Path]) -> None:
    """A stream that could not write once never tries again: the server must be started again, and is."""
    small_disk = disk_of("120m")
    whole = EmbeddedWhole(small_disk / "data")
    try:
        whole.until("ready")
        session = whole.call("session", "create")["session_id"]
        for block in ("1M", "4k"):
            with (small_disk / f"fill-{block}").open("wb") as fill:
                subprocess.run(
                    ["dd", "if=/dev/zero", f"bs={block}"], stdout=fill, stderr=subprocess.DEVNULL, check=False
                )
        for _ in range(3):  # the server says that a message is stored before it has written it
            whole.refused("session", "exec", session, "--timeout-s", "4", "--", "echo", "x" * 100_000)
        for fill_file in small_disk.glob("fill-*"):
            fill_file.unlink()
        assert whole.call("session", "exec", session, "--", "echo", "on")["stdout"] == "on\n"
        whole.until("stuck", process="nats-server")
        assert whole.call("audit", "verify")["ok"]
        restarts = restarts_once_ready(whole)
        assert restarts.pop("nats-server") == 1
        assert set(restarts.values()) == {0}
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


def test_a_flipped_bit_in_the_stream_is_found_and_the_stream_made_afresh(start: Callable[..., EmbeddedWhole]) -> None:
    first = start()
    first.until("ready")
    sessions = [first.call("session", "create")["session_id"] for _ in range(3)]
    for session in sessions:
        first.call("session", "suspend", session)
    assert first.stop() == 0
    [block] = first.data.nats.glob("store/**/EVENTS/msgs/*.blk")
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 0x40
    block.write_bytes(content)
    second = start()
    second.until("ready")
    damaged = torpor(second.data.root, "audit", "verify", "--json")
    found = json.loads(damaged.stdout)
    assert (damaged.returncode, found["findings"][0]["place"]) == (1, "stream")
    assert 1 <= found["first_bad_position"] <= found["position"]
    assert second.call("session", "resume", sessions[0])["state"] == "running", "the log is the truth, not its copy"
    second.call("audit", "rebuild", "--stream")
    assert second.call("audit", "verify")["ok"]

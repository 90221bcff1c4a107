"""What sleeping sessions are kept as: listed, drawn, read whole by the installed command, in a directory and on S3."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.embedded import EmbeddedWhole, torpor
from tests.support.s3 import S3Server

pytestmark = pytest.mark.e2e


def slept(whole: EmbeddedWhole, times: int) -> str:
    """A session that has written something and slept, so often."""
    session_id = str(whole.call("session", "create")["session_id"])
    for number in range(times):
        whole.call("session", "exec", session_id, "--", "write", f"/note-{number}", "remember")
        whole.call("session", "suspend", session_id)
    return session_id


def checkpoints_of(whole: EmbeddedWhole, session_id: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = whole.call("checkpoint", "list", "--session-id", session_id)
    return listed


def pack_of(whole: EmbeddedWhole, checkpoint_id: str) -> Path:
    (view,) = [view for view in whole.call("checkpoint", "list") if view["checkpoint_id"] == checkpoint_id]
    (path,) = (whole.data.root / "chunks").rglob(view["packs"][0]["address"])
    return path


def test_checkpoints_are_listed_and_drawn(whole: EmbeddedWhole) -> None:
    session_id = slept(whole, 3)
    listed = checkpoints_of(whole, session_id)
    assert [view["state"] for view in listed] == ["kept"] * 3
    assert all(view["stored_bytes"] > 0 for view in listed)
    tree = whole.call("checkpoint", "tree", session_id)
    assert [node["depth"] for node in tree] == [0, 1, 2]
    assert [node["parent_id"] for node in tree] == [None, *(node["checkpoint_id"] for node in tree[:2])]
    drawn = torpor(whole.data.root, "checkpoint", "tree", session_id).stdout.splitlines()
    assert len(drawn) == 3
    assert all(node["checkpoint_id"] in line for node, line in zip(tree, drawn, strict=True))
    table = torpor(whole.data.root, "checkpoint", "list", "--session-id", session_id).stdout
    newest = max(listed, key=lambda view: view["recorded_at"])
    (line,) = [line for line in table.splitlines() if line.startswith(newest["checkpoint_id"])]
    assert f"session {session_id}" in line


def test_checkpoints_are_read_whole(whole: EmbeddedWhole) -> None:
    session_id = slept(whole, 2)
    ids = [view["checkpoint_id"] for view in checkpoints_of(whole, session_id)]
    verified = whole.call("checkpoint", "verify", *ids)
    assert verified["ok"]
    assert [one["checkpoint_id"] for one in verified["checkpoints"]] == ids
    assert whole.call("checkpoint", "verify")["ok"], "all that are kept"
    unknown = torpor(whole.data.root, "checkpoint", "verify", "ckp-nobody", "--json")
    assert unknown.returncode == 1
    assert json.loads(unknown.stdout)["error"]["code"] == "checkpoint-unknown"


def test_a_flipped_byte_is_found_and_never_run(start: Callable[..., EmbeddedWhole]) -> None:
    whole = start()
    whole.until("ready")
    session_id = slept(whole, 2)
    first, second = (node["checkpoint_id"] for node in whole.call("checkpoint", "tree", session_id))
    path = pack_of(whole, second)
    data = path.read_bytes()
    path.chmod(0o600)
    at = len(data) - 100
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    os.sync()
    resumed = torpor(whole.data.root, "session", "resume", session_id, "--json")
    assert resumed.returncode == 1
    assert "checkpoint-part-corrupt" in resumed.stdout
    done = torpor(whole.data.root, "checkpoint", "verify", first, "--json")
    assert done.returncode == 0, "its parent is intact"
    path.write_bytes(data)
    assert whole.call("session", "resume", session_id)["state"] == "running"
    assert whole.call("session", "exec", session_id, "--", "cat", "/note-1")["stdout"].strip() == "remember"


def test_verify_exits_1_when_a_pack_is_gone(start: Callable[..., EmbeddedWhole]) -> None:
    whole = start()
    whole.until("ready")
    session_id = slept(whole, 1)
    (view,) = checkpoints_of(whole, session_id)
    pack_of(whole, view["checkpoint_id"]).rename(whole.data.root / "away")
    done = torpor(whole.data.root, "checkpoint", "verify", view["checkpoint_id"])
    assert done.returncode == 1
    assert "checkpoint-part-missing" in done.stdout


def test_a_whole_keeps_its_checkpoints_on_s3(
    start: Callable[..., EmbeddedWhole], tmp_path: Path, s3_server: S3Server
) -> None:
    bucket, key_file = s3_server.bucket(), tmp_path / "chunks.key"
    key_file.write_text(f"1 {os.urandom(32).hex()}\n")
    environment = {
        **s3_server.environment(),
        "TORPOR_CHUNKS_URL": f"s3://{bucket}/torpor",
        "TORPOR_CHUNKS_KEY_FILE": str(key_file),
    }
    whole = start(env=environment)
    whole.until("ready")
    session_id = slept(whole, 2)
    assert whole.call("session", "exec", session_id, "--", "cat", "/note-0")["stdout"].strip() == "remember"
    assert whole.call("checkpoint", "verify")["ok"]
    assert list((whole.data.root / "chunks").rglob("pack-*")) == []

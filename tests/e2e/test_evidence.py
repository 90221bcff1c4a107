"""The log proves what happened: verified, carried away, rebuilt, replayed, by the installed command."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.embedded import EmbeddedWhole, torpor

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def session(whole: EmbeddedWhole) -> str:
    """A session with a short life behind it."""
    made = str(whole.call("session", "create")["session_id"])
    whole.call("session", "exec", made, "--", "echo", "hi")
    whole.call("session", "suspend", made)
    return made


def test_the_log_and_its_copies_verify(whole: EmbeddedWhole, session: str) -> None:
    verified = whole.call("audit", "verify")
    assert verified["ok"]
    assert verified["rows"] == verified["stream_messages"] == verified["position"]
    people = torpor(whole.data.root, "audit", "verify")
    assert (people.returncode, "nothing is wrong" in people.stdout) == (0, True)


def test_an_exported_bundle_proves_itself_and_a_changed_byte_is_found(
    whole: EmbeddedWhole, session: str, tmp_path: Path
) -> None:
    bundle = tmp_path / "evidence.json"
    exported = whole.call("audit", "export", "--session", session, str(bundle))
    assert exported["events"] > 0
    nowhere = tmp_path / "no-whole-here"
    key = ("--public-key", exported["public_key"])
    proved = torpor(nowhere, "audit", "verify", str(bundle), *key)
    assert (proved.returncode, "nothing is wrong" in proved.stdout) == (0, True), proved.stderr
    assert torpor(whole.data.root, "audit", "verify", str(bundle)).returncode == 0
    assert "no-public-key" in torpor(nowhere, "audit", "verify", str(bundle), "--json").stdout
    original = bundle.read_bytes()
    at = original.index(b"echo")
    bundle.write_bytes(original[:at] + b"Echo" + original[at + 4 :])
    changed = torpor(nowhere, "audit", "verify", str(bundle), *key, "--json")
    assert changed.returncode == 1
    assert not json.loads(changed.stdout)["ok"]


def test_the_stream_is_rebuilt_from_the_log(whole: EmbeddedWhole, session: str) -> None:
    before = whole.call("events", "--session", session)
    rebuilt = whole.call("audit", "rebuild", "--stream")
    assert rebuilt["position"] >= before[-1]["position"]
    assert whole.call("events", "--session", session) == before
    assert whole.call("audit", "verify")["ok"]
    assert whole.call("session", "resume", session)["state"] == "running"


def test_the_views_are_refolded_and_say_the_same(whole: EmbeddedWhole, session: str) -> None:
    shown = whole.call("session", "show", session)
    rebuilt = whole.call("audit", "rebuild", "--views")
    assert rebuilt["views"]
    assert [view["differences_total"] for view in rebuilt["views"]] == [0] * len(rebuilt["views"])
    assert whole.call("session", "show", session) == shown


def test_a_replay_ends_in_the_present_state(whole: EmbeddedWhole, session: str) -> None:
    steps: list[dict[str, Any]] = whole.call("audit", "replay", session)
    assert [step["version"] for step in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["type"] == whole.call("events", "--session", session)[-1]["type"]


def test_a_changed_row_is_found_and_named(whole: EmbeddedWhole, session: str, tmp_path: Path) -> None:
    """Last in this module: it damages the log."""
    import sqlite3  # noqa: PLC0415

    victim = whole.call("events", "--session", session)[1]["position"]
    with sqlite3.connect(whole.data.log_database) as log:
        # Whoever owns the file can take the guards away; that is what the digests are for.
        for (name,) in log.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            log.execute(f"DROP TRIGGER {name}")
        changed = "CAST(replace(CAST(data AS TEXT), 'ses-', 'sus-') AS BLOB)"
        assert log.execute(f"UPDATE events SET data = {changed} WHERE position = ?", (victim,)).rowcount == 1
    log.close()
    found = torpor(whole.data.root, "audit", "verify", "--json")
    assert found.returncode == 1
    assert json.loads(found.stdout)["first_bad_position"] == victim

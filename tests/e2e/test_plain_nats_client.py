"""Any NATS client can take part: the README's two programs, run as they stand there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.embedded import EmbeddedWhole, clean_environment

pytestmark = pytest.mark.e2e
README = Path(__file__).parents[2] / "README.md"


def program(name: str) -> str:
    """The Python block of the README that is marked `<!-- program: name -->`."""
    found = re.search(rf"<!-- program: {name} -->\n```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, f"the README has no program {name}"
    return found.group(1)


def run(whole: EmbeddedWhole, name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program(name)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**clean_environment(), "TORPOR_DATA_DIR": str(whole.data.root)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_sdk_program_of_the_readme(whole: EmbeddedWhole) -> None:
    lines = run(whole, "sdk").splitlines()
    assert lines[:2] == ["hi", "1 2 3"]


def test_a_plain_nats_client_creates_and_runs_and_is_refused_with_a_code(whole: EmbeddedWhole) -> None:
    lines = run(whole, "plain-nats").splitlines()
    created, asked, refused = (json.loads(line) for line in (lines[0], lines[1], lines[-1]))
    assert created["receipt"]["version"] >= 1
    assert asked["receipt"]["position"] > created["receipt"]["position"]
    assert "hi" in lines
    assert refused["refusal"]["code"] == "session-exists"
    session = created["receipt"]["stream"]
    assert whole.call("session", "show", session)["state"] == "running"

"""What the demo says is looked at: a statement that does not hold ends it; and its project has one right answer."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torpor.demo.running import MARK, own_directory
from torpor.demo.story import GUEST
from torpor.demo.telling import NotSo, Telling
from torpor.errors import CannotStart

FIXES = sorted(path.stem for path in (GUEST / "fixes").glob("*.py"))


def passes(project: Path) -> bool:
    command = [sys.executable, "-B", "-m", "unittest", "discover", "-s", "tests", "-t", "."]
    ended = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=60, check=False)
    assert "Ran 8 tests" in ended.stderr
    return ended.returncode == 0


def test_a_statement_that_does_not_hold_ends_the_story() -> None:
    telling = Telling(to=io.StringIO())
    telling.claim("one is one", holds=True, found=1)
    with pytest.raises(NotSo, match="one is two; found: 1"):
        telling.claim("one is two", holds=False, found=1)
    assert [claim["holds"] for claim in telling.claims] == [True, False]


def test_times_stand_below_each_other() -> None:
    to = io.StringIO()
    telling = Telling(to=to)
    telling.say("short", 1.0)
    telling.say("somewhat longer", 12.0)
    ends = [len(line) for line in to.getvalue().splitlines()]
    assert ends[0] == ends[1]


def test_the_project_has_a_bug() -> None:
    assert not passes(GUEST / "project")


@pytest.mark.parametrize("fix", FIXES)
def test_one_idea_of_five_is_right(fix: str, tmp_path: Path) -> None:
    project = shutil.copytree(GUEST / "project", tmp_path / "project")
    shutil.copy(GUEST / "fixes" / f"{fix}.py", project / "shares" / "split.py")
    assert passes(project) == (fix == "largest")
    assert len(FIXES) == 5


def test_a_demo_takes_the_place_of_an_earlier_one_and_of_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(CannotStart, match="no demo's directory"):
        own_directory(tmp_path)
    assert (tmp_path / "precious").exists()
    data = own_directory(tmp_path / "demo")
    (data.root / "log.db").touch()
    own_directory(tmp_path / "demo")
    assert [path.name for path in data.root.iterdir()] == [MARK]

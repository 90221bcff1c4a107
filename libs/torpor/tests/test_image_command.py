"""`torpor image`, as a user has it; the programs that take a minute are small ones."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.image_tools import ImageTools

pytestmark = pytest.mark.skipif(
    not all(shutil.which(tool) for tool in ("mke2fs", "dpkg-deb")), reason="needs e2fsprogs and dpkg"
)
TORPOR = Path(sys.executable).parent / "torpor"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "recipes/default").mkdir(parents=True)
    (tmp_path / "recipes/default/recipe.toml").write_text('name = "default"\npackages = ["python3"]\ndisk_mib = 64\n')
    (tmp_path / "mine.toml").write_text('name = "mine"\nbase = "default"\ncommands = ["echo oh; exit 3"]\n')
    return {
        **os.environ,
        "PATH": ImageTools(tmp_path / "tools").path,
        "TORPOR_IMAGES_DIR": str(tmp_path / "recipes"),
        "TORPOR_CACHE_DIR": str(tmp_path / "cache"),
    }


def image(*arguments: str, env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [str(TORPOR), "image", *arguments]
    cwd = Path(env["TORPOR_CACHE_DIR"]).parent
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env, cwd=cwd)


def answer(*arguments: str, env: dict[str, str]) -> Any:
    return json.loads(image(*arguments, "--json", env=env).stdout)


def test_an_image_is_built_with_progress_and_then_is_there(environment: dict[str, str]) -> None:
    assert [(one["name"], one["state"]) for one in answer("list", env=environment)] == [("default", "not built")]
    first = image("build", env=environment)
    assert first.returncode == 0, first.stderr
    assert "installing" in first.stderr
    assert first.stdout.startswith("default  built in ")
    again = image("build", "default", env=environment)
    assert (again.returncode, again.stderr) == (0, "")
    assert "is there already" in again.stdout
    built = answer("build", env=environment)
    assert built["built"] is False
    assert Path(built["folder"], "rootfs.ext4").is_file()
    (listed,) = answer("list", env=environment)
    assert (listed["state"], listed["key"]) == ("ready", built["image"]["key"])
    shown = image("list", env=environment).stdout.splitlines()
    assert [line.split()[:2] for line in shown] == [["IMAGE", "STATE"], ["default", "ready"]]


def test_a_recipe_that_fails_is_told_and_is_in_no_list(environment: dict[str, str]) -> None:
    failed = image("build", "mine.toml", env=environment)
    assert failed.returncode == 1
    assert "torpor: command 1 of mine ended with 3: echo oh; exit 3" in failed.stderr
    assert "correct the recipe" in failed.stderr.splitlines()[-1]
    assert answer("build", "mine.toml", env=environment)["error"]["code"] == "image-command-failed"
    assert {one["name"] for one in answer("list", env=environment)} == {"default"}


def test_an_unknown_recipe_is_refused(environment: dict[str, str]) -> None:
    error = answer("build", "defualt", env=environment)["error"]
    assert error["code"] == "unknown-image"
    assert "default" in error["advice"]
    assert answer("build", "./none.toml", env=environment)["error"]["code"] == "malformed-recipe"

"""Writes the exact pins: `deploy/pins.txt` (with hashes, without addresses) and the constraints in `pyproject.toml`.

`python deploy/pins.py` upgrades everything; `--keep` only adds what is new; `--check` fails when the two differ from
what the workspace asks for. Resolving needs the package index that uv is set up with; neither file names it.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PINS: Final = ROOT / "deploy" / "pins.txt"
PROJECT: Final = ROOT / "pyproject.toml"
HEADER: Final = "# Written by deploy/pins.py; do not edit. Exact versions and hashes of what deploy/run installs.\n"
BLOCK: Final = re.compile(r"(# pins: written by deploy/pins\.py\nconstraint-dependencies = \[\n)(.*?)(\]\n)", re.DOTALL)
PIN: Final = re.compile(r"^([A-Za-z0-9_.-]+==[^ ;\\]+)( ; [^\\]+?)?( \\)?$", re.MULTILINE)
ADDRESS: Final = re.compile(r"https?://")


def _uv(*arguments: str) -> str:
    return subprocess.run(["uv", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603, S607


def _export() -> str:
    text = HEADER + _uv(
        "export", "--quiet", "--all-groups", "--no-emit-workspace", "--no-header", "--no-annotate",
        "--format", "requirements-txt",
    )  # fmt: skip
    if ADDRESS.search(text):
        raise SystemExit("deploy/pins.py: the export names an address; it must not be committed")
    return text


def _project(pins: str, project: str) -> str:
    found = [(name, (marker or "").strip().lstrip("; ")) for name, marker, _ in PIN.findall(pins)]
    lines = "".join(f'    "{name}{"; " + marker if marker else ""}",\n' for name, marker in found)
    return BLOCK.sub(lambda match: match[1] + lines + match[3], project)


def main() -> None:
    """Run the command; exits 1 with `--check` when a file is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="fail if the files are out of date")
    choice.add_argument("--keep", action="store_true", help="keep the versions pinned now; only add and remove")
    options = parser.parse_args()
    project = PROJECT.read_text()
    if not (options.check or options.keep):
        PROJECT.write_text(BLOCK.sub(lambda match: match[1] + match[3], project))
    _uv("lock", "--quiet", *([] if options.check or options.keep else ["--upgrade"]))
    pins = _export()
    wanted = _project(pins, PROJECT.read_text())
    if options.check:
        if pins != PINS.read_text() or wanted != project:
            raise SystemExit("deploy/pins.py: the pins are out of date; run: task pins")
        return
    PINS.write_text(pins)
    PROJECT.write_text(wanted)
    _uv("lock", "--quiet")
    sys.stdout.write(f"{len(PIN.findall(pins))} packages pinned\n")


if __name__ == "__main__":
    main()

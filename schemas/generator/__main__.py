"""`python -m schemas.generator` writes what is made from the code; with `--check` it shows what differs and exits 1."""

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from schemas.generator import asyncapi, json_schemas, lifecycles

ROOM: Final = Path(__file__).resolve().parents[1]
FOLDERS: Final = ("commands", "events", "observations", "queries", "replies")
"""Folders in which nothing is written by hand: a file that is no longer made is removed."""


class _Plain(yaml.SafeDumper):
    """Repeats what occurs twice instead of pointing at it."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  (the signature is the library's)
        return True


def made() -> dict[str, str]:
    """Path below `schemas/` -> text of everything that is made from the code; the same on every run."""
    texts = {path: json.dumps(schema, indent=2) + "\n" for path, schema in json_schemas.schemas().items()}
    head = "# Made by python -m schemas.generator; do not edit.\n"
    texts["asyncapi.yaml"] = head + yaml.dump(
        asyncapi.document(), Dumper=_Plain, sort_keys=False, allow_unicode=True, width=110
    )
    return texts | lifecycles.pages()


def present(room: Path) -> dict[str, str]:
    """Path -> text of what stands there now, of all that could have been made."""
    files = [*room.glob("*-lifecycle.md"), room / "asyncapi.yaml"]
    for folder in FOLDERS:
        files += (room / folder).rglob("*.json")
    return {file.relative_to(room).as_posix(): file.read_text() for file in files if file.is_file()}


def differences(room: Path) -> str:
    """What the files would have to change to be as the code says; empty when they are."""
    wanted, found = made(), present(room)
    lines: list[str] = []
    for path in sorted(wanted.keys() | found.keys()):
        before, after = found.get(path, ""), wanted.get(path, "")
        lines += difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"schemas/{path}", f"made/{path}"
        )
    return "".join(lines)


def write(room: Path) -> int:
    """Write everything, remove what is no longer made; answers how many files have changed."""
    wanted, found = made(), present(room)
    for path in found.keys() - wanted.keys():
        (room / path).unlink()
    changed = [path for path, text in wanted.items() if found.get(path) != text]
    for path in changed:
        (room / path).parent.mkdir(parents=True, exist_ok=True)
        (room / path).write_text(wanted[path])
    return len(changed) + len(found.keys() - wanted.keys())


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m schemas.generator", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; show what differs and exit 1")
    parser.add_argument("--room", type=Path, default=ROOM, help="the folder to write to (default: schemas)")
    given = parser.parse_args()
    if not given.check:
        sys.stdout.write(f"{write(given.room)} files changed in {given.room}\n")
        return 0
    found = differences(given.room)
    if not found:
        return 0
    sys.stdout.write(found)
    sys.stdout.write("\nschemas/ is not what the code says: run python -m schemas.generator, then look at the diff\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())

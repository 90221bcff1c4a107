"""The house style, as far as a machine can read it; what ruff and import-linter already enforce is not repeated."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = sorted(
    path for folder in ("libs", "services", "deploy", "tests") for path in (ROOT / folder).rglob("*.py")
)
PRODUCT: Final = [path for path in SOURCES if "src" in path.parts]
FILE_LINES_MAX: Final = 450
FUNCTION_LINES_MAX: Final = 80
REFUSED_NAMES: Final = re.compile(r"(^|_)(utils?|common|helpers?|manager|base)(_|$)")
REAL_TIME: Final = re.compile(r"\b(datetime\.now|datetime\.utcnow|time\.time|time\.monotonic)\(")
CLOCK_OWNERS: Final = {"system.py"}
ADDRESS: Final = re.compile(r"--(extra-)?index-url|^registry\s*=|[\"']resolved[\"']\s*:", re.MULTILINE)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_files_stay_small() -> None:
    sizes = {_name(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: size for name, size in sizes.items() if size > FILE_LINES_MAX} == {}


def test_functions_stay_small() -> None:
    long = {
        f"{_name(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in SOURCES
        for node in _functions(path)
        if node.end_lineno and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    }
    assert long == {}


def test_no_room_has_a_refused_name() -> None:
    assert [_name(path) for path in PRODUCT if REFUSED_NAMES.search(path.stem)] == []


def test_every_module_of_the_product_says_what_it_owns() -> None:
    silent = [_name(path) for path in PRODUCT if ast.get_docstring(ast.parse(path.read_text())) is None]
    assert silent == []


def _task_groups(tree: ast.AST) -> set[str]:
    """The names under which a module opens task groups: they keep what they start."""
    return {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name) and "TaskGroup" in ast.unparse(item.context_expr)
    }


@pytest.mark.parametrize("call", ["create_task", "ensure_future"])
def test_no_task_is_started_and_forgotten(call: str) -> None:
    """A task whose handle nobody keeps may be collected while it runs, and its error is never seen."""
    forgotten = [
        f"{_name(path)}:{node.lineno}"
        for path in PRODUCT
        for tree in [ast.parse(path.read_text())]
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == call
        and not (isinstance(node.value.func.value, ast.Name) and node.value.func.value.id in _task_groups(tree))
    ]
    assert forgotten == []


def test_domains_do_not_wait() -> None:
    waiting = [
        f"{_name(path)}:{node.lineno}"
        for path in PRODUCT
        if "domain" in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Await | ast.AsyncFunctionDef)
    ]
    assert waiting == []


def test_services_read_time_through_the_clock_port() -> None:
    found = [
        f"{_name(path)}:{number}"
        for path in PRODUCT
        if "services" in path.parts and path.name not in CLOCK_OWNERS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if REAL_TIME.search(line)
    ]
    assert found == []


def test_no_test_sleeps_for_a_fixed_time() -> None:
    sleeping = [
        f"{_name(path)}:{number}"
        for path in SOURCES
        if "tests" in path.parts and path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\btime\.sleep\(", line)
    ]
    assert sleeping == []


def test_no_committed_file_says_where_packages_come_from() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    named = [
        name
        for name in listed.split("\0")
        if name and ROOT / name != Path(__file__).resolve() and (ROOT / name).is_file()
        if ADDRESS.search((ROOT / name).read_text(errors="replace"))
    ]
    assert named == []


def test_the_lock_file_is_not_tracked() -> None:
    listed = subprocess.run(["git", "ls-files", "uv.lock"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert listed.stdout == ""

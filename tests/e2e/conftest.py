import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.embedded import EmbeddedWhole
from tests.support.real_machines import RealWhole


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedWhole]:
    """A whole that the tests of a module share."""
    running = EmbeddedWhole(tmp_path_factory.mktemp("whole") / "data")
    try:
        running.until("ready")
        yield running
    finally:
        running.close()


@pytest.fixture(scope="session")
def real_whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealWhole]:
    """A whole on QEMU that modules share which leave it as it was."""
    running = RealWhole(tmp_path_factory.mktemp("real-whole") / "data")
    try:
        running.until("ready")
        yield running
    finally:
        running.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EmbeddedWhole]]:
    """Start wholes on one data directory of the test's own; all are ended after it."""
    started: list[EmbeddedWhole] = []

    def begin(*options: str, **keywords: object) -> EmbeddedWhole:
        started.append(EmbeddedWhole(tmp_path / "data", *options, **keywords))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for running in reversed(started):
        running.close()


@pytest.fixture
def disk_of(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Make a file system of a size, such as `8m`; it is gone after the test."""
    made: list[Path] = []

    def mount(size: str) -> Path:
        place = tmp_path / f"disk-{size}"
        place.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
        if subprocess.run(["mount", *options, place], check=False, capture_output=True).returncode != 0:
            pytest.skip("mounting a small file system needs root")
        made.append(place)
        return place

    yield mount
    for place in made:
        subprocess.run(["umount", "-l", place], check=True)

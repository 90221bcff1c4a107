from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.embedded import EmbeddedWhole


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedWhole]:
    """A whole that the tests of a module share."""
    running = EmbeddedWhole(tmp_path_factory.mktemp("whole") / "data")
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

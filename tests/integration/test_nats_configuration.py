"""The configuration we write, read by a real server: whatever the paths are called, and however small the disk is."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nats import NatsServer

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["grün 日本", 'a "b" c', "back\\slash $HOME", "tab\there", "#hash {x: 1}"])
def odd_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NatsServer]:
    directory = tmp_path / request.param
    directory.mkdir()
    server = NatsServer(directory)
    server.start()
    yield server
    server.kill()


def test_a_store_may_have_any_name(odd_server: NatsServer) -> None:
    odd_server.make_streams()
    assert (odd_server.directory / "store" / "jetstream" / "TORPOR" / "streams" / "EVENTS").is_dir()


async def test_streams_may_grow_to_more_than_is_free_now(nats_server: NatsServer) -> None:
    """What is free when the server starts says nothing about later, nor about what the streams hold already."""
    link = await nats_server.link("admin")
    try:
        more_than_any_disk = 2 * shutil.disk_usage(nats_server.directory).total
        config = {"name": "LARGE", "subjects": ["large"], "max_bytes": more_than_any_disk}
        assert "error" not in await link.api("STREAM.CREATE.LARGE", config)
    finally:
        await link.close()

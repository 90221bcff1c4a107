"""A real nats-server for each test that asks for one, with the accounts, keys and permissions of production."""

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from torpor_messaging.nats_config import Configuration, ServerSettings, write_configuration
from torpor_messaging.nats_link import Identity, Link
from torpor_messaging.setup_streams import set_up

START_S_MAX = 15.0
BINARY = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")


class NatsServer:
    """One server and its directory; `kill` and `start` it as often as a test likes."""

    def __init__(self, directory: Path, tenants: Sequence[str] = ("default", "other")) -> None:
        self.directory = directory
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._settings = ServerSettings(store_dir=directory / "store", port=self.port, name="test")
        self.configuration: Configuration = write_configuration(directory, self._settings, tenants=tenants)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.directory / "nats.log"

    def start(self) -> None:
        """Start, and return once it takes connections."""
        assert BINARY is not None, "nats-server comes with the pinned packages"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [BINARY, "--config", str(self.configuration.server)], stdout=log, stderr=log
            )
        give_up_at = time.monotonic() + START_S_MAX
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 0.2) as connection:
                    if connection.recv(4) == b"INFO":
                        return
            except OSError:
                pass  # it does not listen yet
            assert time.monotonic() < give_up_at, "nats-server does not start"
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.01)
                raise AssertionError(self.log.read_text())

    def make_streams(self) -> None:
        """Make all streams, as an administrator."""
        asyncio.run(set_up(self.url, self.seed("admin"), 1, START_S_MAX))

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Shut down in order."""
        self._end(signal.SIGTERM)

    def wipe(self) -> None:
        """Lose everything that was stored; the server must be down."""
        assert self._process is None
        shutil.rmtree(self._settings.store_dir, ignore_errors=True)

    def seed(self, user: str) -> Path:
        """The seed file of a user: `admin`, `operator`, a service, or `tenant-<id>`."""
        return self.configuration.seeds[user]

    def identity(self, user: str) -> Identity:
        """How a user connects."""
        seed = self.seed(user)
        if user.startswith("tenant-"):
            return Identity.client(user.removeprefix("tenant-"), seed)
        if user in {"admin", "operator"}:
            return Identity(user, f"_INBOX.system.{user}", seed)
        return Identity.service(user, seed)

    async def link(self, user: str) -> Link:
        """A connection of a user; the test closes it."""
        return await Link.open(self.url, self.identity(user))

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(START_S_MAX)
            self._process = None


def free_port() -> int:
    """A TCP port that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def bare_nats(tmp_path: Path) -> Iterator[NatsServer]:
    """A running server without streams."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def nats_server(bare_nats: NatsServer) -> NatsServer:
    """A running server with all streams."""
    bare_nats.make_streams()
    return bare_nats

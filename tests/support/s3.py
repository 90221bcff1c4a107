"""A real server that speaks the S3 protocol, a process of its own, started by the first test that asks for one."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.nats import free_port

START_S_MAX: Final = 60.0
"""It imports for seconds on a busy machine."""


class S3Server:
    """One server; each test makes a bucket of its own."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "s3.log"
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._buckets = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and return once it takes connections."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            )
        give_up_at = time.monotonic() + START_S_MAX
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2):
                return
            assert time.monotonic() < give_up_at, f"the S3 server does not start: {self.log.read_text()}"
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
                raise AssertionError(self.log.read_text())

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
            self._process.kill()
            self._process.wait()
            self._process = None

    def bucket(self) -> str:
        """A new bucket."""
        name = f"test-{next(self._buckets)}"
        made = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        with urllib.request.urlopen(made, timeout=10) as answer:
            assert answer.status == 200
        return name

    def options(self) -> dict[str, Any]:
        """What `open_objects` must be told beside the URL."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": "test",
            "secret_access_key": "test",
            "region": "us-east-1",
            "client_options": {"allow_http": True},
        }

    def environment(self) -> dict[str, str]:
        """The same, as a process is told it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The session's server."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.stop()

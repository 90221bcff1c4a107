"""Services as processes of their own, started, asked whether they are ready, and killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support.nats import NatsServer
from torpor_contracts.errors import TorporError
from torpor_messaging.nats_link import Link

START_S_MAX = 30.0
END_S_MAX = 20.0


class ServiceProcess:
    """One service; `user` is whose key it has."""

    def __init__(
        self, module: str, user: str, server: NatsServer, directory: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.user = user
        self.log = directory / f"{user}.log"
        self._module = module
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TORPOR_")},
            "TORPOR_NATS_URL": server.url,
            "TORPOR_NKEY_SEED_FILE": str(server.seed(user)),
            "TORPOR_LOG_DSN": f"sqlite:///{directory / 'log.db'}",
            "TORPOR_VIEWS_DSN": f"sqlite:///{directory / f'views-{user}.db'}",
            **(environment or {}),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; it is not ready yet."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self._module], env=self._environment, stdout=log, stderr=log
            )

    async def ready(self, operator: Link) -> None:
        """Wait until it answers."""
        give_up_at = time.monotonic() + START_S_MAX
        while True:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < give_up_at, self.log.read_text()
            try:
                await operator.request(f"qry.system.{self.user}.health.-", b"", 0.5)
            except TorporError:
                await asyncio.sleep(0.05)  # until it answers, bounded above
            else:
                return

    def kill(self) -> None:
        """kill -9."""
        self._signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """Ask it to stop; its exit code."""
        self._signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self.process is not None
        return self.process.wait(END_S_MAX)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

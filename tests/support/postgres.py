"""A real PostgreSQL for tests: one cluster for the session, one database for each test; a pytest plugin.

Its binaries come from the machine (`/usr/lib/postgresql/*/bin` or the PATH); with TORPOR_TEST_CONTAINERS=1 and a
container engine that answers, the server is a container. In CI it must be there; elsewhere its absence is a skip.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final, Protocol

import asyncpg
import pytest

_START_S_MAX: Final = 60
_IMAGE: Final = "postgres:16-alpine"
NO_POSTGRES: Final = "no PostgreSQL on this machine: install the package postgresql, or set TORPOR_TEST_CONTAINERS=1"
_SHORT: Final = "/tmp"  # a socket's path may have about a hundred characters
_PREFIX: Final = "torpor-pg-"
_SETTINGS: Final = (
    "listen_addresses=''",
    "fsync=on",
    "synchronous_commit=on",
    "shared_buffers=64MB",
    "max_connections=200",
    "max_wal_size=2GB",
)


class PostgresServer(Protocol):
    """A running server; `dsn` names one of its databases."""

    def dsn(self, database: str) -> str: ...
    def crash(self) -> None:
        """Stop at once, as a power failure of the server's processes would, and stay away."""
        ...

    def start(self) -> None:
        """Come back after `crash`."""
        ...


class LocalPostgres:
    """A cluster of this machine's own binaries, reached by a Unix socket only."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._user = "postgres" if os.geteuid() == 0 else None  # the server refuses to run as root
        _end_orphans()
        self._directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_SHORT))
        (self._directory / "owner").write_text(str(os.getpid()))
        if self._user is not None:
            shutil.chown(self._directory, self._user)
        self._data = self._directory / "data"
        self._run(
            "initdb", "-D", str(self._data), "-U", "torpor", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"
        )
        with (self._data / "postgresql.auto.conf").open("a") as settings:
            settings.writelines(f"{line}\n" for line in (*_SETTINGS, f"unix_socket_directories='{self._directory}'"))
        self.start()

    def dsn(self, database: str) -> str:
        return f"postgresql://torpor@/{database}?host={self._directory}"

    def crash(self) -> None:
        self._run("pg_ctl", "stop", "-D", str(self._data), "-m", "immediate", "-w")

    def start(self) -> None:
        log = str(self._directory / "server.log")
        self._run("pg_ctl", "start", "-D", str(self._data), "-l", log, "-w", "-t", str(_START_S_MAX))

    def close(self) -> None:
        with suppress(subprocess.CalledProcessError):
            self.crash()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        finished = subprocess.run(
            [str(self._binaries / program), *arguments],
            check=False,
            user=self._user,
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"},
            text=True,
            timeout=2 * _START_S_MAX,
        )
        if finished.returncode != 0:
            raise RuntimeError(f"{program} failed: {finished.stderr}")


class ContainerPostgres:
    """A server in a container, made by testcontainers."""

    def __init__(self) -> None:
        from testcontainers.postgres import PostgresContainer  # noqa: PLC0415  (most machines have no engine)

        self._container = PostgresContainer(_IMAGE, username="torpor", password="torpor", dbname="postgres")
        self._container.with_command("postgres -c max_connections=200")
        self._port = _free_port()  # a port of the engine's choice would change with a restart
        self._container.with_bind_ports(5432, self._port)
        self._container.start()

    def dsn(self, database: str) -> str:
        return f"postgresql://torpor:torpor@{self._container.get_container_host_ip()}:{self._port}/{database}"

    def crash(self) -> None:
        self._container.get_wrapped_container().kill()

    def start(self) -> None:
        container = self._container.get_wrapped_container()
        container.start()
        container.exec_run(["sh", "-c", f"timeout {_START_S_MAX} sh -c 'until pg_isready -q; do :; done'"])

    def close(self) -> None:
        self._container.stop()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The session's server; started by the first test that asks."""
    server = start_postgres()
    if server is None and os.environ.get("CI") == "true":
        pytest.fail(NO_POSTGRES)
    if server is None:
        pytest.skip(NO_POSTGRES)
    yield server
    server.close()


@pytest.fixture
def postgres_databases(postgres_server: PostgresServer) -> Iterator[Callable[[], str]]:
    """Makes empty databases: each call answers a new one's DSN. They are dropped after the test."""
    made: list[str] = []

    def make() -> str:
        name = f"test_{next(_NUMBERS)}"
        asyncio.run(_administer(postgres_server, f"CREATE DATABASE {name} TEMPLATE template0"))
        made.append(name)
        return postgres_server.dsn(name)

    yield make
    for name in made:
        asyncio.run(_administer(postgres_server, f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture
def postgres_dsn(postgres_databases: Callable[[], str]) -> str:
    """The DSN of an empty database of the test's own."""
    return postgres_databases()


_NUMBERS: Final = count(1)


def start_postgres() -> LocalPostgres | ContainerPostgres | None:
    """A server that the caller must close; None when this machine has none."""
    if os.environ.get("TORPOR_TEST_CONTAINERS") == "1" and _engine_answers():
        return ContainerPostgres()
    binaries = _find_binaries()
    return None if binaries is None else LocalPostgres(binaries)


def _find_binaries() -> Path | None:
    packaged = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if packaged:
        return max(packaged, key=lambda path: float(path.parent.name))
    on_path = shutil.which("initdb")
    return None if on_path is None else Path(on_path).resolve().parent


def _end_orphans() -> None:
    """End the servers of test runs that were killed before they could."""
    for owner in Path(_SHORT).glob(f"{_PREFIX}*/owner"):
        directory = owner.parent
        with suppress(OSError, ValueError):
            if Path("/proc", owner.read_text()).exists():
                continue
            server = int((directory / "data" / "postmaster.pid").read_text().splitlines()[0])
            os.kill(server, signal.SIGQUIT)
        shutil.rmtree(directory, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _engine_answers() -> bool:
    engine = shutil.which("docker") or shutil.which("podman")
    return engine is not None and subprocess.run([engine, "info"], check=False, capture_output=True).returncode == 0


async def _administer(server: PostgresServer, statement: str) -> None:
    connection = await asyncpg.connect(server.dsn("postgres"))
    try:
        await connection.execute(statement)
    finally:
        await connection.close()

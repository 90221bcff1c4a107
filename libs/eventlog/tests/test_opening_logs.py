"""Which log a DSN names, and what is imported to find out."""

import subprocess
import sys
from pathlib import Path

import pytest

from torpor_eventlog.failures import LogUnusable
from torpor_eventlog.opening import open_log, sqlite_path
from torpor_eventlog.sqlite import SqliteLog

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("dsn", "path"),
    [
        ("sqlite:///log.db", "log.db"),
        ("sqlite:////var/lib/torpor/log.db", "/var/lib/torpor/log.db"),
        ("sqlite:////with%20space/l%C3%B6g.db", "/with space/lög.db"),
    ],
)
def test_a_dsn_names_a_file(dsn: str, path: str) -> None:
    assert sqlite_path(dsn) == Path(path)


@pytest.mark.parametrize(
    "dsn",
    ["", "log.db", "/var/log.db", "sqlite:", "sqlite://", "sqlite:///", "sqlite://host/log.db", "mysql://host/log"],
)
async def test_a_dsn_that_names_no_log_is_refused_with_what_to_write(dsn: str) -> None:
    with pytest.raises(LogUnusable) as refused:
        await open_log(dsn)
    assert refused.value.code == "log-dsn-illegal"
    assert "sqlite:///" in refused.value.advice


async def test_the_factory_opens_what_the_dsn_names(tmp_path: Path) -> None:
    log = await open_log(f"sqlite:///{tmp_path / 'log.db'}")
    assert isinstance(log, SqliteLog)
    await log.close()


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("torpor_eventlog.opening, torpor_eventlog.sqlite, torpor_eventlog.codec", "asyncpg, cryptography"),
        ("torpor_eventlog.opening, torpor_eventlog.memory", "asyncpg, cryptography, sqlite3"),
        ("torpor_eventlog.notes", "cryptography, asyncpg"),
    ],
)
def test_nothing_is_imported_that_is_not_used(modules: str, unwanted: str) -> None:
    program = f"import sys, {modules}; print([name for name in '{unwanted}'.split(', ') if name in sys.modules])"
    finished = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert finished.stdout == "[]\n"

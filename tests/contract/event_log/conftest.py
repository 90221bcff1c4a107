"""A log of each kind, and as many instances on its database as a test wants."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.event_logs import Database, InMemory, InPostgres, InSqlite, OnCommit, Open
from torpor_eventlog.port import EventLog

BOUND_S: Final = 60
"""No test may take longer, whatever the log waits for."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    if request.param == "memory":
        return InMemory()
    if request.param == "sqlite":
        return InSqlite(tmp_path / "log.db")
    return InPostgres(request.getfixturevalue("postgres_dsn"))


@pytest.fixture
async def open_log(database: Database) -> AsyncIterator[Open]:
    opened: list[EventLog] = []

    async def open_one(on_commit: OnCommit | None = None) -> EventLog:
        opened.append(await database.open(on_commit))
        return opened[-1]

    async with asyncio.timeout(BOUND_S):
        yield open_one
        for log in opened:
            await log.close()


@pytest.fixture
async def log(open_log: Open) -> EventLog:
    return await open_log()

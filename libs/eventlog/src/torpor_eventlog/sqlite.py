"""The log in one SQLite file, the truth of an embedded Torpor; any number of processes append to the same file."""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from torpor_contracts.errors import Transient
from torpor_contracts.ids import CommandId
from torpor_contracts.replies import Receipt
from torpor_eventlog.group_commit import GroupCommit
from torpor_eventlog.planning import Plan, Prepared, prepare
from torpor_eventlog.port import Commit, Head, Recorded
from torpor_eventlog.proving import checked_consistency_plan, checked_inclusion_plan
from torpor_eventlog.sqlite_file import BUSY_WAIT_S, as_transient, prepare_file
from torpor_eventlog.sqlite_reader import SqliteReader
from torpor_eventlog.sqlite_writer import SqliteWriter

Answer = TypeVar("Answer")

READERS: Final = 2
"""Threads that read; more would only wait for the interpreter's lock."""


class SqliteLog:
    """An `EventLog` over a file with a write-ahead log, synchronous=FULL. Made by `open`; used from one event loop.

    One thread writes, so that waiting appends share a transaction; two others read.
    """

    def __init__(self, path: Path, on_commit: Callable[[int], None] | None, busy_wait_s: float) -> None:
        self._path = path
        self._writer = SqliteWriter(path, busy_wait_s)
        self._writer_thread = ThreadPoolExecutor(1, thread_name_prefix="log-write")
        self._reader = SqliteReader(path)
        self._reader_threads = ThreadPoolExecutor(READERS, thread_name_prefix="log-read")
        self._group = GroupCommit(self._write, on_commit)
        self._closed = False

    @classmethod
    async def open(
        cls, path: Path, on_commit: Callable[[int], None] | None = None, busy_wait_s: float = BUSY_WAIT_S
    ) -> "SqliteLog":
        """The log at `path`, made if there is none.

        `on_commit` is told the new last position after each batch that added something.
        Raises `LogUnusable` for a file that is no log of this release, `Transient` when it stays locked.
        """
        await asyncio.to_thread(prepare_file, path, busy_wait_s)
        return cls(path, on_commit, busy_wait_s)

    async def append(self, commit: Commit) -> Receipt:
        """See `EventLog.append`."""
        return await self._group.append(prepare(commit))

    async def receipt(self, command_id: CommandId) -> Receipt | None:
        """See `EventLog.receipt`."""
        return await self._read(partial(self._reader.receipt, command_id))

    async def load(self, stream: str, after_version: int = 0) -> list[Recorded]:
        """See `EventLog.load`."""
        return await self._read(partial(self._reader.load, stream, after_version))

    async def read(self, after_position: int, limit: int) -> list[Recorded]:
        """See `EventLog.read`."""
        return await self._read(partial(self._reader.read, after_position, limit))

    async def head(self) -> Head:
        """See `EventLog.head`."""
        return await self._read(self._reader.head)

    async def inclusion_proof(self, position: int, tree_size: int) -> list[bytes]:
        """See `EventLog.inclusion_proof`."""
        return await self._read(partial(self._reader.proof, partial(checked_inclusion_plan, position, tree_size)))

    async def consistency_proof(self, old_size: int, new_size: int) -> list[bytes]:
        """See `EventLog.consistency_proof`."""
        return await self._read(partial(self._reader.proof, partial(checked_consistency_plan, old_size, new_size)))

    async def close(self) -> None:
        """See `EventLog.close`."""
        if self._closed:
            return
        self._closed = True
        await self._group.close()
        await asyncio.to_thread(self._let_go)

    async def _write(self, batch: Sequence[Prepared]) -> Plan:
        return await asyncio.get_running_loop().run_in_executor(self._writer_thread, self._writer.write, batch)

    async def _read(self, look: Callable[[], Answer]) -> Answer:
        if self._closed:
            raise Transient("the log is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader_threads, look)
        except sqlite3.Error as error:
            raise as_transient(error, self._path) from error

    def _let_go(self) -> None:
        self._writer_thread.shutdown()
        self._reader_threads.shutdown()
        self._writer.close()
        self._reader.close()

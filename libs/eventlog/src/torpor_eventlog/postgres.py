"""The log in a PostgreSQL database, the truth of a cluster; any number of processes append to the same one."""

from collections.abc import Callable
from itertools import starmap
from typing import Any, Final

import asyncpg

from torpor_contracts.errors import Transient
from torpor_contracts.ids import CommandId
from torpor_contracts.replies import Receipt
from torpor_eventlog.group_commit import GroupCommit
from torpor_eventlog.merkle import Frontier, ProofPlan, Span
from torpor_eventlog.planning import End, prepare, receipt_from
from torpor_eventlog.port import Commit, Head, Recorded
from torpor_eventlog.postgres_schema import (
    AWAY,
    COMMAND_S_MAX,
    CONNECT_S_MAX,
    ERRORS,
    LOCK_WAIT_S,
    as_transient,
    prepare_database,
)
from torpor_eventlog.postgres_writer import PostgresWriter
from torpor_eventlog.proving import checked_consistency_plan, checked_inclusion_plan

READERS_MAX: Final = 4
"""Connections that read; they are made when they are needed."""

_COLUMNS: Final = (
    "position, stream, version, tag, data, occurred_at_us, command_id, causation_id, correlation_id, tenant_id, digest"
)
_READ: Final = f"SELECT {_COLUMNS} FROM torpor_log.events WHERE position > $1 ORDER BY position LIMIT $2"  # noqa: S608
_LOAD: Final = f"SELECT {_COLUMNS} FROM torpor_log.events WHERE stream = $1 AND version > $2 ORDER BY version"  # noqa: S608
_RECEIPT: Final = """
    SELECT command_id, stream, version, position, digest FROM torpor_log.events
    WHERE command_id = $1 AND request_digest IS NOT NULL
"""
_HEAD: Final = "SELECT position, digest, frontier FROM torpor_log.head"
_LEAVES: Final = """
    SELECT span, digest FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS wanted (first, size, span)
    JOIN torpor_log.events ON position > first AND position <= first + size ORDER BY span, position
"""
_NODES: Final = """
    SELECT span, digest
    FROM unnest($1::smallint[], $2::bigint[], $3::bigint[]) WITH ORDINALITY AS wanted (at_level, first, size, span)
    JOIN torpor_log.nodes ON level = at_level AND number >= first AND number < first + size ORDER BY span, number
"""


class PostgresLog:
    """An `EventLog` over a database's schema `torpor_log`. Made by `open`; used from one event loop."""

    def __init__(self, pool: asyncpg.Pool, writer: PostgresWriter, on_commit: Callable[[int], None] | None) -> None:
        self._pool = pool
        self._writer = writer
        self._group = GroupCommit(self._writer.write, on_commit)
        self._closed = False

    @classmethod
    async def open(
        cls, dsn: str, on_commit: Callable[[int], None] | None = None, lock_wait_s: float = LOCK_WAIT_S
    ) -> "PostgresLog":
        """The log in the database that `dsn` names; its schema is made if there is none.

        `on_commit` is told the new last position after each batch that added something.
        Raises `LogUnusable` for a database that cannot hold the log, `Transient` when the server is away.
        """
        await prepare_database(dsn, lock_wait_s)
        try:
            pool = await asyncpg.create_pool(
                dsn,
                min_size=0,
                max_size=READERS_MAX,
                timeout=CONNECT_S_MAX,
                command_timeout=COMMAND_S_MAX,
                connect=_connect_reader,
                reset=_leave,
            )
        except ERRORS as error:
            raise as_transient(error) from error
        return cls(pool, PostgresWriter(dsn, lock_wait_s), on_commit)

    async def append(self, commit: Commit) -> Receipt:
        """See `EventLog.append`."""
        return await self._group.append(prepare(commit))

    async def receipt(self, command_id: CommandId) -> Receipt | None:
        """See `EventLog.receipt`."""
        rows = await self._fetch(_RECEIPT, command_id)
        return receipt_from(*rows[0]) if rows else None

    async def load(self, stream: str, after_version: int = 0) -> list[Recorded]:
        """See `EventLog.load`."""
        return list(starmap(Recorded, await self._fetch(_LOAD, stream, after_version)))

    async def read(self, after_position: int, limit: int) -> list[Recorded]:
        """See `EventLog.read`."""
        return list(starmap(Recorded, await self._fetch(_READ, after_position, max(0, limit))))

    async def head(self) -> Head:
        """See `EventLog.head`."""
        ((position, digest, frontier),) = await self._fetch(_HEAD)
        return End(position, digest, Frontier.from_bytes(position, frontier)).head()

    async def inclusion_proof(self, position: int, tree_size: int) -> list[bytes]:
        """See `EventLog.inclusion_proof`."""
        return await self._resolve(checked_inclusion_plan(position, tree_size, await self._last_position()))

    async def consistency_proof(self, old_size: int, new_size: int) -> list[bytes]:
        """See `EventLog.consistency_proof`."""
        return await self._resolve(checked_consistency_plan(old_size, new_size, await self._last_position()))

    async def close(self) -> None:
        """See `EventLog.close`."""
        if self._closed:
            return
        self._closed = True
        await self._group.close()
        await self._writer.close()
        await self._pool.close()

    async def _last_position(self) -> int:
        ((position, _, _),) = await self._fetch(_HEAD)
        return int(position)

    async def _resolve(self, planned: ProofPlan) -> list[bytes]:
        spans = planned.spans()
        leaves = [span for span in spans if span.level == 0]
        nodes = [span for span in spans if span.level != 0]
        digests: dict[Span, list[bytes]] = {span: [] for span in spans}
        if leaves:
            _, firsts, sizes = map(list, zip(*leaves, strict=True))
            for number, digest in await self._fetch(_LEAVES, firsts, sizes):
                digests[leaves[number - 1]].append(digest)
        if nodes:
            for number, digest in await self._fetch(_NODES, *map(list, zip(*nodes, strict=True))):
                digests[nodes[number - 1]].append(digest)
        return planned.resolve(digests)

    async def _fetch(self, statement: str, *parameters: Any) -> list[asyncpg.Record]:
        if self._closed:
            raise Transient("the log is closed")
        try:
            return await self._fetch_once(statement, parameters)
        except AWAY:  # the pool may have kept connections of a server that has restarted since
            await self._pool.expire_connections()
        except asyncpg.PostgresError as error:
            raise as_transient(error) from error
        try:
            return await self._fetch_once(statement, parameters)
        except ERRORS as error:
            raise as_transient(error) from error

    async def _fetch_once(self, statement: str, parameters: tuple[Any, ...]) -> list[asyncpg.Record]:
        rows: list[asyncpg.Record] = await self._pool.fetch(statement, *parameters)
        return rows


async def _connect_reader(*arguments: Any, **settings: Any) -> asyncpg.Connection:
    settings["server_settings"] = {"default_transaction_read_only": "on", "application_name": "torpor-log-reader"}
    connection: asyncpg.Connection = await asyncpg.connect(*arguments, **settings)
    return connection


async def _leave(_connection: asyncpg.Connection) -> None:
    """Leave a connection as it is when it goes back: a plain SELECT leaves nothing behind to clean up."""

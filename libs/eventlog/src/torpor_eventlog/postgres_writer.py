"""The one connection of a process that writes to the log's PostgreSQL database; one batch at a time."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import asyncpg

from torpor_contracts.errors import InvariantViolation
from torpor_eventlog.merkle import Frontier
from torpor_eventlog.optimism import NONE_KNOWN, Kept, all_placed, streams_of
from torpor_eventlog.planning import End, Known, Plan, Prepared, plan, receipt_from
from torpor_eventlog.postgres_schema import AWAY, as_transient, connect, let_go

TRIES: Final = 2
"""How often a batch is written when the connection is lost: the second time, what the first did is looked up."""

# What is read after this lock is as of the lock only in a transaction that takes a new snapshot for each statement.
_LOCK_HEAD: Final = "SELECT position, digest, frontier FROM torpor_log.head FOR UPDATE"
_SET_HEAD: Final = "UPDATE torpor_log.head SET position = $1, digest = $2, frontier = $3"
_INSERT_NODES: Final = """
    INSERT INTO torpor_log.nodes SELECT * FROM unnest($1::smallint[], $2::bigint[], $3::bytea[])
"""
_GET_VERSIONS: Final = """
    SELECT wanted, (SELECT max(version) FROM torpor_log.events WHERE stream = wanted) FROM unnest($1::text[]) AS wanted
"""
_GET_KNOWN: Final = """
    SELECT command_id, request_digest, stream, version, position, digest FROM torpor_log.events
    WHERE command_id = ANY ($1::text[]) AND request_digest IS NOT NULL
"""


class PostgresWriter:
    """Writes batches; the lock on the head row keeps positions without gaps however many processes write.

    A batch is first written in the hope that no commit lost its race or is known already: the unique indexes would
    tell. Only when that fails, or when the connection was lost at a moment that leaves the outcome unknown, does each
    commit get looked up.
    """

    def __init__(self, dsn: str, lock_wait_s: float) -> None:
        self._dsn = dsn
        self._lock_wait_s = lock_wait_s
        self._connection: asyncpg.Connection | None = None
        self._kept = Kept()

    async def write(self, batch: Sequence[Prepared]) -> Plan:
        """Place the batch and make it durable. Raises `Transient` when the database does not let us."""
        hopeful = True
        for tries_left in reversed(range(TRIES)):
            try:
                connection = await self._connected()
                planned = await self._hopefully(connection, batch) if hopeful else None
                planned = planned or await self._exactly(connection, batch)
            except AWAY as error:
                await self.close()
                hopeful = False
                if tries_left == 0:
                    raise as_transient(error) from error
            except asyncpg.UniqueViolationError as error:
                raise InvariantViolation(
                    f"the log holds rows its head does not know; run `torpor audit verify` ({error})"
                ) from error
            except asyncpg.PostgresError as error:
                await self.close()
                raise as_transient(error) from error
            except BaseException:
                self._drop()
                raise
            else:
                self._kept.remember(planned)
                return planned
        raise AssertionError("the last try either answers or raises")

    async def close(self) -> None:
        """Let go of the connection; the server rolls back what is open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await let_go(connection)

    async def _hopefully(self, connection: asyncpg.Connection, batch: Sequence[Prepared]) -> Plan | None:
        try:
            async with connection.transaction(isolation="read_committed"):
                end = await self._locked_end(connection)
                versions, unsure = self._kept.versions_at(end, batch)
                if unsure:
                    versions.update(await _versions(connection, unsure))
                planned = plan(batch, end, versions, NONE_KNOWN)
                if not all_placed(planned):
                    return None
                await _insert(connection, planned)
        except asyncpg.UniqueViolationError:
            return None
        return planned

    async def _exactly(self, connection: asyncpg.Connection, batch: Sequence[Prepared]) -> Plan:
        async with connection.transaction(isolation="read_committed"):
            return await place(connection, batch)

    async def _locked_end(self, connection: asyncpg.Connection) -> End:
        position, digest, frontier = await _only_row(connection, _LOCK_HEAD)
        if digest == self._kept.end.digest:
            return self._kept.end
        return End(position, digest, Frontier.from_bytes(position, frontier))

    async def _connected(self) -> asyncpg.Connection:
        if self._connection is None or self._connection.is_closed():
            self._connection = await connect(self._dsn, self._lock_wait_s)
        return self._connection

    def _drop(self) -> None:
        """Cut the connection without a word: what was under way is no longer ours to end."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


async def _only_row(connection: asyncpg.Connection, statement: str) -> Any:
    row = await connection.fetchrow(statement)
    if row is None:
        raise InvariantViolation("the log has no head; restore the database from a backup")
    return row


async def place(connection: asyncpg.Connection, batch: Sequence[Prepared]) -> Plan:
    """Place a batch in the transaction that is open on `connection`, looking everything up; nothing is committed."""
    position, digest, frontier = await _only_row(connection, _LOCK_HEAD)
    end = End(position, digest, Frontier.from_bytes(position, frontier))
    planned = plan(batch, end, await _versions(connection, streams_of(batch)), await _known(connection, batch))
    if planned.rows:
        await _insert(connection, planned)
    return planned


async def _insert(connection: asyncpg.Connection, planned: Plan) -> None:
    await connection.copy_records_to_table("events", records=planned.rows, schema_name="torpor_log")
    if planned.nodes:
        await connection.execute(_INSERT_NODES, *map(list, zip(*planned.nodes, strict=True)))
    end = planned.end
    await connection.execute(_SET_HEAD, end.position, end.digest, end.frontier.to_bytes())


async def _versions(connection: asyncpg.Connection, streams: Iterable[str]) -> dict[str, int]:
    found = await connection.fetch(_GET_VERSIONS, list(streams))
    return {stream: version for stream, version in found if version is not None}


async def _known(connection: asyncpg.Connection, batch: Sequence[Prepared]) -> dict[str, Known]:
    found = await connection.fetch(_GET_KNOWN, [prepared.commit.command_id for prepared in batch])
    return {
        command_id: Known(request_digest, receipt_from(command_id, stream, version, position, digest))
        for command_id, request_digest, stream, version, position, digest in found
    }

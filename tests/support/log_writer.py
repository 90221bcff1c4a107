"""A process that appends to a log for ever and says what was acknowledged, a JSON line each; tests kill it.

Run as `python -m tests.support.log_writer DSN NAME`; names of processes on one log must differ.
"""

import asyncio
import sys
from hashlib import sha256

import msgspec

from torpor_contracts.errors import VersionConflict
from torpor_contracts.ids import CommandId, TenantId
from torpor_eventlog.opening import open_log
from torpor_eventlog.port import Commit, EventLog, NewEvent

WRITERS = 8
COMMANDS_MAX = 100_000


async def write(log: EventLog, name: str, second: str) -> None:
    """Commands of two events each: one of a new stream, one of the stream `second`, which others may fight for."""
    version = 0
    for number in range(COMMANDS_MAX):
        command_id = f"{name}-{number}"
        commit = Commit(
            command_id=CommandId(command_id),
            tenant_id=TenantId("default"),
            causation_id=command_id,
            correlation_id="goal-1",
            request_digest=sha256(command_id.encode()).digest(),
            occurred_at_us=number,
            expected={f"stream-{command_id}": 0, second: version},
            events=[
                NewEvent(stream=f"stream-{command_id}", tag="thing-happened.v1", data=b"x" * (number % 3000)),
                NewEvent(stream=second, tag="thing-happened.v1", data=b"{}"),
            ],
        )
        try:
            receipt = await log.append(commit)
        except VersionConflict as conflict:
            version = conflict.actual
            continue
        version += 1
        sys.stdout.buffer.write(msgspec.json.encode(receipt) + b"\n")
        sys.stdout.buffer.flush()


async def main() -> None:
    dsn, name = sys.argv[1:]
    log = await open_log(dsn)
    await asyncio.gather(
        write(log, f"{name}-shared", "stream-shared"),
        *(write(log, f"{name}-{number}", f"stream-{name}-{number}") for number in range(WRITERS)),
    )


if __name__ == "__main__":
    asyncio.run(main())

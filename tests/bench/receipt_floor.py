"""The least a command can cost: a NATS request answered after one durable insert; `python -m`, with its arguments.

It connects as the scheduler, listens where the scheduler answers questions, and knows no envelope, log or policy.
"""

import asyncio
import sqlite3
import sys
from pathlib import Path
from typing import Any, Final

import uvloop

from torpor_messaging.nats_link import Identity, Link

SUBJECT: Final = "qry.default.scheduler.floor.-"


async def serve(url: str, seed_file: Path, database: Path) -> None:
    """Answer every request once its bytes are on the disk."""
    link = await Link.open(url, Identity.service("scheduler", seed_file))
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE rows (position INTEGER PRIMARY KEY, data BLOB NOT NULL)")

    async def answer(message: Any) -> None:
        connection.execute("INSERT INTO rows (data) VALUES (?)", (message.data,))
        await link.client.publish(message.reply, b"{}")

    await link.client.subscribe("qry.*.scheduler.floor.*", cb=answer)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))

"""Makes the streams of a whole, with an administrator's key: `python -m torpor_messaging.setup_streams --help`."""

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from torpor_contracts.errors import Rejected, Transient
from torpor_messaging.nats_link import Identity, Link
from torpor_messaging.streams import create_all

EXIT_REFUSED = 2
EXIT_AWAY = 75
"""EX_TEMPFAIL of sysexits.h: try again."""


async def set_up(url: str, seed_file: Path | None, replicas: int, timeout_s: float) -> list[str]:
    """Connect and make what is missing; the names of the streams made."""
    link = await Link.open(url, Identity("admin", "_INBOX.system.admin", seed_file), timeout_s=timeout_s)
    try:
        return await create_all(link, replicas=replicas)
    finally:
        await link.close()


def main() -> int:
    """Read the arguments, make the streams, say what was done; the exit code."""
    parser = argparse.ArgumentParser(prog="torpor_messaging.setup_streams", description=__doc__)
    parser.add_argument("--url", default=os.environ.get("TORPOR_NATS_URL", "nats://127.0.0.1:4222"))
    seed_file = os.environ.get("TORPOR_NKEY_SEED_FILE")
    parser.add_argument("--seed-file", type=Path, default=Path(seed_file) if seed_file else None)
    parser.add_argument("--replicas", type=int, default=1, choices=(1, 3, 5))
    parser.add_argument("--timeout-s", type=float, default=60.0, help="how long to wait for the server")
    given = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    try:
        made = asyncio.run(set_up(given.url, given.seed_file, given.replicas, given.timeout_s))
    except Rejected as refused:
        sys.stderr.write(f"{refused.message}; {refused.advice}\n")
        return EXIT_REFUSED
    except Transient as away:
        sys.stderr.write(f"{away}\n")
        return EXIT_AWAY
    sys.stdout.write(f"made {', '.join(made)}\n" if made else "all streams are there\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

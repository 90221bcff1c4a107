"""Which services of a whole answer, and whether a host is up: asked of each, as the operator."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from torpor.embedded.runfile import Run
from torpor_contracts.errors import TorporError
from torpor_contracts.ids import SYSTEM_TENANT
from torpor_messaging import subjects
from torpor_messaging.nats_link import Identity, Link

HEALTH: Final = "health"
"""The question that every service answers: `qry.system.<service>.health.-`."""
ASK_S: Final = 2.0
_PAUSE_S: Final = 0.05

Ask = Callable[[str, bytes, float], Awaitable[bytes]]


def operator(seed_file: Path | str) -> Identity:
    """How we connect: as the operator, who may ask every service."""
    return Identity("torpor", f"{subjects.inbox_prefix(SYSTEM_TENANT)}.operator", Path(seed_file))


async def answers(link: Link, service: str, timeout_s: float = ASK_S) -> bool:
    """Whether a service answers now."""
    try:
        await link.request(subjects.query(SYSTEM_TENANT, service, HEALTH), b"{}", timeout_s)
    except TorporError:
        return False
    return True


async def has_host(link: Link, timeout_s: float = ASK_S) -> bool:
    """Whether the scheduler knows a host that is up."""
    try:
        asked = await link.request(subjects.query(SYSTEM_TENANT, "scheduler", "hosts"), b"{}", timeout_s)
    except TorporError:
        return False
    return any(host.get("state") == "up" for host in json.loads(asked.data).get("hosts", []))


async def until_ready(link: Link, services: Sequence[str], timeout_s: float) -> list[str]:
    """Wait until every service answers and a host is up; what is still missing after `timeout_s`."""
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + timeout_s

    async def until(ready: Callable[[], Awaitable[bool]]) -> bool:
        while loop.time() < give_up_at_s:
            if await ready():
                return True
            await asyncio.sleep(_PAUSE_S)
        return False

    found = await asyncio.gather(
        *(until(lambda service=service: answers(link, service)) for service in services),  # type: ignore[misc]
        until(lambda: has_host(link)),
    )
    return [name for name, ready in zip([*services, "a host"], found, strict=True) if not ready]


def answering(run: Run) -> dict[str, bool]:
    """Whether each process of a running whole answers; the server too."""

    async def ask() -> dict[str, bool]:
        services = [process.name for process in run.processes if process.name != "nats-server"]
        try:
            link = await Link.open(run.nats_url, operator(run.operator_seed_file), timeout_s=ASK_S)
        except TorporError:
            return dict.fromkeys([*services, "nats-server"], False)
        try:
            said = await asyncio.gather(*(answers(link, service) for service in services))
        finally:
            await link.close()
        return {**dict(zip(services, said, strict=True)), "nats-server": True}

    return asyncio.run(ask())

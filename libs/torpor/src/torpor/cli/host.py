"""`torpor host …`: for operators."""

import asyncio
from typing import Annotated

from cyclopts import Parameter

from torpor.cli import printing
from torpor.cli.options import DEFAULTS, Common

HostId = Annotated[str, Parameter(help="The host's id.", show_default=False)]


def list_(*, common: Common = DEFAULTS) -> int:
    """List hosts, and what of them is taken."""

    async def work() -> int:
        async with common.connect("operator") as t:
            hosts = [view async for view in t.hosts.list()]
        if common.json:
            printing.emit(hosts)
            return 0
        rows = [
            (
                host.host_id,
                f"{host.state}, draining" if host.draining else host.state,
                host.driver,
                f"{host.vms}/{host.capacity.vms_max}",
                f"{host.vcpus_taken}/{host.capacity.vcpus}",
                f"{host.memory_mib_taken}/{host.capacity.memory_mib}",
                host.last_seen_at,
            )
            for host in hosts
        ]
        printing.table(
            ("host", "state", "driver", "machines", "vcpus", "memory MiB", "last seen"),
            rows,
            "no hosts yet; see `torpor status`",
        )
        return 0

    return asyncio.run(work())


def drain_(host_id: HostId, *, reason: str = "", command_id: str | None = None, common: Common = DEFAULTS) -> int:
    """Take no new machines on a host; those that run are suspended."""

    async def work() -> int:
        async with common.connect("operator") as t:
            receipt = await t.hosts.drain(host_id, reason=reason, command_id=command_id)
        printing.emit(receipt) if common.json else printing.say(f"{host_id}  draining")
        return 0

    return asyncio.run(work())


def undrain_(host_id: HostId, *, command_id: str | None = None, common: Common = DEFAULTS) -> int:
    """Take new machines again."""

    async def work() -> int:
        async with common.connect("operator") as t:
            receipt = await t.hosts.undrain(host_id, command_id=command_id)
        printing.emit(receipt) if common.json else printing.say(f"{host_id}  takes machines")
        return 0

    return asyncio.run(work())

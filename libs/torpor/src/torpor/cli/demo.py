"""`torpor demo`."""

import asyncio
from typing import Annotated, Literal

from cyclopts import Parameter

from torpor.cli import printing
from torpor.cli.options import DEFAULTS, Common

RealDriver = Literal["auto", "qemu", "firecracker"]


def demo(
    *,
    driver: Annotated[RealDriver, Parameter(help="What makes the machines; auto takes the best one that boots.")] = (
        "auto"
    ),
    keep: Annotated[bool, Parameter(negative=(), help="Leave everything running in the end.")] = False,
    common: Common = DEFAULTS,
) -> int:
    """Tell one agent's story on a real machine, and check everything that is told.

    It works in a directory of its own (--data-dir). The first run prepares the guest's image, which takes minutes.
    Exit code 1 when anything that was said is not so.
    """
    from torpor.demo import running  # noqa: PLC0415  (heavy)

    data = running.own_directory(common.data_dir)
    told = asyncio.run(running.demo(data, driver, keep=keep, as_json=common.json))
    if common.json:
        printing.emit(told)
    return 0

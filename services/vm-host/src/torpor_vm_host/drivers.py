"""The drivers there are, and which of them this machine can run; a new driver is one more entry of `DRIVERS`."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.errors import Rejected
from torpor_messaging.ports import Clock
from torpor_vm_host.adapters.simulated.driver import SimulatedDriver, Timing
from torpor_vm_host.adapters.simulated.stores import DirectoryMachines
from torpor_vm_host.ports import Driver

AUTO: Final = "auto"
SIMULATED: Final = "simulated"

_log: Final = logging.getLogger(__name__)


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a driver can be used on this machine, why, and what to do when it cannot."""

    ok: bool
    reason: str
    advice: str = ""


@dataclass(frozen=True)
class DriverEnvironment:
    """What a driver is made from: a directory of its own, time, and how long simulated machines take."""

    directory: Path
    clock: Clock
    timing: Timing


@dataclass(frozen=True)
class DriverKind:
    """`probe` finds out whether the driver really works here; `make` makes one, None while there is none to make."""

    name: str
    probe: Callable[[], Coroutine[None, None, Availability]]
    make: Callable[[DriverEnvironment], Driver] | None


async def _simulated_works() -> Availability:
    return Availability(ok=True, reason="it runs anywhere; its machines know a few commands and are no real machines")


def _not_built(name: str) -> Callable[[], Coroutine[None, None, Availability]]:
    async def probe() -> Availability:
        return Availability(
            ok=False,
            reason=f"this release has no {name} driver yet",
            advice="use --driver simulated (TORPOR_VM_HOST_DRIVER=simulated), or a release that has it",
        )

    return probe


async def _firecracker_works() -> Availability:
    from torpor_vm_host.adapters.firecracker.engine import find_engine  # noqa: PLC0415  (only where it is asked for)

    try:
        engine = await asyncio.to_thread(find_engine)
    except Rejected as error:
        return Availability(ok=False, reason=error.message, advice=error.advice)
    from torpor_vm_host.adapters.firecracker.probe import Unusable, try_out  # noqa: PLC0415  (heavy)
    from torpor_vm_host.images.library import cache_home, default_library  # noqa: PLC0415

    try:
        image = await asyncio.to_thread(default_library().find, "default")
    except Rejected:  # no recipe, or not a machine that builds images: the small program must do
        image = None
    try:
        await try_out(engine, cache_home() / "firecracker", image.kernel if image else None)
    except Unusable as unusable:
        return Availability(ok=False, reason=str(unusable), advice=unusable.advice)
    return Availability(ok=True, reason=f"a machine ran in {engine.firecracker} ({engine.fingerprint})")


def _firecracker(environment: DriverEnvironment) -> Driver:
    from torpor_vm_host.adapters.firecracker.assembling import make_driver as make  # noqa: PLC0415  (heavy)

    return make(environment.directory, _log.info)


def _simulated(environment: DriverEnvironment) -> Driver:
    machines = DirectoryMachines(environment.directory / "machines")
    return SimulatedDriver(machines, environment.clock, timing=environment.timing)


DRIVERS: Final[Mapping[str, DriverKind]] = {
    kind.name: kind
    for kind in (
        DriverKind("firecracker", _firecracker_works, _firecracker),
        DriverKind("qemu", _not_built("QEMU"), None),
        DriverKind(SIMULATED, _simulated_works, _simulated),
    )
}
"""All drivers, the best first: `auto` takes the first that works."""


async def probe_all(drivers: Mapping[str, DriverKind] = DRIVERS) -> dict[str, Availability]:
    """What each driver's probe says on this machine, the best driver first."""
    return {name: await kind.probe() for name, kind in drivers.items()}


async def make_driver(name: str, environment: DriverEnvironment, drivers: Mapping[str, DriverKind] = DRIVERS) -> Driver:
    """The driver of this name, or the best that works; `Rejected` when it is unknown or does not work here."""
    if name == AUTO:
        return await _best(environment, drivers)
    kind = drivers.get(name)
    if kind is None:
        known = ", ".join([AUTO, *drivers])
        raise Rejected("driver-unknown", f"there is no driver {name!r}", f"choose one of {known}")
    found = await kind.probe()
    if kind.make is None or not found.ok:
        raise Rejected("driver-unavailable", f"the driver {name!r} cannot be used: {found.reason}", found.advice)
    return kind.make(environment)


async def _best(environment: DriverEnvironment, drivers: Mapping[str, DriverKind]) -> Driver:
    reasons: list[str] = []
    for kind in drivers.values():
        found = await kind.probe()
        if kind.make is not None and found.ok:
            if kind.name == SIMULATED:
                _log.warning("sessions get simulated machines, as no other driver works here: %s", "; ".join(reasons))
            return kind.make(environment)
        reasons.append(f"{kind.name}: {found.reason}")
    raise Rejected("driver-unavailable", f"no driver works here: {'; '.join(reasons)}", "run `torpor doctor`")

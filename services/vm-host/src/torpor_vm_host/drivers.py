"""The drivers there are, and which of them this machine can run; a new driver is one more entry of `DRIVERS`.

Nobody is given simulated machines who has not asked for them by name: what they do looks real and is not.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.errors import Rejected
from torpor_eventlog.instants import to_us
from torpor_messaging.ports import Clock, Ids
from torpor_vm_host.adapters.qemu.options import QemuOptions
from torpor_vm_host.adapters.simulated.driver import SimulatedDriver, Timing
from torpor_vm_host.adapters.simulated.stores import DirectoryMachines
from torpor_vm_host.ports import Driver

AUTO: Final = "auto"
SIMULATED: Final = "simulated"

_log: Final = logging.getLogger(__name__)

Told = Callable[[str], None]
"""Hears what is being done, while it takes time."""


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a driver can be used on this machine, why, and what to do when it cannot."""

    ok: bool
    reason: str
    advice: str = ""


@dataclass(frozen=True)
class DriverOptions:
    """What an operator may choose: how long simulated machines take, and how real ones run."""

    timing: Timing = field(default_factory=Timing)
    qemu: QemuOptions = field(default_factory=QemuOptions)


@dataclass(frozen=True)
class DriverEnvironment:
    """What a driver is made from: a directory of its own, time, identifiers, and what the operator chose."""

    directory: Path
    clock: Clock
    ids: Ids
    options: DriverOptions = field(default_factory=DriverOptions)


async def _nothing_to_prepare(_options: DriverOptions, _clock: Clock, _told: Told) -> None:
    return


@dataclass(frozen=True)
class DriverKind:
    """`probe` finds out whether the driver really works here; `make` makes one.

    `prepare` makes what takes minutes and is needed once, telling what it does; `make` does it too where it is lacking.
    Both raise `Rejected`. Only an `automatic` one is taken by who has named none.
    """

    name: str
    probe: Callable[[], Coroutine[None, None, Availability]]
    make: Callable[[DriverEnvironment], Awaitable[Driver]]
    prepare: Callable[[DriverOptions, Clock, Told], Awaitable[None]] = _nothing_to_prepare
    automatic: bool = True


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


async def _firecracker(environment: DriverEnvironment) -> Driver:
    from torpor_vm_host.adapters.firecracker.assembling import make_driver as make  # noqa: PLC0415  (heavy)

    return make(environment.directory, _log.info)


async def _qemu_works() -> Availability:
    from torpor_vm_host.adapters.qemu import availability  # noqa: PLC0415  (only where it is used)

    ok, reason, advice = await availability.probe()
    return Availability(ok=ok, reason=reason, advice=advice)


async def _prepare_qemu(options: DriverOptions, clock: Clock, told: Told) -> None:
    from torpor_vm_host.adapters.qemu import availability  # noqa: PLC0415  (only where it is used)

    await availability.prepare(options.qemu, _wall_ns(clock), told)


async def _qemu(environment: DriverEnvironment) -> Driver:
    from torpor_vm_host.adapters.qemu import availability  # noqa: PLC0415  (only where it is used)

    return await availability.make(
        environment.options.qemu, environment.directory, environment.ids.new, _wall_ns(environment.clock)
    )


def _wall_ns(clock: Clock) -> Callable[[], int]:
    return lambda: to_us(clock.now()) * 1000


async def _simulated_works() -> Availability:
    return Availability(ok=True, reason="it runs anywhere; its machines know a few commands and are no real machines")


async def _simulated(environment: DriverEnvironment) -> Driver:
    machines = DirectoryMachines(environment.directory / "machines")
    return SimulatedDriver(machines, environment.clock, timing=environment.options.timing)


DRIVERS: Final[Mapping[str, DriverKind]] = {
    kind.name: kind
    for kind in (
        DriverKind("firecracker", _firecracker_works, _firecracker),
        DriverKind("qemu", _qemu_works, _qemu, _prepare_qemu),
        DriverKind(SIMULATED, _simulated_works, _simulated, automatic=False),
    )
}
"""All drivers, the best first: `auto` takes the first that works."""


async def probe_all(drivers: Mapping[str, DriverKind] = DRIVERS) -> dict[str, Availability]:
    """What each driver's probe says on this machine, the best driver first."""
    return {name: await kind.probe() for name, kind in drivers.items()}


async def choose_driver(wanted: str, drivers: Mapping[str, DriverKind] = DRIVERS) -> DriverKind:
    """The driver of this name, or for `auto` the best; its probe has said that it works. Raises `Rejected`."""
    if wanted == AUTO:
        return await _best(drivers)
    kind = drivers.get(wanted)
    if kind is None:
        known = ", ".join([AUTO, *drivers])
        raise Rejected("driver-unknown", f"there is no driver {wanted!r}", f"choose one of {known}")
    found = await kind.probe()
    if not found.ok:
        raise Rejected("driver-unavailable", f"the driver {wanted} cannot be used: {found.reason}", found.advice)
    return kind


async def make_driver(name: str, environment: DriverEnvironment, drivers: Mapping[str, DriverKind] = DRIVERS) -> Driver:
    """The driver of this name, or the best that works; `Rejected` when it is unknown or does not work here."""
    return await (await choose_driver(name, drivers)).make(environment)


async def _best(drivers: Mapping[str, DriverKind]) -> DriverKind:
    found: dict[str, Availability] = {}
    for kind in drivers.values():
        if kind.automatic:
            found[kind.name] = await kind.probe()
            if found[kind.name].ok:
                return kind
    reasons = "; ".join(f"{name}: {one.reason}" for name, one in found.items())
    *_, last = found.values()  # the one that asks least of a machine
    raise Rejected(
        "driver-unavailable",
        f"no real machine can run here: {reasons}",
        f"{last.advice}; or ask for simulated machines, which only look like real ones: --driver {SIMULATED}",
    )

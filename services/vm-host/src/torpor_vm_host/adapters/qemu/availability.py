"""Whether the QEMU driver can be used here, what must be made before it can, and how one is made."""

import asyncio
import contextlib
import logging
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from torpor_contracts.errors import Rejected
from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.qemu.accelerator import Acceleration
from torpor_vm_host.adapters.qemu.booting import Booting
from torpor_vm_host.adapters.qemu.confining import Confining
from torpor_vm_host.adapters.qemu.driver import TEMPLATES, VMS, QemuDriver
from torpor_vm_host.adapters.qemu.engine import Engine, find_engine, missing_binaries
from torpor_vm_host.adapters.qemu.guest import WallClock
from torpor_vm_host.adapters.qemu.options import QemuOptions
from torpor_vm_host.adapters.qemu.templates import Templates
from torpor_vm_host.images.builder import ImageLibrary, missing_tools
from torpor_vm_host.images.library import default_library
from torpor_vm_host.ports import DriverError

RUN_S: Final = 20.0
DEFAULT: Final = MachineSpec()

Told = Callable[[str], None]

_log: Final = logging.getLogger(__name__)


async def probe() -> tuple[bool, str, str]:
    """Whether machines can run here, why, and what to do when they cannot; starts a QEMU for a moment."""
    if platform.machine() != "x86_64":
        return (
            False,
            f"this machine is {platform.machine()}, and guests are x86_64",
            "use a machine with such a processor",
        )
    try:
        image = await asyncio.to_thread(default_library().find, DEFAULT.image)
        lacking = sorted({*missing_binaries(), *(missing_tools() if image is None else ())})
        if lacking:
            named = " ".join(lacking)
            return False, f"these packages are missing: {named}", f"torpor doctor --fix (or: apt-get install {named})"
        engine = await asyncio.to_thread(find_engine, "tcg")
        confining = await asyncio.to_thread(Confining.find, "if-possible")
    except Rejected as error:
        return False, error.message, error.advice
    broken = await _does_not_run(str(engine.binary))
    if broken:
        return False, f"{engine.binary} does not run: {broken}", "install qemu-system-x86 again"
    built = "" if image is not None else "; the first start builds the guest's image, which takes a minute or more"
    limited = f"; limits: none, {confining.unlimited_because}" if confining.cgroups is None else ""
    return True, f"QEMU {engine.version} at {engine.binary}{built}{limited}", ""


async def prepare(options: QemuOptions, wall_ns: WallClock, told: Told) -> None:
    """Make what all hosts of this user share: the default image, and a template of it. Raises `Rejected`."""
    library = default_library()
    with _as_refusals():
        confining = await asyncio.to_thread(Confining.find, options.limits)
        engine = await _engine(options, library, confining, wall_ns, told)
        templates = library.cache.parent / TEMPLATES
        making = Templates(
            engine,
            library,
            cache=templates,
            kept=templates,
            make=Booting(engine, confining, wall_ns),
            progress=told,
        )
        await making.make(DEFAULT)


async def make(options: QemuOptions, directory: Path, new_id: Callable[[str], str], wall_ns: WallClock) -> QemuDriver:
    """A driver for this host, its image and template there. Raises `Rejected`."""
    library = default_library()
    with _as_refusals():
        confining = await asyncio.to_thread(Confining.find, options.limits)
        engine = await _engine(options, library, confining, wall_ns, _log.info)
        await asyncio.to_thread((directory / VMS).mkdir, parents=True, exist_ok=True)
        driver = QemuDriver(
            engine,
            library,
            directory,
            confining=confining,
            slots=options.slots,
            new_id=new_id,
            wall_ns=wall_ns,
            progress=_log.info,
        )
        await driver.prepare(DEFAULT)
    return driver


async def _engine(
    options: QemuOptions, library: ImageLibrary, confining: Confining, wall_ns: WallClock, told: Told
) -> Engine:
    image = await asyncio.to_thread(library.build, DEFAULT.image, told)
    acceleration = Acceleration(confining, wall_ns=wall_ns, cache=library.cache, told=told)
    return await acceleration.choose(options.accelerator, image)


async def _does_not_run(binary: str) -> str:
    """Why a QEMU that has nothing to do does not come up; empty when it does."""
    command = (binary, "-M", "microvm", "-accel", "tcg", "-nodefaults", "-display", "none", "-S", "-monitor", "stdio")
    process = await asyncio.create_subprocess_exec(
        *command,
        "-sandbox", "on",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(RUN_S):
            _, said = await process.communicate(b"quit\n")
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"it did not come up within {RUN_S} s"
    lines = said.decode(errors="replace").strip().splitlines()
    return "" if process.returncode == 0 else (lines[-1] if lines else f"it ended with {process.returncode}")


@contextlib.contextmanager
def _as_refusals() -> Iterator[None]:
    """No driver means no service: its errors are for whoever starts it."""
    try:
        yield
    except DriverError as error:
        advice = "see `torpor doctor`, or use another driver (--driver simulated)"
        raise Rejected(error.code, error.detail, advice) from error

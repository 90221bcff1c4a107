"""Whether machines run on the processor itself or are emulated: what a real boot has shown, remembered.

A device node shows nothing: under some virtual machines guests hang with it. So a machine is booted, with a time-out.
"""

import asyncio
import logging
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.errors import Rejected
from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.qemu.booting import Booting
from torpor_vm_host.adapters.qemu.confining import Confining
from torpor_vm_host.adapters.qemu.engine import KVM, Engine, find_engine
from torpor_vm_host.adapters.qemu.guest import WallClock
from torpor_vm_host.adapters.qemu.options import WantedAccelerator
from torpor_vm_host.images.builder import Image
from torpor_vm_host.ports import DriverError

TRIAL_S: Final = 20.0
VERDICTS: Final = "accelerators.json"

_log: Final = logging.getLogger(__name__)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial showed."""

    works: bool
    reason: str


class Acceleration:
    """Finds out, with trials in `cache`, where their verdicts are kept too."""

    def __init__(self, confining: Confining, *, wall_ns: WallClock, cache: Path, told: Callable[[str], None]) -> None:
        self._confining = confining
        self._wall_ns = wall_ns
        self._cache = cache
        self._told = told

    async def choose(self, wanted: WantedAccelerator, image: Image) -> Engine:
        """The engine to use: as wanted, or KVM if a machine has really booted with it here, else emulation.

        Raises `Rejected`: what is missing, or `kvm-unusable` when KVM is wanted and does not work.
        """
        if wanted == "tcg":
            return await asyncio.to_thread(find_engine, "tcg")
        verdict = await self.kvm_works(image)
        if verdict.works:
            return await asyncio.to_thread(find_engine, "kvm")
        if wanted == "kvm":
            raise Rejected(
                "kvm-unusable", f"machines do not run with KVM here: {verdict.reason}", "use emulation (tcg)"
            )
        _log.info("machines are emulated: %s", verdict.reason)
        return await asyncio.to_thread(find_engine, "tcg")

    async def kvm_works(self, image: Image) -> Verdict:
        """Whether machines boot with KVM here; tried once for each kernel, QEMU, processor and image."""
        denied = await asyncio.to_thread(self._confining.why_not, KVM)
        if denied:
            return Verdict(works=False, reason=denied)
        engine = await asyncio.to_thread(find_engine, "kvm")
        key = f"{platform.release()} {engine.fingerprint} {image.key}"
        known = await asyncio.to_thread(_read, self._cache / VERDICTS)
        if key not in known:
            self._told("trying KVM")
            known[key] = await self._try(engine, image)
            await asyncio.to_thread(_write, self._cache / VERDICTS, known)
        return known[key]

    async def _try(self, engine: Engine, image: Image) -> Verdict:
        scratch = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=".trying-", dir=self._cache))
        booting = Booting(engine, self._confining, self._wall_ns)
        try:
            await booting(image, MachineSpec(), scratch, within_s=TRIAL_S)
        except DriverError as error:
            return Verdict(works=False, reason=str(error))
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
        return Verdict(works=True, reason="a machine has booted with it")


def _read(path: Path) -> dict[str, Verdict]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Verdict])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write(path: Path, verdicts: dict[str, Verdict]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(verdicts), indent=1))
    fresh.replace(path)

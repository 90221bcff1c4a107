"""Which QEMU this machine has, and what must be equal where a checkpoint is made and where it is loaded."""

import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final, Literal

import msgspec

from torpor_contracts.errors import Rejected
from torpor_vm_host.adapters.qemu.tsc import tsc_khz, tsc_mhz

BINARY: Final = "qemu-system-x86_64"
IMAGE_TOOL: Final = "qemu-img"
KVM: Final = Path("/dev/kvm")
VERSION_MIN: Final = (7, 2)

Accelerator = Literal["tcg", "kvm"]


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One QEMU build and how it is used; checkpoints load only in the same engine (`fingerprint`)."""

    binary: Path
    version: str
    build: str
    accelerator: Accelerator
    tsc_khz: int
    processor: str = ""
    """Under KVM the host's processor, which guests see as it is."""

    @property
    def cpu(self) -> str:
        """The processor model given to guests."""
        return "host" if self.accelerator == "kvm" else "max"

    @property
    def device(self) -> Path | None:
        """The device it must open, None when it needs none."""
        return KVM if self.accelerator == "kvm" else None

    @property
    def fingerprint(self) -> str:
        """What must be equal: the build, the machine type, the processor, and how fast its time stamps run."""
        cpu = f"{self.cpu}.{self.processor}" if self.processor else self.cpu
        return f"qemu-{self.version}-{self.build}-microvm-{self.accelerator}-{cpu}-{tsc_mhz(self.tsc_khz)}mhz"


def find_engine(accelerator: Accelerator) -> Engine:
    """The QEMU on this machine's PATH; raises `Rejected` that says what to install."""
    lacking = " ".join(missing_binaries())
    found = shutil.which(BINARY)
    if lacking or found is None:
        advice = f"torpor doctor --fix (or: apt-get install {lacking})"
        raise Rejected("qemu-missing", f"these packages are missing: {lacking}", advice)
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Rejected("qemu-broken", f"{found} does not run: {error}", "install qemu-system-x86 again") from error
    match = re.search(r"version (\d+)\.(\d+)\.(\d+)(?: \(([^)]*)\))?", said)
    if match is None or (int(match[1]), int(match[2])) < VERSION_MIN:
        wanted = ".".join(map(str, VERSION_MIN))
        raise Rejected("qemu-too-old", f"{found} says {said.strip()!r}", f"install QEMU {wanted} or newer")
    return Engine(
        binary=Path(found),
        version=f"{match[1]}.{match[2]}.{match[3]}",
        build=hashlib.sha256((match[4] or "").encode()).hexdigest()[:8],
        accelerator=accelerator,
        tsc_khz=tsc_khz(),
        processor=_processor() if accelerator == "kvm" else "",
    )


def missing_binaries() -> list[str]:
    """The packages of QEMU that this machine lacks."""
    wanted = {BINARY: "qemu-system-x86", IMAGE_TOOL: "qemu-utils"}
    return [package for tool, package in wanted.items() if shutil.which(tool) is None]


def _processor() -> str:
    """A digest of the processor's model and features."""
    kept = re.findall(r"^(?:model name|flags)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[:2]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:8]

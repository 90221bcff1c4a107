"""Which QEMU this machine has, what it can do, and the command line of a machine; no process is started here."""

import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final, Literal

import msgspec

from torpor_contracts.errors import Rejected
from torpor_contracts.session import MachineSpec

BINARY: Final = "qemu-system-x86_64"
AGENT_PORT: Final = "torpor.agent"
VERSION_MIN: Final = (7, 2)
SANDBOX: Final = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"

Accelerator = Literal["tcg", "kvm"]


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One QEMU build and how it is used; checkpoints load only in the same engine (`fingerprint`)."""

    binary: Path
    version: str
    build: str
    accelerator: Accelerator
    tsc_khz: int

    @property
    def cpu(self) -> str:
        """The processor model given to guests."""
        return "host" if self.accelerator == "kvm" else "max"

    @property
    def fingerprint(self) -> str:
        """What must be equal where a checkpoint is made and where it is loaded."""
        return f"qemu-{self.version}-{self.build}-microvm-{self.accelerator}-{self.cpu}"


def find_engine(accelerator: Accelerator) -> Engine:
    """The QEMU on this machine's PATH; raises `Rejected` that says what to install."""
    found = shutil.which(BINARY)
    if found is None:
        raise Rejected(
            "qemu-missing",
            f"{BINARY} is not installed",
            "sudo apt-get install qemu-system-x86 (or: torpor doctor --fix)",
        )
    printed = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout  # noqa: S603
    match = re.search(r"version (\d+)\.(\d+)\.(\d+)(?: \(([^)]*)\))?", printed)
    if match is None or (int(match[1]), int(match[2])) < VERSION_MIN:
        wanted = ".".join(map(str, VERSION_MIN))
        raise Rejected("qemu-too-old", f"{found} says {printed.strip()!r}", f"install QEMU {wanted} or newer")
    build = hashlib.sha256((match[4] or "").encode()).hexdigest()[:8]
    return Engine(
        binary=Path(found),
        version=f"{match[1]}.{match[2]}.{match[3]}",
        build=build,
        accelerator=accelerator,
        tsc_khz=_tsc_khz(),
    )


def _tsc_khz() -> int:
    """The processor's clock in kHz: a guest told it does not calibrate, which hangs on a busy host."""
    match = re.search(r"^cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return int(float(match[1]) * 1000) if match else 2_000_000


class MachineFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine is made of on the host. `memory` may be `/proc/self/fd/N` of a sealed memory file."""

    kernel: Path
    initrd: Path
    memory: str
    memory_shared: bool
    disk: Path
    console: Path | None = None


def command_line(
    engine: Engine, spec: MachineSpec, files: MachineFiles, *, qmp_fd: int, agent_fd: int, incoming: bool
) -> list[str]:
    """QEMU's arguments. The machine line is the same for boot and restore, or the device state would not load."""
    threads = "single" if spec.vcpus == 1 else "multi"
    accelerator = f"tcg,thread={threads}" if engine.accelerator == "tcg" else "kvm"
    kernel_line = f"quiet panic=-1 tsc_early_khz={engine.tsc_khz} tsc=reliable random.trust_cpu=on"
    memory = f"memory-backend-file,id=mem0,size={spec.memory_mib}M,mem-path={files.memory}"
    return [
        str(engine.binary),
        "-name", "torpor",
        "-M", "microvm,rtc=on,memory-backend=mem0",
        "-accel", accelerator,
        "-cpu", engine.cpu,
        "-m", str(spec.memory_mib),
        "-smp", str(spec.vcpus),
        "-nodefaults", "-no-user-config", "-nographic", "-no-reboot",
        "-sandbox", SANDBOX,
        "-object", f"{memory},share={'on' if files.memory_shared else 'off'}",
        "-kernel", str(files.kernel),
        "-initrd", str(files.initrd),
        "-append", kernel_line,
        "-chardev", f"socket,id=qmp,fd={qmp_fd},server=on,wait=off",
        "-mon", "chardev=qmp,mode=control",
        "-device", "virtio-serial-device,id=serial0",
        "-chardev", f"socket,id=agent,fd={agent_fd},server=on,wait=off",
        "-device", f"virtserialport,chardev=agent,name={AGENT_PORT}",
        "-blockdev", f"driver=file,filename={files.disk},node-name=file0,cache.direct=off",
        "-blockdev", "driver=qcow2,file=file0,node-name=disk0,discard=unmap",
        "-device", "virtio-blk-device,drive=disk0,id=disk",
        "-device", "virtio-rng-device",
        "-serial", f"file:{files.console}" if files.console else "null",
        *(["-incoming", "defer"] if incoming else []),
    ]  # fmt: skip

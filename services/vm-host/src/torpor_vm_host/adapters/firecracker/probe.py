"""Whether Firecracker really works on this machine: found out by letting it run a kernel, within a bound."""

import asyncio
import contextlib
import os
import platform
import struct
import tempfile
from pathlib import Path
from typing import Final

from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.firecracker import jail as names
from torpor_vm_host.adapters.firecracker import requests
from torpor_vm_host.adapters.firecracker.api import Api
from torpor_vm_host.adapters.firecracker.engine import BZIMAGE_SINCE, Engine
from torpor_vm_host.adapters.firecracker.jail import Jail, Jailing
from torpor_vm_host.adapters.firecracker.kernel import place_kernel
from torpor_vm_host.adapters.firecracker.process import OUTPUT, Recorded, last_words, spawn
from torpor_vm_host.ports import DriverError

KVM: Final = Path("/dev/kvm")
BOOT_S_MAX: Final = 20.0
POLL_S: Final = 0.01
MEMORY_MIB: Final = 128
BOOT_ARGS: Final = "quiet reboot=k panic=-1 8250.nr_uarts=0 i8042.noaux i8042.nomux i8042.dumbkbd"
"""A kernel that finds no root file system panics, and then resets the machine, which ends Firecracker."""
LOAD_AT: Final = 0x100_0000
RESET: Final = bytes.fromhex("b0fe e664 f4 ebfd")
"""mov al, 0xfe; out 0x64, al; hlt; jmp to hlt: the keyboard controller's reset, which ends Firecracker."""


class Unusable(Exception):  # noqa: N818  (an answer)
    """Firecracker cannot be used here; the text says why, `advice` what to do."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


async def try_out(engine: Engine, scratch: Path, kernel: Path | None) -> None:
    """Let a machine run in the engine; raises `Unusable`.

    `kernel`: a guest kernel, where one has been built. It is the better witness: there are machines whose /dev/kvm runs
    a few instructions but hangs a kernel. Without one, a program of a few instructions is run.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Unusable("it runs on Linux on x86-64 only", "use --driver qemu")
    if os.geteuid() != 0:
        raise Unusable("its jailer needs root's rights", "run the vm-host as root, or use --driver qemu")
    if not await asyncio.to_thread(os.access, KVM, os.R_OK | os.W_OK):
        advice = "enable hardware virtualisation (nested, in a virtual machine), or use --driver qemu"
        raise Unusable(f"there is no usable {KVM}", advice)
    await asyncio.to_thread(scratch.mkdir, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="probe-", dir=scratch) as folder:
        try:
            await _boot(Jail(Path(folder), "probe", engine, Jailing()), engine, kernel)
        except (DriverError, OSError) as error:
            raise Unusable(
                f"a machine did not run: {error}", "see the host's kernel log, or use --driver qemu"
            ) from error


async def _boot(jail: Jail, engine: Engine, kernel: Path | None) -> None:
    await asyncio.to_thread(_lay_out, jail, engine, kernel)
    machine = MachineSpec(memory_mib=MEMORY_MIB, disk_mib=1)
    process = await spawn(jail.directory, jail, jail.command(machine))
    try:
        with contextlib.closing(Api(jail.root / names.API_SOCKET)) as api:
            await api.put("/machine-config", requests.MachineConfig(vcpu_count=1, mem_size_mib=MEMORY_MIB))
            source = requests.BootSource(kernel_image_path=names.KERNEL, boot_args=BOOT_ARGS)
            await api.put("/boot-source", source)
            await api.put("/actions", requests.Action(action_type="InstanceStart"))
        await _ended(process, jail)
    finally:
        await process.kill()


async def _ended(process: Recorded, jail: Jail) -> None:
    """A machine that has run resets itself; one that hangs does not."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + BOOT_S_MAX
    while process.alive:
        if clock() > deadline:
            detail = f"it did not come to its end within {BOOT_S_MAX:.0f} s"
            raise DriverError("probe-hung", detail, retryable=False)
        await asyncio.sleep(POLL_S)
    words = await asyncio.to_thread(last_words, jail.directory / OUTPUT)
    if "exit_code=0" not in words:
        raise DriverError("probe-failed", f"Firecracker said: {words}", retryable=False)


def _lay_out(jail: Jail, engine: Engine, kernel: Path | None) -> None:
    jail.lay_out()
    target = jail.root / names.KERNEL
    if kernel is None:
        target.write_bytes(resetting_kernel())
    elif engine.version >= BZIMAGE_SINCE:
        jail.link(kernel, names.KERNEL)
        return
    else:
        place_kernel(kernel, target)
    target.chmod(0o444)


def resetting_kernel() -> bytes:
    """An ELF file that a loader takes for a kernel and that resets the machine it runs on."""
    header_bytes, program_bytes = 64, 56
    at = header_bytes + program_bytes
    ident = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    header = ident + struct.pack(
        "<HHIQQQIHHHHHH", 2, 62, 1, LOAD_AT, header_bytes, 0, 0, header_bytes, program_bytes, 1, 0, 0, 0
    )
    program = struct.pack("<IIQQQQQQ", 1, 5, at, LOAD_AT, LOAD_AT, len(RESET), len(RESET), 4096)
    return header + program + RESET

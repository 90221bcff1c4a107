"""Loading a machine that waits: from its template, or from a checkpoint over its template; nothing runs before."""

import asyncio
import os
from typing import Any, Final

from torpor_vm_host.adapters.qemu.disks import copy_over, refused
from torpor_vm_host.adapters.qemu.memory import find_memory, put_pages
from torpor_vm_host.adapters.qemu.parts import Parts
from torpor_vm_host.adapters.qemu.process import QemuProcess
from torpor_vm_host.adapters.qemu.records import DISK
from torpor_vm_host.adapters.qemu.template import Template
from torpor_vm_host.ports import VM_GONE, DriverError

LOAD_S: Final = 30.0
POLL_S: Final = 0.0005
POLL_S_MAX: Final = 0.01


async def load_template(process: QemuProcess, template: Template) -> None:
    """Make the machine what the template was; it stays paused."""
    capabilities: list[dict[str, Any]] = [{"capability": "x-ignore-shared", "state": True}]
    await process.command("migrate-set-capabilities", {"capabilities": capabilities})
    await _load(process, template.devices)


async def load_checkpoint(process: QemuProcess, template: Template, parts: Parts) -> None:
    """Make the machine what the checkpoint holds; it stays paused. Raises `DriverError`."""
    try:
        await asyncio.to_thread(_put, process, template, parts)
    except OSError as error:
        code = VM_GONE if not process.alive else "restore-failed"
        raise refused(error, code, "the checkpoint cannot be put into the machine") from error
    except ValueError as error:
        raise DriverError("checkpoint-corrupt", str(error), retryable=False) from error
    await _load(process, parts.state)


def _put(process: QemuProcess, template: Template, parts: Parts) -> None:
    put_pages(parts.memory, process.pid, find_memory(process.pid, template.memory.name))
    # A machine that waits for a state opens its disk anew when it has it (QEMU: bdrv_activate), so it may be written.
    copy_over(parts.disk, process.directory / DISK)


async def _load(process: QemuProcess, state: bytes) -> None:
    descriptor = os.memfd_create("torpor-state", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, state)
        os.lseek(descriptor, 0, os.SEEK_SET)
        await process.command("getfd", {"fdname": "state"}, descriptor=descriptor)
    finally:
        os.close(descriptor)
    await process.command("migrate-incoming", {"uri": "fd:state"})
    clock, pause_s = asyncio.get_running_loop().time, POLL_S
    deadline = clock() + LOAD_S
    while (await process.command("query-status"))["status"] == "inmigrate":
        if clock() > deadline:
            raise DriverError("restore-failed", "QEMU did not load the machine's state in time", retryable=True)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S_MAX)

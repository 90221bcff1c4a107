"""Checkpoints of a running machine: of one that stays paused, and of one that goes on after the shortest of pauses.

Within a pause happens only what must: stop, the point in time of the disk, the device state, and a copy of the
changed pages. QEMU is given its commands without waiting for answers, and the pages are copied while it obeys.
What was copied is compared with the template and written when the machine runs again. The disk is copied by a job of
QEMU that keeps the old content of what the guest overwrites meanwhile, so no chain of images grows.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

from torpor_vm_host.adapters.qemu.capture import Capture
from torpor_vm_host.adapters.qemu.command_line import DISK_NODE
from torpor_vm_host.adapters.qemu.disks import copy_over, refused
from torpor_vm_host.adapters.qemu.machine import Machine
from torpor_vm_host.adapters.qemu.memory import find_memory
from torpor_vm_host.adapters.qemu.parts import DISK, write
from torpor_vm_host.adapters.qemu.process import FULL, QemuProcess
from torpor_vm_host.adapters.qemu.records import DISK as OWN_DISK
from torpor_vm_host.adapters.qemu.template import Template
from torpor_vm_host.ports import DriverError, OnPause, PartFile

JOB: Final = "checkpoint"
COPY_NODE: Final = "checkpoint"
COPY_S: Final = 600.0
"""How long the copy of a disk may take before it is given up."""


async def checkpoint_paused(machine: Machine, template: Template, directory: Path) -> list[PartFile]:
    """Pause the machine and write its parts into the directory; it stays paused. Raises `DriverError`."""
    process = machine.process
    with _failing():
        capture = await asyncio.to_thread(_capture_of, process, template)
        try:
            async with _state_of(process) as state:
                stopped = process.send("stop")
                saved = process.send("xen-save-devices-state", {"filename": state.name, "live": False})
                await process.answer(stopped, "stop")
                machine.paused = True
                await asyncio.to_thread(capture.take)
                await process.answer(saved, "xen-save-devices-state")
                return await asyncio.to_thread(_write_paused, capture, state, process, template, directory)
        finally:
            capture.close()


async def checkpoint_live(
    machine: Machine, template: Template, directory: Path, at_pause: OnPause
) -> tuple[list[PartFile], float]:
    """Write the parts of a machine that goes on; also how long it stood still, in milliseconds."""
    process = machine.process
    with _failing():
        await asyncio.to_thread(copy_over, template.empty_overlay, directory / DISK)
        capture = await asyncio.to_thread(_capture_of, process, template)
        try:
            async with _state_of(process) as state:
                async with _copy_node(machine, directory / DISK) as node:
                    pause_ms = await _within_the_pause(process, capture, state.name, node, at_pause)
                    await _copied(machine)
                # QEMU has let go of the disk, and with that written the last of it: now it has a digest.
                parts = await asyncio.to_thread(lambda: write(capture.runs(), state.read(), template, directory))
            return parts, pause_ms
        finally:
            capture.close()


async def _within_the_pause(process: QemuProcess, capture: Capture, state: str, node: str, at_pause: OnPause) -> float:
    backup = {
        "job-id": JOB,
        "device": DISK_NODE,
        "target": node,
        "sync": "top",
        "auto-dismiss": False,
    }
    began = time.perf_counter()
    sent = {
        "stop": process.send("stop"),
        "blockdev-backup": process.send("blockdev-backup", backup),
        "xen-save-devices-state": process.send("xen-save-devices-state", {"filename": state, "live": False}),
    }
    try:
        await process.answer(sent.pop("stop"), "stop")
        copying = asyncio.ensure_future(asyncio.to_thread(capture.take))
        try:
            await at_pause()
        finally:
            await copying
        for what, answer in sent.items():
            await process.answer(answer, what)
    finally:
        await process.command("cont")
    return 1000 * (time.perf_counter() - began)


async def drop_leftovers(process: QemuProcess) -> None:
    """End what an earlier process of ours had begun in this QEMU and did not live to finish."""
    for job in await process.command("query-jobs"):
        if job["id"] != JOB:
            continue
        if job["status"] != "concluded":
            await process.command("job-cancel", {"id": JOB})
            deadline = asyncio.get_running_loop().time() + COPY_S
            while any(one["status"] != "concluded" for one in await process.command("query-jobs")):
                if asyncio.get_running_loop().time() > deadline:
                    raise DriverError("disk-failed", "a copy of the disk cannot be given up", retryable=True)
                await asyncio.sleep(0.01)
        await process.command("job-dismiss", {"id": JOB})
    nodes = await process.command("query-named-block-nodes", {"flat": True})
    if any(node.get("node-name") == COPY_NODE for node in nodes):
        await process.command("blockdev-del", {"node-name": COPY_NODE})


@contextlib.asynccontextmanager
async def _copy_node(machine: Machine, target: Path) -> AsyncIterator[str]:
    """An image that QEMU may copy its disk into: it holds what is written to it and nothing below."""
    process = machine.process
    async with _file_for(process, target, flags=os.O_RDWR) as name:
        image: dict[str, Any] = {
            "driver": "qcow2",
            "node-name": COPY_NODE,
            "file": {"driver": "file", "filename": name},
            "backing": None,
        }
        await process.command("blockdev-add", image)
        machine.jobs[JOB] = asyncio.Event()
        try:
            yield COPY_NODE
        finally:
            del machine.jobs[JOB]
            if process.alive:
                await drop_leftovers(process)


async def _copied(machine: Machine) -> None:
    """Wait until the copy of the disk is whole."""
    try:
        async with asyncio.timeout(COPY_S):
            await _first_of(machine.jobs[JOB], machine.process.ended)
    except TimeoutError as error:
        raise DriverError("disk-failed", f"the disk was not copied within {COPY_S} s", retryable=True) from error
    for job in await machine.process.command("query-jobs"):
        if job["id"] == JOB and job.get("error"):
            code = "no-space" if FULL in job["error"] else "disk-failed"
            raise DriverError(code, f"the disk could not be copied: {job['error']}", retryable=True)


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


class _State:
    """Where QEMU writes a device state to: by `name`, into memory, which is there when the disk is full."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self.name = name

    def read(self) -> bytes:
        """What has been written."""
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)


@contextlib.asynccontextmanager
async def _state_of(process: QemuProcess) -> AsyncIterator[_State]:
    descriptor = os.memfd_create("torpor-state", os.MFD_CLOEXEC)
    try:
        async with _file_for(process, Path(f"/proc/self/fd/{descriptor}"), os.O_WRONLY) as name:
            yield _State(descriptor, name)
    finally:
        os.close(descriptor)


@contextlib.asynccontextmanager
async def _file_for(process: QemuProcess, path: Path, flags: int) -> AsyncIterator[str]:
    """A file of ours that QEMU may open by the name given, and by no other."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        given = (await process.command("add-fd", descriptor=descriptor))["fdset-id"]
    finally:
        os.close(descriptor)
    try:
        yield f"/dev/fdset/{given}"
    finally:
        if process.alive:
            await process.command("remove-fd", {"fdset-id": given})


def _capture_of(process: QemuProcess, template: Template) -> Capture:
    return Capture(process.pid, find_memory(process.pid, template.memory.name))


def _write_paused(
    capture: Capture, state: _State, process: QemuProcess, template: Template, directory: Path
) -> list[PartFile]:
    copy_over(process.directory / OWN_DISK, directory / DISK)
    return write(capture.runs(), state.read(), template, directory)


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """What the operating system refuses, as a driver's error."""
    try:
        yield
    except OSError as error:
        raise refused(error, "checkpoint-failed") from error
    except ValueError as error:
        raise DriverError("checkpoint-failed", str(error), retryable=True) from error

"""Machines that wait for somebody: a confined QEMU with a template's memory and an empty disk, and nothing running."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from torpor_vm_host.adapters.qemu.command_line import Opened, command_line
from torpor_vm_host.adapters.qemu.confining import CLAIM, PROCESS, Claim, Confining, read_claim, release
from torpor_vm_host.adapters.qemu.disks import copy_over, refused
from torpor_vm_host.adapters.qemu.engine import Engine
from torpor_vm_host.adapters.qemu.process import QemuProcess, Sockets
from torpor_vm_host.adapters.qemu.records import DISK, STARTED
from torpor_vm_host.adapters.qemu.template import Template


class Yard:
    """Where this host's machines are: `roots` are the folders in which each has a directory of its own."""

    def __init__(self, engine: Engine, confining: Confining, *roots: Path) -> None:
        self._engine = engine
        self._confining = confining
        self._roots = roots
        self._giving = asyncio.Lock()

    @property
    def confining(self) -> Confining:
        """How machines are confined here."""
        return self._confining

    def claimed(self) -> Iterator[Path]:
        """The directories of machines that hold, or may hold, something beside their directory."""
        for root in self._roots:
            for path in sorted(root.glob(f"*/{CLAIM}")):
                yield path.parent

    async def claim(self, directory: Path, name: str) -> Claim:
        """Write down what a machine is about to hold; no two have the same user."""
        async with self._giving:
            return await asyncio.to_thread(self._claim, directory, name)

    async def spawn(self, directory: Path, name: str, template: Template, *, wanted: bool) -> QemuProcess:
        """A machine that waits to be loaded; raises `DriverError`, and then nothing of it is left."""
        try:
            claim = await self.claim(directory, name)
            await asyncio.to_thread(self._lay_out, directory, name, template, wanted=wanted)
            return await self._start(directory, template, claim)
        except BaseException as error:
            await clear(directory)
            if isinstance(error, OSError):
                raise refused(error, "start-failed") from error
            raise

    def _claim(self, directory: Path, name: str) -> Claim:
        claims = [read_claim(other) for other in self.claimed() if other != directory]
        taken = [one.uid for one in claims if one is not None and one.uid is not None]
        return self._confining.claim(directory, name, taken)

    def _lay_out(self, directory: Path, name: str, template: Template, *, wanted: bool) -> None:
        self._confining.limit(name, template.info.machine, wanted=wanted)
        copy_over(template.empty_overlay, directory / DISK)

    async def _start(self, directory: Path, template: Template, claim: Claim) -> QemuProcess:
        sockets = Sockets(directory)
        disk = os.open(directory / DISK, os.O_RDWR | os.O_CLOEXEC)
        opened = Opened(
            kernel=template.kernel,
            initrd=template.initrd,
            rootfs=template.rootfs,
            template_disk=template.disk,
            disk=disk,
            memory=template.memory.descriptor,
            memory_is_shared=False,
            qmp=sockets.qmp,
            agent=sockets.agent,
        )
        machine = template.info.machine
        argv = self._confining.command(
            command_line(self._engine, machine, opened, incoming=True), directory, claim, machine, self._engine.device
        )
        try:
            return await QemuProcess.spawn(directory, argv, sockets, opened.inherited())
        finally:
            sockets.close()
            os.close(disk)


async def clear(directory: Path, process: QemuProcess | None = None) -> None:
    """End the machine in this directory and give back all it holds beside the directory; idempotent.

    Raises `DriverError` when something stays.
    """
    found = process if process is not None and process.alive else QemuProcess.find(directory)
    if found is not None:
        await found.kill()
    elif process is not None:
        process.let_go()
    claim = read_claim(directory)
    if claim is not None:
        await asyncio.to_thread(release, claim)
    with contextlib.suppress(FileNotFoundError):
        for name in (STARTED, PROCESS, CLAIM):
            (directory / name).unlink(missing_ok=True)

"""One machine this driver is in charge of: its processes, its API, the channel to its guest, and its checkpoints."""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.ids import SessionId, VmId
from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.firecracker import deltas, parts
from torpor_vm_host.adapters.firecracker import jail as names
from torpor_vm_host.adapters.firecracker.api import SNAPSHOT_S_MAX, Api
from torpor_vm_host.adapters.firecracker.copying import clone
from torpor_vm_host.adapters.firecracker.jail import Jail
from torpor_vm_host.adapters.firecracker.process import Recorded
from torpor_vm_host.adapters.firecracker.requests import SnapshotCreate
from torpor_vm_host.adapters.firecracker.template import Template, TemplateInfo
from torpor_vm_host.adapters.firecracker.vsock import open_channel
from torpor_vm_host.adapters.qemu.following import Followers
from torpor_vm_host.adapters.qemu.guest import GuestChannel, Identity
from torpor_vm_host.ports import VM_GONE, DriverError, LiveCheckpoint, OnPause, PartFile

HELLO_S_MAX: Final = 30.0
QUIET_S_MAX: Final = 5.0
SPEC: Final = "spec.json"
READY: Final = "ready"
"""Exists since the machine's start came to its end."""
PAGES: Final = "pages"
"""The page file that, with what a diff snapshot would bring, is the machine's memory; none: it is the template's."""
UNSURE: Final = "unsure"
"""Exists while a diff snapshot is being made into a page file: if that fails, what is dirty is no longer known."""


class KeptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is written beside a machine about what it was started for."""

    vm_id: VmId
    session_id: SessionId
    incarnation: int
    machine: MachineSpec
    template_key: str
    template_digest: str = ""
    identity: Identity

    def builds_on(self, info: TemplateInfo) -> bool:
        """Whether this is the template the machine was started from; earlier releases noted its key alone."""
        if self.template_digest:
            return info.digests["memory"] == self.template_digest
        return info.key == self.template_key


class Machine:
    """A machine whose Firecracker runs. When its page-fault handler ends, it is ended too: it would hang."""

    def __init__(
        self, kept: KeptSpec, jail: Jail, template: Template | None, process: Recorded, handler: Recorded | None
    ) -> None:
        self.kept = kept
        self.process = process
        self.lock = asyncio.Lock()
        self.api = Api(jail.root / names.API_SOCKET)
        self._jail = jail
        self._template = template
        self._handler = handler
        self._talking: tuple[GuestChannel, Followers] | None = None
        self._greeting = asyncio.Lock()
        self._quiet = asyncio.Condition()
        self._requests = 0
        self._closed_for_requests = False
        if handler is not None:
            handler.watch(self._handler_ended)

    @property
    def template(self) -> Template:
        """What the machine's checkpoints build on; raises `DriverError("template-missing")`."""
        if self._template is None:
            detail = f"the template {self.kept.template_key[:12]} that {self.kept.vm_id} builds on is not there"
            raise DriverError("template-missing", detail, retryable=False)
        return self._template

    @property
    def alive(self) -> bool:
        """Whether it can run still: its Firecracker is there, and its page-fault handler if it needs one."""
        return self.process.alive and (self._handler is None or self._handler.alive)

    async def talk(self) -> tuple[GuestChannel, Followers]:
        """The open channel to the guest; opens it, and greets the guest as who it is, the first time."""
        async with self._greeting:
            if self._talking is not None and not self._talking[0].is_open:
                self._talking = None
            if self._talking is None:
                self._talking = await self._greeted()
            return self._talking

    async def _greeted(self) -> tuple[GuestChannel, Followers]:
        """A channel on which the guest has answered.

        A guest learns a moment after it goes on that it was snapshot, and then closes every vsock connection it has:
        also one that has just been made. So a channel that is closed before it has served is opened once more.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + HELLO_S_MAX
        while True:
            guest = await open_channel(self._jail.root / names.VSOCK, max(0.001, deadline - clock()))
            followers = Followers(guest)
            try:
                await guest.hello(self.kept.identity, time.time_ns, max(0.001, deadline - clock()))
                await guest.request("ping")
            except DriverError as error:
                guest.close()
                if error.code != VM_GONE or not self.alive or clock() >= deadline:
                    raise
            except BaseException:
                guest.close()
                raise
            else:
                return guest, followers

    def hang_up(self) -> None:
        """Cut the channel to the guest without a word."""
        if self._talking is not None:
            self._talking[0].close()
            self._talking = None

    @asynccontextmanager
    async def speaking(self) -> AsyncIterator[tuple[GuestChannel, Followers]]:
        """The open channel, which no checkpoint cuts meanwhile; waits while the machine stands still, until its end."""
        async with self._quiet:
            await self._quiet.wait_for(lambda: not self._closed_for_requests)
            self._requests += 1
        try:
            yield await self.talk()
        finally:
            async with self._quiet:
                self._requests -= 1
                self._quiet.notify_all()

    async def pause(self) -> None:
        """Let the machine stand still when no request is on its way; idempotent.

        Firecracker resets every vsock connection when it makes a snapshot: an answer on its way would be lost.
        """
        async with self._quiet:
            self._closed_for_requests = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUIET_S_MAX):
                    await self._quiet.wait_for(lambda: self._requests == 0)
        await self.api.pause()

    async def resume(self) -> None:
        """Let the machine go on; idempotent."""
        await self.api.resume()
        await self._open_for_requests()

    async def find_out(self, timeout_s: float) -> None:
        """Learn of a machine that an earlier driver started whether it stands still."""
        found = await self.api.describe(timeout_s=timeout_s)
        self._closed_for_requests = found.state == "Paused"

    async def _open_for_requests(self) -> None:
        async with self._quiet:
            self._closed_for_requests = False
            self._quiet.notify_all()

    async def checkpoint(self, directory: Path) -> list[PartFile]:
        """See `ports.Driver.checkpoint`."""
        async with self.lock, self._taking() as template:
            await self.pause()
            whole = await self._snapshot()
            return await asyncio.to_thread(self._write_parts, template, directory, whole=whole, aside=None)

    async def checkpoint_live(self, directory: Path, at_pause: OnPause) -> LiveCheckpoint:
        """See `ports.Driver.checkpoint_live`."""
        clock = asyncio.get_running_loop().time
        async with self.lock, self._taking() as template:
            if self._closed_for_requests:
                raise DriverError("vm-not-running", f"{self.kept.vm_id} is paused", retryable=False)
            began = clock()
            try:
                await self.pause()
                await at_pause()
                whole = await self._snapshot()
                aside = await asyncio.to_thread(self._set_disk_aside, template, directory)
            finally:
                await self.resume()
            pause_ms = (clock() - began) * 1000
            parts = await asyncio.to_thread(self._write_parts, template, directory, whole=whole, aside=aside)
            return LiveCheckpoint(parts=parts, pause_ms=pause_ms)

    @asynccontextmanager
    async def _taking(self) -> AsyncIterator[Template]:
        """Around all that takes a checkpoint: a full disk, say, is an error that may be gone the next time."""
        template = self.template
        try:
            yield template
        except OSError as error:
            raise DriverError("checkpoint-failed", str(error), retryable=True) from error
        finally:
            await asyncio.to_thread(self._jail.remove, names.STATE_OUT, names.MEMORY_OUT)

    async def _snapshot(self) -> bool:
        """Let Firecracker write state and memory; answers whether it is all of memory."""
        self.hang_up()
        whole = await asyncio.to_thread(self._needs_whole)
        body = SnapshotCreate(
            snapshot_path=names.STATE_OUT,
            mem_file_path=names.MEMORY_OUT,
            snapshot_type="Full" if whole else "Diff",
        )
        await self.api.put("/snapshot/create", body, timeout_s=SNAPSHOT_S_MAX)
        return whole

    def let_go(self) -> None:
        """Let go of the machine; it goes on."""
        self.hang_up()
        if self._handler is not None:
            self._handler.unwatch()
        self.api.close()

    async def end(self) -> None:
        """End its processes."""
        self.let_go()
        await self.process.kill()
        if self._handler is not None:
            await self._handler.kill()
        await self._open_for_requests()

    def _handler_ended(self) -> None:
        self.process.signal(9)
        self.hang_up()

    def _needs_whole(self) -> bool:
        """Whether a diff snapshot would not do; until its pages are kept, another one would not do either."""
        unsure = self._jail.directory / UNSURE
        if unsure.exists() or not deltas.holes_are_exact(self._jail.root):
            return True
        unsure.touch()
        return False

    def _set_disk_aside(self, template: Template, directory: Path) -> Path:
        """The disk as it is now, to be read when the machine runs again: a clone, or else what it differs in."""
        raw = directory / "disk.raw"
        if clone(self._jail.root / names.DISK, raw):
            return raw
        _write_disk(self._jail.root / names.DISK, template, directory / "disk")
        return directory / "disk"

    def _write_parts(self, template: Template, directory: Path, *, whole: bool, aside: Path | None) -> list[PartFile]:
        """Write the parts from what Firecracker wrote, and from the disk or what was set aside of it."""
        memory, disk = directory / "memory", directory / "disk"
        out, own = self._jail.root / names.MEMORY_OUT, self._jail.directory / PAGES
        base, digest = template.memory, bytes.fromhex(template.info.digests["memory"])
        if whole:
            deltas.write_from_file(out, base, digest, memory)
        else:
            deltas.write_from_diff(out, own if own.exists() else None, base, digest, memory)
        keep(memory, own)
        (self._jail.directory / UNSURE).unlink(missing_ok=True)
        if aside != disk:
            _write_disk(aside or self._jail.root / names.DISK, template, disk)
        if aside is not None and aside != disk:
            aside.unlink()
        state = (self._jail.root / names.STATE_OUT).read_bytes()
        return parts.bind(memory, disk, state, template, directory)


def _write_disk(disk: Path, template: Template, target: Path) -> None:
    deltas.write_from_file(disk, template.disk, bytes.fromhex(template.info.digests["disk"]), target)


def keep(pages: Path, own: Path) -> None:
    """Give a page file a name of the machine's own, under which it stays when its first name is removed."""
    fresh = own.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    try:
        os.link(pages, fresh)
    except OSError:
        shutil.copyfile(pages, fresh)
    fresh.replace(own)


def gone(vm_id: VmId) -> DriverError:
    """What is said of a machine that is not there."""
    return DriverError(VM_GONE, f"there is no machine {vm_id}", retryable=False)


def read_kept(directory: Path) -> KeptSpec | None:
    """What is written about the machine in `directory`, or None when nothing of that can be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((directory / SPEC).read_bytes(), type=KeptSpec)
    return None

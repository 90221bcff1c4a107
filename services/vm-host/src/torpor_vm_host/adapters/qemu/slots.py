"""Warm slots: machines that nobody has asked for yet, so that one that is asked for is there in milliseconds.

A `blank` slot is a process that waits to be loaded; a `warm` one has been loaded from its template, greeted and
exercised, and stands still. Each has a directory of its own, which says what it holds before it holds it. An empty pool
only costs time: whoever finds none starts a machine as if there were no pool.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from torpor_vm_host.adapters.qemu.booting import NOBODY
from torpor_vm_host.adapters.qemu.cgroups import join
from torpor_vm_host.adapters.qemu.confining import CLAIM, PROCESS, read_claim, release
from torpor_vm_host.adapters.qemu.guest import GuestChannel, WallClock
from torpor_vm_host.adapters.qemu.loading import load_template
from torpor_vm_host.adapters.qemu.options import SlotPolicy
from torpor_vm_host.adapters.qemu.process import AGENT_SOCKET, ERRORS, QMP_SOCKET, QemuProcess
from torpor_vm_host.adapters.qemu.records import DISK
from torpor_vm_host.adapters.qemu.template import Template
from torpor_vm_host.adapters.qemu.waiting import Yard, clear
from torpor_vm_host.adapters.qemu.warming import FIRST, exercise
from torpor_vm_host.ports import DriverError
from torpor_vm_host.workers import Workers

HELLO_S: Final = 30.0
RETRY_S: Final = 5.0
RETRY_S_MAX: Final = 300.0
MOVED: Final = (DISK, QMP_SOCKET, AGENT_SOCKET, ERRORS)
"""What of a slot becomes the machine's, and then the record of the process: that is the moment it changes hands."""

Kind = Literal["warm", "blank"]

_log: Final = logging.getLogger(__name__)


def memory_available_mib() -> int:
    """What the kernel reckons can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0


class _Slot:
    def __init__(self, kind: Kind, template: Template, process: QemuProcess) -> None:
        self.kind = kind
        self.template = template
        self.process = process
        self.guest: GuestChannel | None = None

    def is_of(self, kind: Kind, template: Template) -> bool:
        return self.kind == kind and self.template.memory.digest == template.memory.digest


class Slots:
    """The pool of one host, its slots in directories below `root`. `available_mib`: what memory this host has free."""

    def __init__(
        self,
        yard: Yard,
        root: Path,
        policy: SlotPolicy,
        *,
        new_name: Callable[[], str],
        wall_ns: WallClock,
        available_mib: Callable[[], int] = memory_available_mib,
    ) -> None:
        self._yard = yard
        self._root = root
        self._policy = policy
        self._new_name = new_name
        self._wall_ns = wall_ns
        self._available_mib = available_mib
        self._free: list[_Slot] = []
        self._wanted: dict[str, tuple[Template, float]] = {}
        self._workers = Workers()
        self._keeper: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._failures = 0
        self._not_before_s = 0.0

    async def clear_leftovers(self) -> None:
        """End the slots of an earlier process of ours; raises `DriverError` when one does not end."""
        for directory in await asyncio.to_thread(lambda: list(self._root.glob("*"))):
            await clear(directory)
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def count(self, kind: Kind) -> int:
        """How many slots of this kind are free."""
        return sum(slot.kind == kind and slot.process.alive for slot in self._free)

    def want(self, template: Template) -> None:
        """Machines of this template are being asked for: keep slots of it from now on, for a while."""
        self._wanted.pop(template.memory.digest, None)  # the latest is the last, and filled first
        self._wanted[template.memory.digest] = template, self._now() + self._policy.idle_s
        self._changed.set()
        if self._keeper is None or self._keeper.done():
            self._keeper = self._workers.spawn("keep slots", self._keep())

    async def take(
        self, template: Template, kind: Kind, directory: Path, name: str
    ) -> tuple[QemuProcess, GuestChannel | None] | None:
        """Make a free slot the machine in this directory, under limits of its own; None when there is none.

        A warm one stands still, its guest's channel open. A slot that cannot be taken is ended, and counts as none.
        """
        slot = next((one for one in self._free if one.is_of(kind, template)), None)
        if slot is None:
            return None
        self._free.remove(slot)
        self._changed.set()
        try:
            await self._hand_over(slot, directory, name)
        except (DriverError, OSError) as error:
            self._failed(f"one could not be taken: {error}")
            await self._end(slot)
            await clear(directory)
            return None
        self._failures = 0
        return slot.process, slot.guest

    async def stop(self) -> None:
        """End all slots, and make no more."""
        await self._workers.stop()
        for slot in self._free:
            await self._end(slot)
        self._free.clear()

    def abandon(self) -> None:
        """Let go of all slots at once, as the death of this process would; for tests of exactly that."""
        if self._keeper is not None:
            self._keeper.cancel()
        for slot in self._free:
            if slot.guest is not None:
                slot.guest.close()
            slot.process.let_go()
        self._free.clear()
        self._wanted.clear()

    # --- taking ---

    async def _hand_over(self, slot: _Slot, directory: Path, name: str) -> None:
        source, process = slot.process.directory, slot.process
        if not process.alive:
            raise DriverError("slot-ended", process.how_it_ended(), retryable=True)
        old = await asyncio.to_thread(read_claim, source)
        if old is None:
            raise DriverError("slot-ended", "the slot's claim is gone", retryable=True)

        def move() -> None:
            confining = self._yard.confining
            claim = msgspec.structs.replace(old, groups=confining.groups_of(name))
            confining.write(directory, claim)
            confining.limit(name, slot.template.info.machine, wanted=True)
            join(claim.directories, process.pid)
            for file in (*MOVED, PROCESS):
                (source / file).rename(directory / file)
            (source / CLAIM).unlink()
            release(old)
            shutil.rmtree(source, ignore_errors=True)

        await asyncio.to_thread(move)
        process.directory = directory

    async def _end(self, slot: _Slot) -> None:
        if slot.guest is not None:
            slot.guest.close()
        directory = slot.process.directory
        try:
            await clear(directory, slot.process)
        except DriverError as error:
            _log.warning("a slot does not end: %s", error)
            return
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    # --- keeping ---

    async def _keep(self) -> None:
        """Make what is lacking, end what nobody asks for any more; over when nothing is there and nothing wanted."""
        while self._wanted or self._free:
            await self._end_dead_and_idle()
            lacking = self._lacking()
            if lacking is not None and self._now() >= self._not_before_s:
                await self._try_to_make(*lacking)
            elif self._wanted:
                await self._pause(self._not_before_s if lacking is not None else None)

    async def _pause(self, until_s: float | None) -> None:
        """Wait until somebody wants or takes something, or it is time to try again or to end what is idle."""
        due_s = min(idle_s for _, idle_s in self._wanted.values())
        due_s = due_s if until_s is None else min(due_s, until_s)
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due_s - self._now())):
                await self._changed.wait()

    async def _end_dead_and_idle(self) -> None:
        for digest in [one for one, (_, until_s) in self._wanted.items() if until_s <= self._now()]:
            del self._wanted[digest]
        for slot in list(self._free):
            if slot.process.alive and slot.template.memory.digest in self._wanted:
                continue
            self._free.remove(slot)
            if not slot.process.alive:
                self._failed(slot.process.how_it_ended())
            await self._end(slot)

    def _lacking(self) -> tuple[Kind, Template] | None:
        """What slot is lacking: one that is wanted, below its target, and within the memory there is for slots."""
        used = sum(self._mib(slot.kind) for slot in self._free)
        kinds: tuple[tuple[Kind, int], ...] = (("warm", self._policy.warm), ("blank", self._policy.blank))
        for template, _ in reversed(self._wanted.values()):
            for kind, target in kinds:
                there = sum(one.is_of(kind, template) for one in self._free)
                if there < target and used + self._mib(kind) <= self._policy.memory_mib_max:
                    return kind, template
        return None

    def _mib(self, kind: Kind) -> int:
        return self._policy.warm_mib if kind == "warm" else self._policy.blank_mib

    async def _try_to_make(self, kind: Kind, template: Template) -> None:
        available = self._available_mib()
        if available < self._mib(kind) + self._policy.free_mib_min:
            self._failed(f"this host has only {available} MiB free")
            return
        try:
            await self._make(kind, template)
        except (DriverError, OSError) as error:
            self._failed(str(error))

    def _failed(self, why: str) -> None:
        """Nothing is made for a while: a pool that cannot be filled, or keeps nothing, does not keep this host busy.

        The pauses grow until a slot has been of use, or nothing has failed for long.
        """
        if self._now() - self._not_before_s > RETRY_S_MAX:
            self._failures = 0
        pause_s = min(RETRY_S * 2.0**self._failures, RETRY_S_MAX)
        self._failures = min(self._failures + 1, 16)
        self._not_before_s = self._now() + pause_s
        _log.warning("no slots for %g s: %s", pause_s, why)

    async def _make(self, kind: Kind, template: Template) -> None:
        name = self._new_name()
        directory = self._root / name
        await asyncio.to_thread(directory.mkdir, parents=True)
        try:
            slot = _Slot(kind, template, await self._yard.spawn(directory, name, template, wanted=False))
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            raise
        try:
            if kind == "warm":
                await self._warm(slot)
        except BaseException:
            await self._end(slot)
            raise
        self._free.append(slot)

    async def _warm(self, slot: _Slot) -> None:
        process = slot.process
        await load_template(process, slot.template)
        await process.command("cont")
        slot.guest = GuestChannel.connect(process.directory / AGENT_SOCKET)
        await slot.guest.hello(NOBODY, self._wall_ns, HELLO_S)
        await exercise(slot.guest, FIRST)
        await process.command("stop")

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

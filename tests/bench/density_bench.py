"""Measures what a session costs while it sleeps, and whether waking an old one costs more, with a real machine."""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tests.bench.unique_pages import UniquePages
from tests.support.drivers import files_of, run_program
from tests.support.qemu import QemuKit
from torpor.bench.figures import Figure, Say, figure, percentile
from torpor.errors import CannotStart
from torpor_chunks.opening import open_store
from torpor_chunks.port import PackAddress, PartSource, Stored, WantedPart, named
from torpor_chunks.store import PackStore
from torpor_contracts.ids import CheckpointId, TenantId, VmId
from torpor_vm_host.ports import Driver, PartFile

TENANT: Final = TenantId("bench")
SLEEPS: Final = 100
LOOKED_AT: Final = (1, 10, SLEEPS)
WAKES: Final = 9
WORK: Final = (
    "python3 -c \"import json; json.dump(list(range(3000)), open('/root/f{n}', 'w'))\"",
    "echo {n} >> /root/log; ls /usr/bin > /root/ls{n}; sync",
    "seq 1 {n}00 > /root/s{n}; cat /root/log; git --version",
    "date >> /root/log",
)
"""What is done between two sleeps, in turn."""


async def disk(say: Say) -> Figure:
    """What up to a hundred sleeps take on the disk, beside their unique pages compressed; the worst ratio."""
    async with _machine(say) as (kit, driver, store, directory):
        unique, chain = UniquePages(), _Chain(kit, driver, store, directory)
        worst: tuple[float, int, int] = (0.0, 0, 1)
        for number in range(1, SLEEPS + 1):
            parts, _ = await chain.sleep(number)
            for part in parts:
                unique.add(part.path, part.head_bytes)
            unique.close_checkpoint()
            if number in LOOKED_AT:
                taken, floor = _on_disk(directory / "store"), unique.compressed_bytes
                say(f"after {number} sleeps: {taken / 2**20:.2f} MiB on disk, {taken / floor:.2f} x unique pages")
                worst = max(worst, (taken / floor, taken, floor))
    _, taken, floor = worst
    return figure(
        "density.disk", taken / 2**20, "MiB", ("at most", 1.3), of="ratio", floor=floor / 2**20, n=len(LOOKED_AT)
    )


async def aged(say: Say) -> Figure:
    """A wake from a session's hundredth checkpoint, beside one from its second: fetch, restore, first output."""
    async with _machine(say) as (kit, driver, store, directory):
        chain = _Chain(kit, driver, store, directory)
        kept = [(await chain.sleep(number))[1] for number in range(1, SLEEPS + 1)]
        old, young = kept[-1], kept[1]
        await _woken(kit, driver, store, young)
        times: dict[PackAddress, list[float]] = {old.address: [], young.address: []}
        for _ in range(WAKES):
            for stored in (young, old):
                times[stored.address].append(await _woken(kit, driver, store, stored))
    young_ms, old_ms = (percentile(times[stored.address], 0.5) or 0.0 for stored in (young, old))
    say(f"checkpoint 2: {young_ms:.0f} ms, checkpoint {SLEEPS}: {old_ms:.0f} ms ({len(old.packs)} packs)")
    return figure("wake.aged", old_ms, "ms", ("at most", 2.0), of="ratio", floor=young_ms, samples=times[old.address])


class _Chain:
    """A machine that is checkpointed again and again, as if it slept in between: each time onto the time before."""

    def __init__(self, kit: QemuKit, driver: Driver, store: PackStore, directory: Path) -> None:
        self._kit = kit
        self._driver = driver
        self._store = store
        self._directory = directory
        self._vm_id: VmId | None = None
        self._before: Stored | None = None

    async def sleep(self, number: int) -> tuple[list[PartFile], Stored]:
        """Work, checkpoint, and keep it; the parts are there until the next time."""
        if self._vm_id is None:
            spec = self._kit.spec()
            await self._driver.start(spec, None)
            self._vm_id = spec.vm_id
        work = WORK[number % len(WORK)].format(n=number)
        outcome, taken = await run_program(self._driver, self._vm_id, "sh", "-c", work, timeout_s=60.0)
        assert outcome.exit_code == 0, taken.stderr
        into = self._directory / "parts"
        await asyncio.to_thread(_emptied, into)
        parts = await self._driver.checkpoint(self._vm_id, into)
        sources = [PartSource(name=part.kind, path=part.path, head_bytes=part.head_bytes) for part in parts]
        onto = None if self._before is None else self._before.address
        self._before = await self._store.put(TENANT, sources, onto=onto)
        await self._driver.resume(self._vm_id)
        return parts, self._before


async def _woken(kit: QemuKit, driver: Driver, store: PackStore, stored: Stored) -> float:
    """Wake a session from a checkpoint in the store; milliseconds until the first output of a program."""
    spec = kit.spec()
    into = kit.new_directory()
    began_s = time.perf_counter()
    parts = named(stored.parts)
    wanted = [
        WantedPart(name=name, digest=parts[name].digest, size_bytes=parts[name].size_bytes, into=into / name)
        for name in parts
    ]
    await store.fetch(TENANT, stored.address, wanted)
    files = files_of(
        CheckpointId("ckp-bench"),
        [PartFile(kind=name, path=into / name) for name in ("memory", "devices", "disk")],
    )
    await driver.start(spec, files)
    await run_program(driver, spec.vm_id, "cat", "/root/log")
    took_ms = 1000 * (time.perf_counter() - began_s)
    await driver.destroy(spec.vm_id)
    await asyncio.to_thread(_removed, into, spec.directory)
    return took_ms


@asynccontextmanager
async def _machine(say: Say) -> AsyncIterator[tuple[QemuKit, Driver, PackStore, Path]]:
    if shutil.which("qemu-system-x86_64") is None:
        raise CannotStart(
            "qemu-missing", "QEMU is not installed", "sudo apt-get install qemu-system-x86 qemu-utils mmdebstrap"
        )
    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as place:
        directory = Path(place)
        store = open_store((directory / "store").as_uri(), directory / "keys" / "chunks.key")
        kit = QemuKit(_emptied(directory / "host"))
        driver = kit.driver()
        say(f"{SLEEPS} checkpoints of one machine")
        try:
            yield kit, driver, store, directory
        finally:
            await driver.close()
            kit.clean_up()


def _emptied(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    return directory


def _removed(*directories: Path) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _on_disk(directory: Path) -> int:
    """What files take on the disk, the unused ends of their last blocks included."""
    return sum(status.st_blocks * 512 for status in _statuses(directory))


def _statuses(directory: Path) -> Iterator[os.stat_result]:
    for folder, _, names in os.walk(directory):
        for name in names:
            yield (Path(folder) / name).stat()


BENCHES = {"density": [disk], "wake": [aged]}

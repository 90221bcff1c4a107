"""Checkpoints of real machines, through the store and back, again and again: whole each time, or never run.

`TORPOR_SOAK=1` (or `task soak`) makes the long runs long: 20 cycles, and 10 deltas of a build.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.chunk_stores import ACME, OTHER, StoreKit, flip
from tests.support.drivers import code_of, files_of, run_program
from tests.support.qemu import QemuKit
from torpor_chunks.port import ChunkError, NoSpace, PackAddress, PartSource, Stored, WantedPart
from torpor_chunks.store import PackStore
from torpor_contracts.ids import CheckpointId, TenantId, VmId
from torpor_vm_host.adapters.qemu.driver import QemuDriver
from torpor_vm_host.adapters.qemu.parts import check
from torpor_vm_host.ports import CheckpointFiles, DriverError, PartKind

SOAK: Final = os.environ.get("TORPOR_SOAK") == "1"
LIVE: Final = 30 if SOAK else 3
CYCLES: Final = 20 if SOAK else 2
DELTAS: Final = 10 if SOAK else 2
MODULES: Final = 12 if SOAK else 3
SCENARIO_S_MAX: Final = 600
TREE: Final = "find /root -type f | sort | xargs sha256sum | sha256sum; cat /dev/shm/mirror"
WRITE: Final = """
mkdir -p /root/tree/{n} && cd /root/tree/{n}
head -c 300000 /dev/urandom > random; seq {n} 20000 > numbers
echo {n} >> /root/journal; rm -rf /root/tree/$(({n} - 3))
find /root -type f | sort | xargs sha256sum | sha256sum > /dev/shm/mirror; sync
"""
BUILD: Final = """
mkdir -p /root/build && cd /root/build
python3 - <<'END'
import compileall, pathlib, random
random.seed({n})
for number in range({modules}):
    body = "".join(f"def f{{i}}(x):\\n    return x * {{random.random()}}\\n" for i in range(60))
    pathlib.Path(f"module{{random.randrange(30)}}.py").write_text(body)
compileall.compile_dir(".", quiet=1, force=True)
END
tar cf all.tar *.py && gzip -kf all.tar
find /root -type f | sort | xargs sha256sum | sha256sum > /dev/shm/mirror; sync
"""


class Sleeper:
    """One machine that sleeps in a store and wakes again, as a session does."""

    def __init__(self, root: Path) -> None:
        (root / "host").mkdir()
        (root / "chunks").mkdir()
        self.kit = QemuKit(root / "host")
        self.chunks = StoreKit("directory", root / "chunks")
        self.driver: QemuDriver = self.kit.driver()
        self.vm_id = VmId("")
        self.tip: PackAddress | None = None

    async def begin(self) -> None:
        spec = self.kit.spec()
        await self.driver.start(spec, None)
        self.vm_id = spec.vm_id

    async def run(self, script: str) -> str:
        outcome, taking = await run_program(self.driver, self.vm_id, "sh", "-c", script, timeout_s=120)
        assert outcome.exit_code == 0, taking.stderr
        return taking.stdout.decode()

    async def keep(self, directory: Path | None = None) -> Stored:
        """Checkpoint the machine, which stands still then, onto the checkpoint before."""
        parts = await self.driver.checkpoint(self.vm_id, directory or self.kit.new_directory())
        sources = [PartSource(name=part.kind, path=part.path, head_bytes=part.head_bytes) for part in parts]
        stored = await self.chunks.store.put(ACME, sources, onto=self.tip)
        self.tip = stored.address
        return stored

    async def end(self) -> None:
        await self.driver.destroy(self.vm_id)

    async def fetch(self, stored: Stored, tenant_id: TenantId = ACME, into: Path | None = None) -> CheckpointFiles:
        directory = into or self.kit.new_directory()
        kinds: tuple[PartKind, ...] = ("memory", "devices", "disk")
        files: dict[PartKind, Path] = {kind: directory / kind for kind in kinds}
        wanted = [
            WantedPart(name=part.name, digest=part.digest, size_bytes=part.size_bytes, into=directory / part.name)
            for part in stored.parts
        ]
        await self.chunks.store.fetch(tenant_id, stored.address, wanted)
        return CheckpointFiles(checkpoint_id=CheckpointId("ckp-1"), files=files)

    async def wake(self, stored: Stored) -> None:
        files = await self.fetch(stored)
        spec = self.kit.spec()
        await self.driver.start(spec, files)
        self.vm_id = spec.vm_id
        shutil.rmtree(files.files["memory"].parent)

    async def check_tree(self) -> None:
        """The files are those that the machine itself remembers."""
        on_disk, in_memory = (await self.run(TREE)).splitlines()
        assert on_disk == in_memory

    async def refusal(self, stored: Stored) -> str:
        """With what a damaged pack is refused; nothing that could be run is left of the attempt.

        Of an index that was damaged a machine needs nothing: the parts are what their digests say, and `verify` tells.
        """
        into = self.kit.new_directory()
        try:
            await self.fetch(stored, into=into)
            await self.chunks.store.verify(ACME, stored.address)
        except ChunkError as error:
            whole = {part.name: part.size_bytes for part in stored.parts}
            assert {path.name: path.stat().st_size for path in into.iterdir()} in ({}, whole)
            return error.code
        raise AssertionError("the damage was not found")

    def pack(self, address: PackAddress, tenant_id: TenantId = ACME) -> Path:
        return self.chunks.directory / "store" / PackStore.path_of(tenant_id, address)

    def run_scenario(self, scenario: object) -> None:
        async def within() -> None:
            async with asyncio.timeout(SCENARIO_S_MAX):
                await scenario  # type: ignore[misc]

        asyncio.run(within())


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Sleeper]:
    made = Sleeper(tmp_path)
    yield made
    made.kit.clean_up()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for half a megabyte."""
    place = tmp_path / "small"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", "size=512k", "tmpfs"]
    if subprocess.run(["mount", *options, place], check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_files_are_what_was_written_after_every_sleep(sleeper: Sleeper) -> None:
    async def scenario() -> None:
        await sleeper.begin()
        for number in range(1, CYCLES + 1):
            await sleeper.run(WRITE.format(n=number))
            stored = await sleeper.keep()
            await sleeper.end()
            await sleeper.wake(stored)
            await sleeper.check_tree()
            assert (await sleeper.run("cat /root/journal")).split() == [str(one) for one in range(1, number + 1)]
        await sleeper.end()

    sleeper.run_scenario(scenario())


def test_every_delta_of_a_build_stays_what_it_was(sleeper: Sleeper) -> None:
    async def scenario() -> None:
        await sleeper.begin()
        kept: list[tuple[Stored, str]] = []
        for number in range(DELTAS):
            await sleeper.run(BUILD.format(n=number, modules=MODULES))
            known = await sleeper.run(TREE)
            kept.append((await sleeper.keep(), known))
            await sleeper.driver.resume(sleeper.vm_id)
        await sleeper.end()
        for stored, known in [*reversed(kept), kept[0]]:
            assert (await sleeper.chunks.store.verify(ACME, stored.address)).parts == stored.parts
            await sleeper.wake(stored)
            assert await sleeper.run(TREE) == known
            await sleeper.check_tree()
            await sleeper.end()

    sleeper.run_scenario(scenario())


def test_a_damaged_pack_is_refused_and_its_parent_wakes(sleeper: Sleeper) -> None:
    async def scenario() -> None:
        await sleeper.begin()
        await sleeper.run(WRITE.format(n=1))
        parent = await sleeper.keep()
        await sleeper.driver.resume(sleeper.vm_id)
        await sleeper.run(WRITE.format(n=2))
        child = await sleeper.keep()
        await sleeper.end()
        pack, whole = sleeper.pack(child.address), sleeper.pack(child.address).read_bytes()
        size = len(whole)
        # Header, chunks, and behind them index, manifest and trailer.
        damages = [flip(at)(whole) for at in (0, 40, size // 3, size // 2, size - 3000, size - 400, size - 1)]
        theirs = await sleeper.chunks.put(b"another tenant's" * 1000, tenant_id=OTHER)
        damages += [whole[: size // 2], whole[:-1], b"", sleeper.pack(theirs.address, OTHER).read_bytes()]
        for damaged in [*damages, None]:
            pack.unlink()
            if damaged is not None:
                pack.write_bytes(damaged)
            assert await sleeper.refusal(child) in {"checkpoint-part-corrupt", "checkpoint-part-missing"}
            pack.unlink(missing_ok=True)
            pack.write_bytes(b"")
        for _ in range(2):
            await sleeper.wake(parent)
            await sleeper.check_tree()
            await sleeper.end()
        pack.write_bytes(whole)
        await sleeper.wake(child)
        await sleeper.check_tree()
        await sleeper.end()

    sleeper.run_scenario(scenario())


def test_a_full_disk_stops_no_machine_and_leaves_nothing_half_written(sleeper: Sleeper, small_disk: Path) -> None:
    async def scenario() -> None:
        await sleeper.begin()
        await sleeper.run(WRITE.format(n=1))
        capture = small_disk / "capture"
        capture.mkdir()
        with pytest.raises(DriverError) as failed:
            await sleeper.keep(capture)
        assert failed.value.retryable
        assert "No space left" in failed.value.detail or "no-space" in failed.value.code
        await sleeper.driver.resume(sleeper.vm_id)
        await sleeper.check_tree()
        shutil.rmtree(capture)
        parts = await sleeper.driver.checkpoint(sleeper.vm_id, sleeper.kit.new_directory())
        sources = [PartSource(name=part.kind, path=part.path, head_bytes=part.head_bytes) for part in parts]
        (small_disk / "kit").mkdir()
        full = StoreKit("directory", small_disk / "kit")
        with pytest.raises(NoSpace):
            await full.store.put(ACME, sources)
        assert [one for shard in range(256) for one in await full.store.present(ACME, shard)] == []
        await sleeper.driver.resume(sleeper.vm_id)
        await sleeper.check_tree()
        stored = await sleeper.keep()
        await sleeper.end()
        shutil.rmtree(small_disk / "kit")
        into = small_disk / "into"
        into.mkdir()
        with pytest.raises(NoSpace):
            await sleeper.fetch(stored, into=into)
        assert list(into.iterdir()) == []
        await sleeper.wake(stored)
        await sleeper.check_tree()
        await sleeper.end()

    sleeper.run_scenario(scenario())


def test_disk_and_memory_of_different_moments_never_meet(sleeper: Sleeper) -> None:
    async def scenario() -> None:
        await sleeper.begin()
        old = await sleeper.fetch(await sleeper.keep())
        await sleeper.driver.resume(sleeper.vm_id)
        await sleeper.run(WRITE.format(n=1))
        stored = await sleeper.keep()
        await sleeper.end()
        new = await sleeper.fetch(stored)
        for kind in ("memory", "disk", "devices"):
            mixed = CheckpointFiles(checkpoint_id=new.checkpoint_id, files=new.files | {kind: old.files[kind]})
            spec = sleeper.kit.spec()
            assert await code_of(sleeper.driver.start(spec, mixed)) == "checkpoint-mismatched"
            assert await sleeper.driver.remaining(sleeper.driver.resources(spec)) == []
        await sleeper.wake(stored)
        await sleeper.check_tree()
        await sleeper.end()

    sleeper.run_scenario(scenario())


def test_a_disk_that_is_written_to_is_whole_in_each_live_checkpoint(sleeper: Sleeper) -> None:
    """What QEMU has yet to write when it lets go of the copy is in the digest, too."""

    async def scenario() -> None:
        await sleeper.begin()
        # With a hundred megabytes QEMU has tables of the copy left to write when the copy is whole.
        await sleeper.run("head -c 100000000 /dev/urandom > /root/large")
        writing = "for n in $(seq 1 20); do seq 1 3000 > /root/f$n; done; sync"

        async def nothing() -> None:
            """Do nothing at the pause."""

        fingerprint = await sleeper.driver.fingerprint()
        for _ in range(LIVE):
            busy = asyncio.ensure_future(sleeper.run(writing))
            live = await sleeper.driver.checkpoint_live(sleeper.vm_id, sleeper.kit.new_directory(), nothing)
            check(files_of(CheckpointId("ckp-live"), live.parts), fingerprint)
            await busy
        await sleeper.end()

    sleeper.run_scenario(scenario())

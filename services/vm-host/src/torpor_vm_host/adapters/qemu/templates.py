"""The templates of one host: found, made once where there are none, and kept beside the machines that need them."""

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

from torpor_contracts.errors import Rejected
from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.qemu.disks import link_or_copy, refused
from torpor_vm_host.adapters.qemu.engine import Engine
from torpor_vm_host.adapters.qemu.template import (
    FILES,
    INFO,
    MEMORY,
    Template,
    TemplateInfo,
    check_received,
    open_template,
    read_info,
    template_key,
)
from torpor_vm_host.images.builder import Image, ImageLibrary
from torpor_vm_host.ports import DriverError

DIGITS: Final = 16

Progress = Callable[[str], None]
Make = Callable[[Image, MachineSpec, Path], Awaitable[TemplateInfo]]
"""Boots an image and lays the files of a template out in a directory; see `booting.py`."""


class Templates:
    """Templates in `cache` are shared by all hosts of this user; `kept` is this host's own, and outlives the cache."""

    def __init__(
        self, engine: Engine, images: ImageLibrary, *, cache: Path, kept: Path, make: Make, progress: Progress
    ) -> None:
        self._engine = engine
        self._images = images
        self._cache = cache
        self._kept = kept
        self._make = make
        self._progress = progress
        self._open: dict[str, Template] = {}
        self._current: dict[str, tuple[str, int]] = {}
        """Shape -> digest of the template's memory, and the version of the image's name it is of."""
        self._busy: dict[str, asyncio.Lock] = {}

    async def ready(self, machine: MachineSpec) -> Template:
        """The template to start such machines from, made if there is none (a minute, or seconds).

        Raises `DriverError`: `image-unknown`, `image-not-built`, `machine-refused`, or what its making came to.
        """
        shape = _shape(machine)
        async with self._busy.setdefault(shape, asyncio.Lock()):
            version = self._images.version(machine.image)
            digest, of_version = self._current.get(shape, ("", 0))
            if digest in self._open and of_version == version:
                return self._open[digest]
            image = await self._image(machine)
            folder = await self._find_or_make(image, machine)
            found = await self._opened(folder)
            self._current[shape] = found.memory.digest, version
            return found

    async def make(self, machine: MachineSpec) -> None:
        """Have a template for such machines in the cache, and open none."""
        await self._find_or_make(await self._image(machine), machine)

    def ready_ones(self) -> list[Template]:
        """The templates that machines are being started from."""
        return [self._open[digest] for digest in dict.fromkeys(digest for digest, _ in self._current.values())]

    async def has(self, memory_digest: str) -> bool:
        """Whether the template whose memory has this digest is on this host."""
        return memory_digest in self._open or await asyncio.to_thread(self._find, memory_digest) is not None

    async def receive(self, memory_digest: str, directory: Path) -> None:
        """Keep the template in `directory`, which is verified and moved; raises `DriverError`."""
        async with self._busy.setdefault(memory_digest, asyncio.Lock()):
            if memory_digest not in self._open:
                template = await asyncio.to_thread(receive, memory_digest, directory, self._kept)
                self._open[memory_digest] = template

    async def of_digest(self, memory_digest: str) -> Template:
        """The template whose memory has this digest; raises `DriverError("template-missing")`."""
        async with self._busy.setdefault(memory_digest, asyncio.Lock()):
            found = self._open.get(memory_digest)
            if found is not None:
                return found
            folder = await asyncio.to_thread(self._find, memory_digest)
            if folder is None:
                raise DriverError(
                    "template-missing",
                    f"it builds on the template {memory_digest[:DIGITS]}, which is not on this host",
                    retryable=False,
                )
            return await self._opened(folder)

    def close(self) -> None:
        """Let go of all templates."""
        for template in self._open.values():
            template.close()
        self._open.clear()
        self._current.clear()

    async def _image(self, machine: MachineSpec) -> Image:
        try:
            image = await asyncio.to_thread(self._images.to_start_from, machine.image, self._progress)
        except Rejected as error:
            code = "image-unknown" if error.code == "unknown-image" else error.code
            raise DriverError(code, f"{error.message} ({error.advice})", retryable=False) from error
        if machine.disk_mib < image.info.disk_mib:
            raise DriverError(
                "machine-refused",
                f"the image {machine.image!r} needs a disk of {image.info.disk_mib} MiB or more",
                retryable=False,
            )
        return image

    async def _find_or_make(self, image: Image, machine: MachineSpec) -> Path:
        key = template_key(self._engine, image, machine)
        folder = self._cache / f"{image.info.name}-{key[:DIGITS]}"
        if await asyncio.to_thread(read_info, folder) is None:
            self._progress(f"template {image.info.name}: first boot ({_shape(machine)})")
            await self._making(image, machine, folder)
            self._progress(f"template {image.info.name}: ready")
        return folder

    async def _making(self, image: Image, machine: MachineSpec, folder: Path) -> None:
        """Make a template; its folder appears when it is whole."""
        scratch = await asyncio.to_thread(_scratch_in, self._cache)
        try:
            await self._make(image, machine, scratch)
            await asyncio.to_thread(_publish, scratch, folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    def _find(self, memory_digest: str) -> Path | None:
        for folder in (self._kept / memory_digest[: 2 * DIGITS], *self._cached()):
            info = read_info(folder)
            if info is not None and info.digests.get(MEMORY) == memory_digest:
                return folder
        return None

    def _cached(self) -> Iterator[Path]:
        yield from self._cache.glob("*")

    async def _opened(self, folder: Path) -> Template:
        template = await asyncio.to_thread(lambda: open_template(_keep(folder, self._kept)))
        return self._open.setdefault(template.memory.digest, template)


def _shape(machine: MachineSpec) -> str:
    return f"{machine.image}, {machine.vcpus} vCPU, {machine.memory_mib} MiB, disk {machine.disk_mib} MiB"


def _scratch_in(cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=".making-", dir=cache))


def receive(memory_digest: str, directory: Path, kept: Path) -> Template:
    """Verify the template in `directory`, move it among those kept, and open it there; raises `DriverError`."""
    place = kept / memory_digest[: 2 * DIGITS]
    make_read_only(directory)
    # Held until it is opened again below, so that its memory is sealed and compared only once.
    verified = check_received(directory, memory_digest)
    try:
        kept.mkdir(parents=True, exist_ok=True)
        sync(directory)
        _publish(directory, place)
        sync(kept, files=False)
        return open_template(place)
    except OSError as error:
        raise DriverError("template-failed", f"the template cannot be kept: {error}", retryable=True) from error
    finally:
        verified.close()


def sync(directory: Path, *, files: bool = True) -> None:
    """Have a directory, and what is in it, on the disk whatever happens."""
    for path in (*(directory.iterdir() if files else ()), directory):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _publish(made: Path, folder: Path) -> None:
    make_read_only(made)
    try:
        made.rename(folder)
    except OSError:  # another process was faster; its template is as good
        if read_info(folder) is None:
            raise


def make_read_only(made: Path) -> None:
    """Let nobody write to a template's files by accident. What is so already is not touched."""
    for path, mode in (*((path, 0o444) for path in made.iterdir()), (made, 0o755)):
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)


def _keep(folder: Path, kept: Path) -> Path:
    """The template's folder among those kept: files of the same content, which the file system mostly need not copy."""
    info = read_info(folder)
    if info is None or folder.parent == kept:
        return folder
    place = kept / info.digests[MEMORY][: 2 * DIGITS]
    if read_info(place) is not None:
        return place
    scratch = _scratch_in(kept)
    try:
        for name in (*FILES, INFO):
            link_or_copy(folder / name, scratch / name)
        _publish(scratch, place)
    except OSError as error:
        raise refused(error, "template-failed", "the template cannot be kept") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return place

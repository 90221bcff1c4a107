"""The templates of this host: made when they are first wanted, and kept for the checkpoints that build on them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from torpor_contracts.errors import Rejected
from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.firecracker.parts import Parts, base_digest, check
from torpor_vm_host.adapters.firecracker.template import (
    Template,
    TemplateInfo,
    Workshop,
    find_template,
    make_template,
    open_template,
    receive_template,
    template_key,
)
from torpor_vm_host.images.builder import ImageLibrary
from torpor_vm_host.ports import CheckpointFiles, DriverError

VCPUS_MAX: Final = 32


class Templates:
    """Templates in the workshop's cache, from images; each is verified once."""

    def __init__(self, workshop: Workshop, images: ImageLibrary) -> None:
        self._workshop = workshop
        self._images = images
        self._open: dict[str, Template] = {}
        """By the digest of its memory: another host's template of the same key is another template."""
        self._current: dict[str, str] = {}
        """Key -> the digest of the template that such machines start from here."""
        self._preparing: dict[str, asyncio.Lock] = {}

    async def ready(self, machine: MachineSpec) -> Template:
        """The image and template for such machines, made if they are not there."""
        if not 1 <= machine.vcpus <= VCPUS_MAX:
            raise DriverError("machine-refused", f"a guest has 1 to {VCPUS_MAX} virtual processors", retryable=False)
        try:
            image = await asyncio.to_thread(self._images.to_start_from, machine.image, self._workshop.progress)
        except Rejected as error:
            code = "image-unknown" if error.code == "unknown-image" else error.code
            raise DriverError(code, f"{error.message} ({error.advice})", retryable=False) from error
        if machine.disk_mib < image.info.disk_mib:
            detail = f"the image {machine.image!r} needs a disk of {image.info.disk_mib} MiB or more"
            raise DriverError("machine-refused", detail, retryable=False)
        key = template_key(self._workshop.engine, image, machine)
        async with self._preparing.setdefault(key, asyncio.Lock()):
            if key not in self._current:
                folder = await make_template(self._workshop, image, machine)
                self._current[key] = self._kept(await asyncio.to_thread(open_template, folder))
        return self._open[self._current[key]]

    async def origin(self, machine: MachineSpec, checkpoint: CheckpointFiles | None) -> tuple[Template, Parts | None]:
        """What a machine starts from: the template of its image as it is now, or the one its checkpoint builds on."""
        if checkpoint is None:
            return await self.ready(machine), None
        digest = await asyncio.to_thread(base_digest, checkpoint)
        template = await self.known(lambda info: info.digests["memory"] == digest)
        parts = await asyncio.to_thread(check, checkpoint, self._workshop.engine.fingerprint, template)
        assert template is not None, "else the check has raised"
        if not template.info.fits(machine):
            raise DriverError("checkpoint-mismatched", "it is of a machine of another size", retryable=False)
        return template, parts

    def ready_ones(self) -> list[Template]:
        """The templates that machines are being started from."""
        return [self._open[digest] for digest in dict.fromkeys(self._current.values())]

    async def has(self, memory_digest: str) -> bool:
        """Whether the template whose memory has this digest is on this host."""
        return await self.known(lambda info: info.digests["memory"] == memory_digest) is not None

    async def receive(self, memory_digest: str, directory: Path) -> None:
        """Keep the template in `directory`, which is verified and moved; raises `DriverError`."""
        async with self._preparing.setdefault(memory_digest, asyncio.Lock()):
            if not await self.has(memory_digest):
                cache = self._workshop.cache
                self._kept(await asyncio.to_thread(receive_template, memory_digest, directory, cache))

    async def known(self, holds: Callable[[TemplateInfo], bool]) -> Template | None:
        """A template that is there already."""
        for template in self._open.values():
            if holds(template.info):
                return template
        folder = await asyncio.to_thread(find_template, self._workshop.cache, holds)
        if folder is None:
            return None
        return self._open[self._kept(await asyncio.to_thread(open_template, folder))]

    def _kept(self, template: Template) -> str:
        digest = template.info.digests["memory"]
        self._open.setdefault(digest, template)
        return digest

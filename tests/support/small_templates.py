"""A template of a few kilobytes, for what is about its files and not about machines."""

import os
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.qemu.digests import digest_of
from torpor_vm_host.adapters.qemu.memory import PAGE
from torpor_vm_host.adapters.qemu.sealed import copy_sparse
from torpor_vm_host.adapters.qemu.template import FILES, FORMAT, INFO, MEMORY, TemplateInfo

FINGERPRINT: Final = "qemu-7.2.0-build-microvm-tcg-max-2000mhz"
PAGES: Final = 64


def small_template(folder: Path, *, of: str = "one") -> TemplateInfo:
    """Lay such a template out in a folder that is not there yet."""
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_bytes(f"{name} of {of}".encode())
    (folder / MEMORY).write_bytes(b"".join(f"{of} {page}".encode().ljust(PAGE, b".") for page in range(PAGES)))
    source, target = os.open(folder / MEMORY, os.O_RDONLY), os.memfd_create("measured")
    try:
        digests = {MEMORY: copy_sparse(source, target)}
    finally:
        os.close(source)
        os.close(target)
    digests |= {name: digest_of(folder / name) for name in FILES if name != MEMORY}
    info = TemplateInfo(
        format=FORMAT,
        key=f"key of {of}",
        fingerprint=FINGERPRINT,
        image="default",
        image_key=f"image of {of}",
        machine=MachineSpec(),
        digests=digests,
    )
    (folder / INFO).write_bytes(msgspec.json.encode(info))
    return info

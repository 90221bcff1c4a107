"""A guest kernel as Firecracker before 1.17 boots it: the ELF file that is packed inside a Linux bzImage."""

import bz2
import lzma
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from torpor_vm_host.ports import DriverError

ELF: Final = b"\x7fELF"
HEADER_MAGIC: Final = b"HdrS"
PROTOCOL_MIN: Final = 0x0208
"""Since this boot protocol the header says where the packed kernel is (kernel: Documentation/arch/x86/boot.rst)."""
UNPACK_S_MAX: Final = 60

Unpack = Callable[[bytes], bytes]


def _tool(name: str) -> Unpack:
    def unpack(packed: bytes) -> bytes:
        program = shutil.which(name)
        if program is None:
            raise ValueError(f"it is packed with {name}, which is not installed (sudo apt-get install {name})")
        # The kernel's build appends the unpacked size; the tools warn of it and fail after all that matters is out.
        done = subprocess.run(  # noqa: S603
            [program, "-dc"], input=packed, capture_output=True, check=False, timeout=UNPACK_S_MAX
        )
        return done.stdout

    return unpack


PACKINGS: Final[dict[bytes, Unpack]] = {
    b"\x1f\x8b\x08": lambda packed: zlib.decompressobj(31).decompress(packed),
    b"BZh": lambda packed: bz2.BZ2Decompressor().decompress(packed),
    b"\xfd7zXZ\x00": lambda packed: lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(packed),
    b"\x5d\x00\x00": lambda packed: lzma.LZMADecompressor(lzma.FORMAT_ALONE).decompress(packed),
    b"\x02\x21\x4c\x18": _tool("lz4"),
    b"\x28\xb5\x2f\xfd": _tool("zstd"),
}


def unpacked(image: bytes) -> bytes:
    """The ELF kernel in a bzImage, or the image itself when it is one; `ValueError` when it is neither."""
    if image.startswith(ELF):
        return image
    if image[0x202:0x206] != HEADER_MAGIC:
        raise ValueError("it is neither an ELF file nor a bzImage")
    (protocol,) = struct.unpack_from("<H", image, 0x206)
    if protocol < PROTOCOL_MIN:
        raise ValueError(f"its boot protocol {protocol:#x} is older than {PROTOCOL_MIN:#x}")
    start, length = struct.unpack_from("<II", image, 0x248)
    start += ((image[0x1F1] or 4) + 1) * 512
    packed = image[start : start + length]
    for magic, unpack in PACKINGS.items():
        if packed.startswith(magic):
            kernel = unpack(packed)
            if not kernel.startswith(ELF):
                raise ValueError("what is packed in it is no ELF file")
            return kernel
    raise ValueError(f"it is packed in an unknown way ({packed[:6].hex()})")


def place_kernel(source: Path, target: Path) -> None:
    """Write the ELF kernel of the image `source` to `target`; raises `DriverError("kernel-unusable")`."""
    try:
        target.write_bytes(unpacked(source.read_bytes()))
    except (OSError, ValueError, zlib.error, lzma.LZMAError, subprocess.TimeoutExpired) as error:
        raise DriverError("kernel-unusable", f"{source}: {error}", retryable=False) from error

"""The Firecracker driver for the contract suite: over the programs of `tests.support.firecracker`, or the real ones."""

import atexit
import gzip
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
import yaml

from tests.support.drivers import DriverKit
from tests.support.firecracker.userfault import userfaults_work
from torpor_contracts.errors import Rejected
from torpor_contracts.session import ExecSpec, MachineSpec
from torpor_vm_host.adapters.firecracker import paging
from torpor_vm_host.adapters.firecracker.cgroups import Cgroups, find_cgroups
from torpor_vm_host.adapters.firecracker.configuring import Limits
from torpor_vm_host.adapters.firecracker.driver import FirecrackerDriver, Paging
from torpor_vm_host.adapters.firecracker.engine import Engine, find_engine
from torpor_vm_host.adapters.firecracker.jail import Jailing
from torpor_vm_host.adapters.firecracker.process import RECORD, Recorded
from torpor_vm_host.adapters.firecracker.template import Workshop
from torpor_vm_host.images.builder import Image, ImageInfo, ImageLibrary
from torpor_vm_host.images.library import default_library
from torpor_vm_host.ports import Driver

ASKED: Final = os.environ.get("TORPOR_TEST_FIRECRACKER") == "1"
ROOT: Final = Path(__file__).parents[2]
VERSION: Final = "1.17.0"
IMAGE_MIB: Final = 2
COUNTING: Final = "n=$(($(cat /dev/shm/n 2>/dev/null || echo 0) + 1)); echo $n > /dev/shm/n; echo $n"
PROGRAM: Final = """#!/bin/sh
exec '{python}' -c '
import sys
sys.path.insert(0, "{root}")
from tests.support.firecracker.jailer import main
main("{program}", "{version}", "{interface}", "{log}")
' "$@"
"""


class FirecrackerKit(DriverKit):
    """The real programs, a real image, real machines."""

    name = "firecracker"
    start_s_max = 10.0
    paging: Paging = "faults"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._drivers: list[FirecrackerDriver] = []
        self.machines.mkdir(exist_ok=True)

    @property
    def machines(self) -> Path:
        """The folder that has a folder for each machine."""
        return self.root / "vms"

    def workshop(self) -> Workshop:
        """What templates are made with."""
        return Workshop(
            engine=find_engine(),
            jailing=Jailing(cgroups=find_cgroups()),
            limits=Limits(),
            cache=self.library().cache.parent / "templates",
            progress=lambda _: None,
        )

    def library(self) -> ImageLibrary:
        """The images."""
        return default_library()

    def driver(self) -> Driver:
        """A driver object; the one before it loses its connections, as it would with its process."""
        for earlier in self._drivers:
            earlier.abandon()
        workshop = self.workshop()
        if self.apart:
            workshop = msgspec.structs.replace(workshop, cache=self.root / "templates")
        driver = FirecrackerDriver(workshop, self.library(), self.machines, lambda: self.ids.new("epoch"), self.paging)
        self._drivers.append(driver)
        return driver

    def counting(self) -> ExecSpec:
        """Counts in the guest's shared memory, which is nowhere but in its RAM."""
        return ExecSpec(argv=["sh", "-c", COUNTING])

    def clean_up(self) -> None:
        """End every machine that is still there."""
        for driver in self._drivers:
            driver.abandon()
        for directory in self.machines.glob("*"):
            for record in (RECORD, paging.RECORD):
                process = Recorded.find(directory / record)
                if process is not None:
                    process.signal(9)


class FirecrackerServerKit(FirecrackerKit):
    """The programs of `tests.support.firecracker`, an image of nothing, machines that are our agent's process."""

    name = "firecracker over a test server"
    start_s_max = 5.0
    machine = MachineSpec(memory_mib=4, disk_mib=4)
    not_shown: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "test_a_program_goes_on_across_checkpoint_and_restore",
            "test_open_input_goes_on_across_checkpoint_and_restore",
            "test_a_program_goes_on_in_the_machine_and_in_its_fork",
        ),
        "the test server's memory holds files, not processes",
    )
    version = VERSION

    def workshop(self) -> Workshop:
        """What templates are made with."""
        return Workshop(
            engine=server_engine(self.version),
            jailing=Jailing(cgroups=self.cgroups()),
            limits=Limits(),
            cache=_shared() / f"templates-{self.version}",
            progress=lambda _: None,
        )

    def cgroups(self) -> Cgroups:
        """Control groups that only the jailer's command line tells of."""
        return Cgroups(version=2, controllers=frozenset({"cpu", "memory", "pids"}), root=_shared() / "no-cgroups")

    def library(self) -> ImageLibrary:
        """One image, `default`, of a kernel that is only a header, and a disk of nothing."""
        return OneImage(_shared(), _shared() / "images", _shared())

    def told(self, identity: str) -> list[dict[str, Any]]:
        """All requests to one machine's Firecracker until now, with their answers."""
        lines = (programs(self.version) / "log").read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry.get("id") == identity]

    def jailed(self, identity: str) -> dict[str, Any]:
        """The options with which the jailer was started for one machine."""
        lines = (programs(self.version) / "log").read_text().splitlines()
        entries = [entry["jailer"] for entry in map(json.loads, lines) if "jailer" in entry]
        (found,) = [entry for entry in entries if entry["id"] == identity]
        return dict(found)


class FirecrackerServerFilesKit(FirecrackerServerKit):
    """The same, with memory restored from files."""

    paging: Paging = "file"


class OldFirecrackerServerKit(FirecrackerServerKit):
    """The same, of the oldest release that the driver works with."""

    version = "1.12.1"


def server_engine(version: str = VERSION) -> Engine:
    """The engine of the test's programs."""
    return find_engine(str(programs(version)))


@cache
def programs(version: str) -> Path:
    """A folder with the programs `firecracker` and `jailer`, of a version."""
    folder = _shared() / f"programs-{version}"
    folder.mkdir()
    interface = folder / "interface.json"
    definition = (Path(__file__).parent / "firecracker" / "interface.yaml").read_bytes()
    interface.write_text(json.dumps(yaml.load(definition, Loader=yaml.CSafeLoader)))
    log = folder / "log"
    log.touch()
    for program in ("firecracker", "jailer"):
        text = PROGRAM.format(
            python=sys.executable, root=ROOT, program=program, version=version, interface=interface, log=log
        )
        (folder / program).write_text(text)
        (folder / program).chmod(0o755)
    return folder


def bzimage(kernel: bytes) -> bytes:
    """A Linux boot image with nothing in it but a packed kernel (kernel: Documentation/arch/x86/boot.rst)."""
    packed = gzip.compress(kernel)
    header = bytearray(1024)
    header[0x1F1] = 1  # sectors of setup after the first
    header[0x202:0x208] = b"HdrS" + (0x20F).to_bytes(2, "little")
    header[0x248:0x250] = (16).to_bytes(4, "little") + len(packed).to_bytes(4, "little")
    return bytes(header) + bytes(16) + packed + len(kernel).to_bytes(4, "little")


@cache
def _shared() -> Path:
    """A folder for this test run: templates are made once."""
    folder = Path(tempfile.mkdtemp(prefix="torpor-firecracker-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class OneImage(ImageLibrary):
    """One image, `default`, whose kernel is only a header and whose disk has nothing on it."""

    def find(self, recipe: str | Path) -> Image | None:
        """The image, made when it is first asked for."""
        if recipe != "default":
            raise Rejected("unknown-image", f"there is no recipe {recipe}", "known images: default")
        info = ImageInfo(
            name="default",
            key="1" * 64,
            suite="none",
            kernel_version="none",
            disk_mib=IMAGE_MIB,
            size_bytes=0,
            digests={"rootfs.ext4": "2" * 64},
        )
        image = Image(info=info, folder=self.cache / "default", agent_key="3" * 64)
        if not image.folder.is_dir():
            image.folder.mkdir(parents=True)
            image.kernel.write_bytes(bzimage(b"\x7fELF, or so a loader that reads no further thinks"))
            image.initrd.write_bytes(b"nothing")
            image.rootfs.touch()
            os.truncate(image.rootfs, IMAGE_MIB * 2**20)
            for path in image.folder.iterdir():
                path.chmod(0o444)
        return image


def server_kits() -> tuple[type[FirecrackerKit], ...]:
    """The kit, where it can be used: namespaces are made by root only."""
    return (FirecrackerServerKit,) if os.geteuid() == 0 and userfaults_work() else ()

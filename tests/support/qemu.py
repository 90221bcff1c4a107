"""The QEMU driver for the contract suite: real machines, from an image and a template in the user's cache."""

import contextlib
import os
import shutil
from pathlib import Path

from tests.support.drivers import DriverKit
from torpor_contracts.session import ExecSpec
from torpor_messaging.system import SystemIds
from torpor_vm_host.adapters.qemu.driver import QemuDriver
from torpor_vm_host.adapters.qemu.engine import find_engine
from torpor_vm_host.adapters.qemu.process import QemuProcess
from torpor_vm_host.images.library import default_library
from torpor_vm_host.ports import Driver

COUNTING = "n=$(($(cat /dev/shm/n 2>/dev/null || echo 0) + 1)); echo $n > /dev/shm/n; echo $n"


class QemuKit(DriverKit):
    """Real machines under TCG."""

    name = "qemu"
    start_s_max = 10.0

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._drivers: list[QemuDriver] = []

    def driver(self) -> Driver:
        """A driver object; the one before it loses its connections, as it would with its process."""
        for earlier in self._drivers:
            earlier.abandon()
        (self.root / "vms").mkdir(exist_ok=True)
        library = default_library()
        ids = SystemIds()
        driver = QemuDriver(
            find_engine("tcg"),
            library,
            self.root / "vms",
            library.cache.parent / "templates",
            new_epoch=lambda: ids.new("epoch"),
            progress=lambda _: None,
        )
        self._drivers.append(driver)
        return driver

    def counting(self) -> ExecSpec:
        """Counts in the guest's shared memory, which is nowhere but in its RAM."""
        return ExecSpec(argv=["sh", "-c", COUNTING])

    def clean_up(self) -> None:
        """End every machine that is still there."""
        for directory in (self.root / "vms").glob("*"):
            process = QemuProcess.find(directory)
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, 9)


def qemu_is_here() -> bool:
    """Whether real machines can run here."""
    return shutil.which("qemu-system-x86_64") is not None and shutil.which("mmdebstrap") is not None

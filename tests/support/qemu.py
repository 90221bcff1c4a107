"""The QEMU driver for tests: real machines, from an image and templates in the user's cache."""

import functools
import os
from pathlib import Path
from typing import Final

import pytest

import torpor_guest_agent
from tests.support.drivers import DriverKit
from torpor_contracts.session import ExecSpec
from torpor_eventlog.instants import to_us
from torpor_messaging.system import SystemClock, SystemIds
from torpor_vm_host.adapters.qemu import cgroups as groups
from torpor_vm_host.adapters.qemu.confining import CLAIM, Confining, read_claim
from torpor_vm_host.adapters.qemu.driver import TEMPLATES, QemuDriver
from torpor_vm_host.adapters.qemu.engine import find_engine, missing_binaries
from torpor_vm_host.adapters.qemu.options import SlotPolicy
from torpor_vm_host.adapters.qemu.process import recorded_pid
from torpor_vm_host.images.builder import ImageLibrary, missing_tools
from torpor_vm_host.images.library import default_library, recipes_home

COUNTING: Final = "n=$(($(cat /dev/shm/n 2>/dev/null || echo 0) + 1)); echo $n > /dev/shm/n; echo $n"
NO_SLOTS: Final = SlotPolicy(warm=0, blank=0)


class QemuKit(DriverKit):
    """Real machines under emulation."""

    name = "qemu"
    start_s_max = 10.0
    policy = NO_SLOTS

    def __init__(self, root: Path) -> None:
        need_qemu()
        super().__init__(root)
        self.made: list[QemuDriver] = []
        (root / "vms").mkdir(parents=True)
        share_templates(root)

    def driver(self) -> QemuDriver:
        """A driver object; the one before it loses its connections, as it would with its process."""
        for earlier in self.made:
            earlier.abandon()
        clock = SystemClock()
        driver = QemuDriver(
            find_engine("tcg"),
            self.library(),
            self.root,
            confining=Confining.find("if-possible"),
            slots=self.policy,
            new_id=SystemIds().new,
            wall_ns=lambda: to_us(clock.now()) * 1000,
            progress=lambda _: None,
        )
        self.made.append(driver)
        return driver

    def library(self) -> ImageLibrary:
        """The user's images; beside them, where another host is meant, no templates."""
        known = default_library()
        if not self.apart:
            return known
        images = self.root / "cache" / "images"
        if not images.exists():
            images.parent.mkdir()
            images.symlink_to(known.cache)
        return ImageLibrary(recipes_home(), images, Path(torpor_guest_agent.__file__).parent)

    def counting(self) -> ExecSpec:
        """Counts in the guest's shared memory, which is nowhere but in its RAM."""
        return ExecSpec(argv=["sh", "-c", COUNTING])

    def clean_up(self) -> None:
        """End every machine that is still there, and let go of everything."""
        for driver in self.made:
            driver.abandon()
        for path in self.root.glob(f"*/*/{CLAIM}"):
            claim, pid = read_claim(path.parent), recorded_pid(path.parent)
            if pid is not None:
                os.kill(pid, 9)
            if claim is not None:
                groups.end(claim.directories)


def share_templates(root: Path) -> None:
    """Let the hosts of one run of the tests keep their templates in one place: each is verified once, not for each."""
    shared = root.parent / "qemu-templates"
    shared.mkdir(exist_ok=True)
    (root / TEMPLATES).symlink_to(shared)


def need_qemu() -> None:
    """Have the guests' image (minutes when there is none). Skips where no real machine can run; in CI, fails."""
    lacking = sorted({*missing_binaries(), *missing_tools()})
    if lacking and os.environ.get("CI"):
        pytest.fail(f"CI must have {', '.join(lacking)}")
    if lacking:
        pytest.skip(f"real machines need {', '.join(lacking)}")
    _have_image()


@functools.cache
def _have_image() -> None:
    default_library().build("default", print)

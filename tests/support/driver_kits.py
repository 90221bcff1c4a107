"""Every driver that is to be believed, as the contract suite uses it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import firecracker_kits
from tests.support.drivers import DirectoryKit, DriverKit
from tests.support.qemu import QemuKit

DRIVER_KITS: dict[str, type[DriverKit]] = {
    kit.name: kit
    for kit in (
        DriverKit,
        DirectoryKit,
        QemuKit,
        *firecracker_kits.server_kits(),
        *((firecracker_kits.FirecrackerKit,) if firecracker_kits.ASKED else ()),
    )
}


def using(request: pytest.FixtureRequest, root: Path) -> Iterator[DriverKit]:
    """The kit that a parameter names, for one test; the test is skipped where the kit cannot show what it asks for."""
    kit = DRIVER_KITS[request.param]
    name = getattr(request.node, "originalname", "")
    if name in kit.not_shown:
        pytest.skip(kit.not_shown[name])
    made = kit(root)
    yield made
    made.clean_up()

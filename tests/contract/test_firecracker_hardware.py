"""Whether the contract suite runs on real Firecracker machines; when it was asked to, it must be able to."""

import asyncio

import pytest

from tests.support.driver_kits import DRIVER_KITS
from tests.support.firecracker_kits import ASKED, FirecrackerKit
from torpor_vm_host.drivers import DRIVERS


def test_the_suite_runs_on_real_firecracker_machines() -> None:
    if not ASKED:
        pytest.skip("set TORPOR_TEST_FIRECRACKER=1 on a host with KVM, Firecracker and its jailer, as root")
    assert FirecrackerKit.name in DRIVER_KITS
    found = asyncio.run(DRIVERS["firecracker"].probe())
    assert found.ok, f"{found.reason}; {found.advice}"

"""Whether Firecracker is believed to work: only where a machine has run, and come to its end, within a bound."""

import asyncio
from pathlib import Path

import pytest

from tests.support.firecracker_kits import server_engine, server_kits
from torpor_vm_host.adapters.firecracker import probe
from torpor_vm_host.adapters.firecracker.probe import Unusable, resetting_kernel, try_out
from torpor_vm_host.drivers import DRIVERS

pytestmark = pytest.mark.skipif(not server_kits(), reason="needs root, namespaces and userfaultfd")


@pytest.fixture(autouse=True)
def some_kvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for Firecracker asks nothing of the device."""
    monkeypatch.setattr(probe, "KVM", Path("/dev/null"))


def test_a_machine_that_runs_to_its_end_is_believed(tmp_path: Path) -> None:
    asyncio.run(try_out(server_engine(), tmp_path / "scratch", None))
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_machine_that_hangs_is_ended_and_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "BOOT_S_MAX", 0.3)
    kernel = tmp_path / "kernel"
    kernel.write_bytes(resetting_kernel().replace(probe.RESET, b"\x90" * (len(probe.RESET) - 2) + b"\xeb\xfe"))
    with pytest.raises(Unusable, match=r"a machine did not run: probe-hung") as refused:
        asyncio.run(try_out(server_engine(), tmp_path / "scratch", kernel))
    assert refused.value.advice
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_kernel_that_firecracker_refuses_is_told(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel"
    kernel.write_bytes(b"no kernel")
    with pytest.raises(Unusable, match="Invalid Elf magic number"):
        asyncio.run(try_out(server_engine(), tmp_path / "scratch", kernel))


def test_a_device_that_cannot_be_used_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "KVM", tmp_path / "kvm")
    with pytest.raises(Unusable, match="no usable"):
        asyncio.run(try_out(server_engine(), tmp_path / "scratch", None))


def test_without_the_programs_the_probe_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = asyncio.run(DRIVERS["firecracker"].probe())
    assert not found.ok
    assert "not on the PATH" in found.reason
    assert "firecracker.md" in found.advice

"""Which driver a host gets, and how it is told what to do when it gets none; settings; the host's own directory."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pydantic
import pytest

from torpor_contracts.checkpoint import CheckpointManifest
from torpor_contracts.errors import Rejected
from torpor_contracts.host import HostCapacity
from torpor_contracts.ids import CheckpointId, SessionId, VmId
from torpor_messaging.system import SystemClock, SystemIds
from torpor_vm_host.adapters.simulated.driver import SimulatedDriver, Timing
from torpor_vm_host.adapters.simulated.stores import DirectoryMachines
from torpor_vm_host.adapters.workspace import DirectoryWorkspace
from torpor_vm_host.drivers import DRIVERS, Availability, DriverEnvironment, DriverKind, make_driver, probe_all
from torpor_vm_host.settings import VmHostSettings


class BetterDriver(SimulatedDriver):
    """Stands for a driver of a later release."""

    name = "better"


def environment(root: Path) -> DriverEnvironment:
    return DriverEnvironment(directory=root, clock=SystemClock(), ids=SystemIds())


def better(*, ok: bool) -> DriverKind:
    async def probe() -> Availability:
        return Availability(ok=ok, reason="it was tried", advice="install it")

    async def make(given: DriverEnvironment) -> BetterDriver:
        return BetterDriver(DirectoryMachines(given.directory / "machines"), given.clock, timing=Timing())

    return DriverKind("better", probe, make)


def test_every_driver_says_what_it_can_and_what_to_do() -> None:
    found = asyncio.run(probe_all())
    assert list(found) == ["firecracker", "qemu", "simulated"]
    assert found["simulated"].ok
    for one in found.values():
        assert one.reason
        assert one.ok or one.advice


def test_a_driver_that_does_not_work_is_refused_with_advice(tmp_path: Path) -> None:
    drivers = {"better": better(ok=False), "simulated": DRIVERS["simulated"]}
    with pytest.raises(Rejected, match="driver-unavailable") as refused:
        asyncio.run(make_driver("better", environment(tmp_path), drivers))
    assert "it was tried" in refused.value.message
    assert refused.value.advice == "install it"


def test_an_unknown_driver_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="driver-unknown"):
        asyncio.run(make_driver("xen", environment(tmp_path)))


def test_auto_takes_the_best_that_works(tmp_path: Path) -> None:
    drivers = {"worse": replace(better(ok=False), name="worse"), "better": better(ok=True)}
    assert asyncio.run(make_driver("auto", environment(tmp_path), drivers)).name == "better"


def test_simulated_machines_are_for_who_asks_for_them_by_name(tmp_path: Path) -> None:
    drivers = {"better": better(ok=False), "simulated": DRIVERS["simulated"]}
    with pytest.raises(Rejected, match="driver-unavailable") as refused:
        asyncio.run(make_driver("auto", environment(tmp_path), drivers))
    assert "better: it was tried" in refused.value.message
    assert "install it" in refused.value.advice
    assert "--driver simulated" in refused.value.advice
    assert asyncio.run(make_driver("simulated", environment(tmp_path), drivers)).name == "simulated"


def test_without_qemu_a_start_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORPOR_CACHE_DIR", str(tmp_path / "cache"))
    found = asyncio.run(DRIVERS["qemu"].probe())
    assert not found.ok
    for package in ("qemu-system-x86", "qemu-utils", "mmdebstrap", "e2fsprogs"):
        assert package in found.reason
        assert package in found.advice
    assert "torpor doctor --fix" in found.advice


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "TORPOR_DATA_DIR": str(tmp_path),
        "TORPOR_VM_HOST_HOST_ID": "host-7",
        "TORPOR_VM_HOST_DRIVER": "simulated",
        "TORPOR_VM_HOST_VCPUS": "3",
    }.items():
        monkeypatch.setenv(name, value)
    settings = VmHostSettings()
    assert (settings.host_id, settings.driver) == ("host-7", "simulated")
    assert settings.vms_directory() == tmp_path / "vm-host" / "host-7"
    assert settings.store_url() == f"file://{tmp_path}/chunks"
    assert settings.key_file() == tmp_path / "keys" / "chunks.key"
    found = HostCapacity(vcpus=8, memory_mib=1, disk_mib=2, vms_max=4)
    assert settings.offered(found) == HostCapacity(vcpus=3, memory_mib=1, disk_mib=2, vms_max=4)
    monkeypatch.setenv("TORPOR_CHUNKS_URL", "s3://bucket/torpor")
    monkeypatch.setenv("TORPOR_CHUNKS_KEY_FILE", "/run/secrets/chunks.key")
    settings = VmHostSettings()
    assert (settings.store_url(), settings.key_file()) == ("s3://bucket/torpor", Path("/run/secrets/chunks.key"))


@pytest.mark.parametrize(
    "wrong", [{"host_id": "Host 1"}, {"host_id": "s-1"}, {"heartbeat_s": 0}, {"vcpus": 0}, {"output_bytes_max": -1}]
)
def test_illegal_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        VmHostSettings(**wrong)


def test_a_manifest_is_noted_forgotten_and_gone_with_its_machine(tmp_path: Path) -> None:
    async def scenario() -> None:
        workspace, vm_id, checkpoint_id = DirectoryWorkspace(tmp_path), VmId("vm-1"), CheckpointId("ckp-1")
        manifest = CheckpointManifest(
            session_id=SessionId("s-1"), incarnation=1, parent_id=None, fingerprint="f", parts=[]
        )
        await workspace.create(vm_id)
        assert await workspace.read_manifest(vm_id, checkpoint_id) is None
        await workspace.write_manifest(vm_id, checkpoint_id, manifest)
        assert await workspace.read_manifest(vm_id, checkpoint_id) == manifest
        (tmp_path / "vms" / "vm-1" / "ckp-1.json").write_bytes(b"{")
        assert await workspace.read_manifest(vm_id, checkpoint_id) is None, "half a note is none"
        await workspace.write_manifest(vm_id, checkpoint_id, manifest)
        await workspace.forget_manifest(vm_id, checkpoint_id)
        await workspace.forget_manifest(vm_id, checkpoint_id)
        assert await workspace.read_manifest(vm_id, checkpoint_id) is None
        claimed = [workspace.resource(vm_id)]
        assert await workspace.remaining(claimed) == claimed
        await workspace.remove(vm_id)
        await workspace.remove(vm_id)
        assert await workspace.remaining(claimed) == []

    asyncio.run(scenario())

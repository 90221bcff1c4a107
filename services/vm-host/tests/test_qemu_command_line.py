"""QEMU's command line: the same machine at boot and restore, nothing open to it but what it is given."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from torpor_contracts.errors import Rejected
from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.qemu import engine as engines
from torpor_vm_host.adapters.qemu.command_line import Opened, command_line, kernel_line
from torpor_vm_host.adapters.qemu.engine import Engine, find_engine
from torpor_vm_host.adapters.qemu.tsc import tsc_khz, tsc_mhz

TCG = Engine(binary=Path("/usr/bin/qemu"), version="7.2.22", build="b1", accelerator="tcg", tsc_khz=2_299_968)
KVM = Engine(
    binary=Path("/usr/bin/qemu"), version="7.2.22", build="b1", accelerator="kvm", tsc_khz=2_299_968, processor="p1"
)
SPEC = MachineSpec(vcpus=1, memory_mib=256, disk_mib=1024)


def opened(**changes: Any) -> Opened:
    values: dict[str, Any] = {
        "kernel": 10,
        "initrd": 11,
        "rootfs": 12,
        "template_disk": 13,
        "disk": 14,
        "memory": 15,
        "memory_is_shared": False,
        "qmp": 16,
        "agent": 17,
    }
    return Opened(**(values | changes))


def devices(argv: list[str]) -> list[str]:
    """What decides whether a device state loads."""
    kept = {"-M", "-accel", "-cpu", "-m", "-smp", "-device", "-kernel", "-append"}
    return [f"{option} {value}" for option, value in pairwise(argv) if option in kept]


def test_a_restored_machine_has_the_devices_of_the_one_that_booted() -> None:
    booting = opened(template_disk=None, memory_is_shared=True, console=18)
    boot = command_line(TCG, SPEC, booting, incoming=False)
    restore = command_line(TCG, SPEC, opened(), incoming=True)
    assert devices(boot) == devices(restore)
    assert [line for line in boot if line.startswith("chardev:")] == [
        line for line in restore if line.startswith("chardev:")
    ]
    assert "-incoming" not in boot
    assert restore[-2:] == ["-incoming", "defer"]


def test_only_a_template_writes_to_the_memory_it_is_made_of() -> None:
    making = command_line(TCG, SPEC, opened(memory_is_shared=True), incoming=False)
    using = command_line(TCG, SPEC, opened(), incoming=True)
    assert any(line.startswith("memory-backend-file") and line.endswith("share=on") for line in making)
    assert any(line.startswith("memory-backend-file") and line.endswith("share=off") for line in using)


def test_a_machine_has_no_network_no_paths_and_a_sandbox() -> None:
    argv = command_line(TCG, SPEC, opened(), incoming=True)
    text = " ".join(argv)
    assert "-nodefaults" in argv
    assert not {"-net", "-nic", "-netdev", "-virtfs", "-drive"} & set(argv)
    assert "net-device" not in text
    assert argv[argv.index("-sandbox") + 1].startswith("on,")
    for denied in ("obsolete", "elevateprivileges", "spawn", "resourcecontrol"):
        assert f"{denied}=deny" in argv[argv.index("-sandbox") + 1]
    paths = [word for word in text.replace("=", " ").replace(",", " ").split() if word.startswith("/")]
    assert all(path.startswith(("/proc/self/fd/", "/dev/fdset/")) for path in paths[1:]), paths


def test_every_file_is_inherited_and_none_else() -> None:
    for files in (opened(), opened(template_disk=None, console=18)):
        argv = " ".join(command_line(TCG, SPEC, files, incoming=False))
        inherited = files.inherited()
        assert len(inherited) == len(set(inherited))
        for descriptor in inherited:
            assert any(
                form in argv for form in (f"/proc/self/fd/{descriptor}", f"fd={descriptor},", f"fd={descriptor} ")
            )


def test_the_base_is_read_only_and_only_the_machines_own_disk_is_written() -> None:
    argv = command_line(TCG, SPEC, opened(), incoming=True)
    nodes = [value for option, value in pairwise(argv) if option == "-blockdev"]
    writable = [node for node in nodes if "read-only=on" not in node]
    assert [node.split("node-name=")[1].split(",")[0] for node in writable] == ["disk-file", "disk"]


def test_size_and_accelerator() -> None:
    large = command_line(TCG, MachineSpec(vcpus=2, memory_mib=512), opened(), incoming=True)
    assert large[large.index("-smp") + 1] == "2"
    assert large[large.index("-m") + 1] == "512"
    assert "thread=multi" in large[large.index("-accel") + 1]
    kvm = command_line(KVM, SPEC, opened(), incoming=True)
    assert (kvm[kvm.index("-accel") + 1], kvm[kvm.index("-cpu") + 1]) == ("kvm", "host")


def test_a_guest_is_told_how_fast_its_clock_runs_and_under_emulation_what_it_need_not_do() -> None:
    assert "tsc_early_khz=2299968 tsc=reliable" in kernel_line(TCG)
    assert "mitigations=off" in kernel_line(TCG)
    assert "mitigations=off" not in kernel_line(KVM)


def test_a_fingerprint_names_all_that_a_checkpoint_depends_on() -> None:
    other = [
        TCG,
        KVM,
        Engine(binary=TCG.binary, version="8.0.0", build="b1", accelerator="tcg", tsc_khz=TCG.tsc_khz),
        Engine(binary=TCG.binary, version="7.2.22", build="b2", accelerator="tcg", tsc_khz=TCG.tsc_khz),
        Engine(binary=TCG.binary, version="7.2.22", build="b1", accelerator="tcg", tsc_khz=2_100_000),
        Engine(binary=TCG.binary, version="7.2.22", build="b1", accelerator="kvm", tsc_khz=TCG.tsc_khz, processor="p2"),
    ]
    assert len({engine.fingerprint for engine in other}) == len(other)
    again = Engine(binary=Path("/opt/qemu"), version="7.2.22", build="b1", accelerator="tcg", tsc_khz=2_300_031)
    assert again.fingerprint == TCG.fingerprint, "another measurement of the same processor"


def test_a_processors_speed_is_measured_the_same_each_time() -> None:
    assert len({tsc_mhz(tsc_khz()) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("QEMU emulator version 5.2.0 (Debian)", "qemu-too-old"),
        ("something else", "qemu-too-old"),
        ("QEMU emulator version 9.1.2 (v9.1.2)", ""),
    ],
)
def test_which_qemu_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: str) -> None:
    for name in (engines.BINARY, engines.IMAGE_TOOL):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{said}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if code:
        with pytest.raises(Rejected, match=code):
            find_engine("tcg")
    else:
        assert find_engine("tcg").version == "9.1.2"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(Rejected, match="qemu-missing") as refused:
        find_engine("tcg")
    assert "qemu-utils" in refused.value.advice

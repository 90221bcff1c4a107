"""What the Firecracker driver does with files: page files of memory and disk, copies, packed kernels, jails."""

import bz2
import gzip
import lzma
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.firecracker_kits import bzimage
from torpor_contracts.errors import Rejected
from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.firecracker import deltas
from torpor_vm_host.adapters.firecracker.cgroups import Cgroups, find_cgroups
from torpor_vm_host.adapters.firecracker.copying import copy, copy_without_zeros
from torpor_vm_host.adapters.firecracker.engine import Engine, cpu_model, find_engine
from torpor_vm_host.adapters.firecracker.jail import Jail, Jailing
from torpor_vm_host.adapters.firecracker.kernel import place_kernel, unpacked
from torpor_vm_host.adapters.firecracker.probe import resetting_kernel
from torpor_vm_host.adapters.qemu.memory import read_header
from torpor_vm_host.ports import DriverError

PAGE = 4096
PAGES = 600
"""More than one run of pages and more than one piece."""
KERNEL = b"\x7fELF and the rest of a kernel"
Changes = dict[int, bytes]
CHANGES = st.dictionaries(st.integers(0, PAGES - 1), st.sampled_from([b"a", b"b", b"\0"]), max_size=40)
ENGINE = Engine(
    firecracker=Path("/usr/bin/firecracker"),
    jailer=Path("/usr/bin/jailer"),
    version=(1, 17, 0),
    snapshot_version="9.0.0",
    cpu="c",
    kernel="k",
)


def sparse(path: Path, changes: Changes) -> Path:
    with path.open("wb") as file:
        file.truncate(PAGES * PAGE)
        for page, byte in changes.items():
            os.pwrite(file.fileno(), byte * PAGE, page * PAGE)
    return path


@settings(max_examples=25, deadline=None)
@given(base=CHANGES, own=CHANGES)
def test_a_page_file_makes_a_file_of_its_base(
    tmp_path_factory: pytest.TempPathFactory, base: Changes, own: Changes
) -> None:
    folder = tmp_path_factory.mktemp("pages")
    under, now = sparse(folder / "base", base), sparse(folder / "own", own)
    deltas.write_from_file(now, under, bytes(32), folder / "pages")
    copy(under, folder / "made")
    deltas.apply(folder / "pages", folder / "made")
    assert (folder / "made").read_bytes() == now.read_bytes()
    differing = {page for page in base.keys() | own.keys() if base.get(page, b"\0") != own.get(page, b"\0")}
    assert read_header(folder / "pages").pages == len(differing)


@settings(max_examples=25, deadline=None)
@given(base=CHANGES, generations=st.lists(CHANGES, min_size=1, max_size=4))
def test_diff_snapshots_add_up(
    tmp_path_factory: pytest.TempPathFactory, base: Changes, generations: list[Changes]
) -> None:
    folder = tmp_path_factory.mktemp("diffs")
    under = sparse(folder / "base", base)
    now, earlier = dict(base), None
    for number, changes in enumerate(generations):
        now |= changes
        target = folder / f"pages-{number}"
        deltas.write_from_diff(sparse(folder / "diff", changes), earlier, under, bytes(32), target)
        earlier = target
    assert earlier is not None
    copy(under, folder / "made")
    deltas.apply(earlier, folder / "made")
    assert (folder / "made").read_bytes() == sparse(folder / "now", now).read_bytes()
    changed = {page for page in now if now[page] != base.get(page, b"\0")}
    assert read_header(earlier).pages == len(changed)


def test_copies_are_whole_and_leave_holes_out(tmp_path: Path) -> None:
    source = sparse(tmp_path / "source", {3: b"x", 500: b"y"})
    copy(source, tmp_path / "larger", 2 * PAGES * PAGE)
    assert (tmp_path / "larger").read_bytes() == source.read_bytes() + bytes(PAGES * PAGE)
    assert (tmp_path / "larger").stat().st_blocks * 512 <= 8 * PAGE
    full = tmp_path / "full"
    full.write_bytes(source.read_bytes())
    copy_without_zeros(full, tmp_path / "thin")
    assert (tmp_path / "thin").read_bytes() == full.read_bytes()
    assert (tmp_path / "thin").stat().st_blocks < full.stat().st_blocks


def test_an_elf_kernel_is_taken_as_it_is() -> None:
    assert unpacked(KERNEL) == KERNEL
    assert unpacked(bzimage(KERNEL)) == KERNEL


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress, lambda data: lzma.compress(data, lzma.FORMAT_ALONE)])
def test_a_kernel_is_unpacked_however_it_is_packed(
    monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(gzip, "compress", pack)
    assert unpacked(bzimage(KERNEL)) == KERNEL


@pytest.mark.parametrize("tool", ["lz4", "zstd"])
def test_a_kernel_is_unpacked_by_a_tool(monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    options = ["-l"] if tool == "lz4" else []  # the kernel's build writes lz4's legacy format

    def pack(data: bytes) -> bytes:
        return subprocess.run([tool, "-c", *options], input=data, capture_output=True, check=True).stdout

    monkeypatch.setattr(gzip, "compress", pack)
    assert unpacked(bzimage(KERNEL)) == KERNEL


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"", "neither an ELF file nor a bzImage"),
        (bytes(0x202) + b"HdrS\x00\x02" + bytes(512), "boot protocol 0x200"),
        (bzimage(KERNEL).replace(b"\x1f\x8b\x08", b"\x00\x8b\x08"), "unknown way"),
        (bzimage(b"no kernel"), "no ELF file"),
    ],
)
def test_what_is_no_kernel_is_refused(tmp_path: Path, image: bytes, reason: str) -> None:
    (tmp_path / "vmlinuz").write_bytes(image)
    with pytest.raises(DriverError, match=f"kernel-unusable.*{reason}"):
        place_kernel(tmp_path / "vmlinuz", tmp_path / "vmlinux")


def test_the_probe_has_a_kernel_of_its_own() -> None:
    kernel = resetting_kernel()
    assert kernel[:5] == b"\x7fELF\x02"
    entry, file_offset = int.from_bytes(kernel[24:32], "little"), int.from_bytes(kernel[72:80], "little")
    physical = int.from_bytes(kernel[88:96], "little")
    assert entry == physical == 0x100_0000
    assert kernel[file_offset:].startswith(b"\xb0\xfe\xe6\x64")


def test_a_jail_is_asked_for_as_the_jailer_takes_it(tmp_path: Path) -> None:
    groups = Cgroups(version=1, controllers=frozenset({"memory", "cpu"}), root=tmp_path)
    jail = Jail(tmp_path, "vm-1", ENGINE, Jailing(cgroups=groups, netns="/run/netns/none"))
    command = jail.command(MachineSpec(vcpus=2, memory_mib=256, disk_mib=1024))
    assert command[0] == "/usr/bin/jailer"
    assert command[-5:] == ["/run/netns/none", "--new-pid-ns", "--", "--api-sock", "api.sock"]
    given_groups = [command[at + 1] for at, word in enumerate(command) if word == "--cgroup"]
    assert given_groups == [
        f"memory.limit_in_bytes={(256 + 96) * 2**20}",
        "cpu.cfs_period_us=100000",
        "cpu.cfs_quota_us=200000",
    ]
    assert f"fsize={(1024 + 64) * 2**20}" in command
    assert jail.root == tmp_path / "jail" / "firecracker" / "vm-1" / "root"


def test_the_host_s_control_groups_are_found(tmp_path: Path) -> None:
    assert find_cgroups(tmp_path) is None
    for name in ("memory", "cpu"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").touch()
    found = find_cgroups(tmp_path)
    assert found is not None
    assert (found.version, found.controllers) == (1, frozenset({"memory", "cpu"}))
    assert found.folders("vm-1") == [tmp_path / name / "torpor" / "vm-1" for name in ("cpu", "memory")]
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    found = find_cgroups(tmp_path)
    assert found is not None
    assert (found.version, found.controllers) == (2, frozenset({"cpu", "memory", "pids"}))
    (folder,) = found.folders("vm-1")
    folder.mkdir(parents=True)
    assert found.exist("vm-1")
    found.remove("vm-1")
    assert not found.exist("vm-1")


def program(folder: Path, name: str, says: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / name).chmod(0o755)


def test_the_engine_is_found_or_said_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="firecracker-missing"):
        find_engine(str(tmp_path))
    program(tmp_path, "firecracker", "Firecracker v1.9.1")
    with pytest.raises(Rejected, match="jailer-missing"):
        find_engine(str(tmp_path))
    program(tmp_path, "jailer", "Jailer v1.16.0")
    with pytest.raises(Rejected, match="firecracker-too-old"):
        find_engine(str(tmp_path))
    program(tmp_path, "firecracker", "Firecracker v1.17.0")
    with pytest.raises(Rejected, match="jailer-mismatched"):
        find_engine(str(tmp_path))
    program(tmp_path, "jailer", "Jailer v1.17.0")
    engine = find_engine(str(tmp_path))
    assert engine.version == (1, 17, 0)
    assert "firecracker-1.17.0-snapshot-1.17.0-cpu-" in engine.fingerprint
    assert engine.fingerprint.endswith(os.uname().release)


def test_processors_of_one_model_have_one_name() -> None:
    one = "processor\t: 0\nvendor_id\t: A\nmodel\t\t: 1\nflags\t\t: fpu sse\nbogomips\t: 1.0\n\nprocessor\t: 1\n"
    assert cpu_model(one) == cpu_model(one.replace("bogomips\t: 1.0", "bogomips\t: 2.0"))
    assert cpu_model(one) != cpu_model(one.replace("sse", "sse avx"))

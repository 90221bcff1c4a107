"""How machines are confined: control groups of both versions on directories that look so, users, and the launch."""

import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from torpor_contracts.errors import Rejected
from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.qemu import cgroups as groups
from torpor_vm_host.adapters.qemu.cgroups import Cgroups, CgroupsUnusable, Limits, find_cgroups
from torpor_vm_host.adapters.qemu.confining import (
    CLAIM,
    HEADROOM_MIB,
    PROCESS,
    UID_MIN,
    UIDS,
    Claim,
    Confining,
    boot_id,
    read_claim,
    release,
)
from torpor_vm_host.adapters.qemu.process import recorded_pid

V1_FILES = {
    "cpu": ("cpu.cfs_period_us", "cpu.cfs_quota_us", "cpu.shares"),
    "memory": ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    "pids": ("pids.max",),
}
V2_FILES = ("cpu.max", "cpu.weight", "memory.max", "memory.swap.max", "memory.oom.group", "pids.max")
LIMITS = Limits(cpus=1.5, memory_mib=512, pids=97, share=0.1)
MACHINE = MachineSpec(vcpus=1, memory_mib=256, disk_mib=1024)


class Host:
    """What the kernel shows of its control groups: mounts, and the group of this process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = root / "proc"
        self.proc.mkdir()
        self.mounts: list[str] = ["22 1 8:1 / / rw - ext4 /dev/sda rw"]
        self.own: list[str] = []

    def version_1(self, *, own: str = "/", root: str = "/", lacks: str = "") -> "Host":
        for controller in {"cpu", "memory", "pids"} - {lacks}:
            names = "cpu,cpuacct" if controller == "cpu" else controller
            mount = self.root / "cgroup" / names
            (mount / own.removeprefix(root).lstrip("/")).mkdir(parents=True)
            self.mounts.append(f"30 22 0:26 {root} {mount} rw,nosuid shared:9 - cgroup cgroup rw,{names}")
            self.own.append(f"4:{names}:{own}")
        return self

    def version_2(self, controllers: str = "cpuset cpu io memory pids", enabled: str = "memory") -> "Host":
        mount = self.root / "cgroup2"
        mount.mkdir()
        (mount / "cgroup.controllers").write_text(controllers)
        (mount / "cgroup.subtree_control").write_text(enabled)
        self.mounts.append(f"30 22 0:26 / {mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate")
        self.own.append("0::/user.slice")
        return self

    def find(self) -> Cgroups:
        (self.proc / "mountinfo").write_text("".join(f"{line}\n" for line in self.mounts))
        (self.proc / "cgroup").write_text("".join(f"{line}\n" for line in self.own))
        return find_cgroups(self.proc)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def made(found: Cgroups, name: str, files: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Make a group whose files the kernel would have made; what is in them then."""
    for directory in found.directories(name):
        directory.mkdir(parents=True)
        for controller, names in files.items():
            if controller in str(directory.parent.parent.name) or len(files) == 1:
                for file in names:
                    (directory / file).touch()
    found.create(name, LIMITS)
    return {path.name: path.read_text() for directory in found.directories(name) for path in directory.iterdir()}


def test_version_1_limits_each_in_its_hierarchy_below_our_own_group(host: Host) -> None:
    found = host.version_1(own="/slice/ours").find()
    assert found.version == 1
    assert [path.relative_to(host.root) for path in found.directories("vm-1")] == [
        Path("cgroup/cpu,cpuacct/slice/ours/torpor/vm-1"),
        Path("cgroup/memory/slice/ours/torpor/vm-1"),
        Path("cgroup/pids/slice/ours/torpor/vm-1"),
    ]
    base = host.root / "cgroup"
    for controller, names in (("cpu,cpuacct", "cpu"), ("memory", "memory"), ("pids", "pids")):
        directory = base / controller / "slice/ours/torpor/vm-1"
        directory.mkdir()
        for file in V1_FILES[names]:
            (directory / file).touch()
    found.create("vm-1", LIMITS)
    said = {path.name: path.read_text() for directory in found.directories("vm-1") for path in directory.iterdir()}
    assert said == {
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "150000",
        "cpu.shares": "102",
        "memory.limit_in_bytes": str(512 * 2**20),
        "memory.memsw.limit_in_bytes": str(512 * 2**20),
        "pids.max": "97",
    }


def test_in_a_container_the_mount_begins_at_its_own_group(host: Host) -> None:
    found = host.version_1(own="/docker/abc", root="/docker/abc").find()
    assert {path.relative_to(host.root / "cgroup").parts[1:] for path in found.directories("vm-1")} == {
        ("torpor", "vm-1")
    }


def test_what_a_kernel_is_built_without_needs_no_limit(host: Host) -> None:
    found = host.version_1().find()
    found.create("vm-1", LIMITS)
    assert all(not list(directory.iterdir()) for directory in found.directories("vm-1"))


def test_version_2_limits_all_in_one_group(host: Host) -> None:
    found = host.version_2().find()
    assert found.version == 2
    (directory,) = found.directories("vm-1")
    assert directory == host.root / "cgroup2" / "torpor" / "vm-1"
    assert (host.root / "cgroup2" / "cgroup.subtree_control").read_text() in {"+cpu", "+pids"}
    assert (host.root / "cgroup2" / "torpor" / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert made(found, "vm-1", {"all": V2_FILES}) == {
        "cpu.max": "150000 100000",
        "cpu.weight": "10",
        "memory.max": str(512 * 2**20),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "97",
    }


def test_version_1_counts_only_with_all_that_is_needed(host: Host) -> None:
    host.version_1(lacks="pids").version_2()
    assert host.find().version == 2


@pytest.mark.parametrize("how", ["nothing mounted", "controllers missing", "not to be written"])
def test_a_host_without_usable_groups_says_why_and_what_to_do(host: Host, how: str) -> None:
    if how == "controllers missing":
        host.version_2(controllers="cpu memory")
    if how == "not to be written":
        host.version_1()
        for mount in (host.root / "cgroup").iterdir():
            (mount / "torpor").write_text("a file where a group should be")
    with pytest.raises(CgroupsUnusable) as unusable:
        host.find()
    assert str(unusable.value)
    assert unusable.value.advice


@pytest.mark.parametrize(
    ("file", "said", "killed"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\n", True),
        ("memory.events", "low 0\noom 0\noom_kill 0\n", False),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", True),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n", False),
        ("other", "", False),
    ],
)
def test_who_was_ended_for_memory_is_known(tmp_path: Path, file: str, said: str, killed: bool) -> None:
    (tmp_path / file).write_text(said)
    assert groups.killed_for_memory([tmp_path]) == killed
    assert not groups.killed_for_memory([tmp_path / "gone"])


def test_groups_end_with_their_members_and_may_be_gone(tmp_path: Path) -> None:
    there = tmp_path / "vm-1"
    there.mkdir()
    assert groups.are_there([there])
    groups.end([there])
    groups.end([there])
    assert not groups.are_there([there])
    assert groups.members([there]) == set()


# --- claims, users, launch ---


def test_each_machine_has_a_user_of_its_own(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give users")
    confining, taken = Confining(None), set[int]()
    for number in range(50):
        claim = confining.claim(tmp_path, f"vm-{number % 5}", taken)
        assert claim.uid is not None
        assert UID_MIN <= claim.uid < UID_MIN + UIDS + 50
        assert claim.uid not in taken, "two machines would be one to the kernel"
        taken.add(claim.uid)


def test_a_claim_is_of_one_boot_and_whole_or_not_there(tmp_path: Path) -> None:
    confining = Confining(Cgroups(2, {"cpu": tmp_path / "groups"}))
    claim = confining.claim(tmp_path, "vm-1", ())
    assert read_claim(tmp_path) == claim
    assert claim.directories == [tmp_path / "groups" / "vm-1"]
    for other in (
        msgspec.json.encode(msgspec.structs.replace(claim, boot_id="another")),
        (tmp_path / CLAIM).read_bytes()[:-3],
        b"",
    ):
        (tmp_path / CLAIM).write_bytes(other)
        assert read_claim(tmp_path) is None
    release(Claim(boot_id=boot_id(), uid=None, groups=[str(tmp_path / "never-was")]))


def test_limits_leave_room_beside_the_guest(tmp_path: Path) -> None:
    found = Cgroups(2, {"cpu": tmp_path, "memory": tmp_path, "pids": tmp_path})
    (tmp_path / "vm-1").mkdir()
    for file in V2_FILES:
        (tmp_path / "vm-1" / file).touch()
    Confining(found).limit("vm-1", MACHINE, wanted=True)
    memory = int((tmp_path / "vm-1" / "memory.max").read_text())
    assert memory == (MACHINE.memory_mib + HEADROOM_MIB) * 2**20
    wanted = int((tmp_path / "vm-1" / "cpu.weight").read_text())
    Confining(found).limit("vm-1", MACHINE, wanted=False)
    assert int((tmp_path / "vm-1" / "cpu.weight").read_text()) < wanted, "who waits yields to who works"


def test_limits_that_are_required_and_not_to_be_had_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unusable() -> Cgroups:
        raise CgroupsUnusable("none are mounted", "mount them")

    monkeypatch.setattr("torpor_vm_host.adapters.qemu.confining.find_cgroups", unusable)
    with pytest.raises(Rejected, match="limits-unusable") as refused:
        Confining.find("required")
    assert "mount them" in refused.value.advice
    found = Confining.find("if-possible")
    assert (found.cgroups, found.unlimited_because) == (None, "none are mounted")


def launched(directory: Path, *argv: str, **changes: Any) -> "subprocess.CompletedProcess[str]":
    confining = Confining(None)
    claim = msgspec.structs.replace(confining.claim(directory, "vm-1", ()), **changes)
    command = confining.command(list(argv), directory, claim, MACHINE)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)


def test_what_is_launched_has_no_rights_and_has_said_who_it_is(tmp_path: Path) -> None:
    done = launched(tmp_path, "cat", "/proc/self/status", "/proc/self/limits")
    assert done.returncode == 0, done.stderr
    status = dict(line.split(":\t", 1) for line in done.stdout.splitlines() if ":\t" in line)
    assert (status["NoNewPrivs"], int(status["CapEff"], 16)) == ("1", 0)
    if os.geteuid() == 0:
        claim = read_claim(tmp_path)
        assert claim is not None
        assert set(status["Uid"].split()) == {str(claim.uid)}
        assert int(status["CapBnd"], 16) == 0
        assert not status["Groups"].split()
    limits = [line.split() for line in done.stdout.splitlines() if line.startswith("Max")]
    most = next(line for line in limits if line[1:3] == ["file", "size"])
    assert int(most[3]) == (MACHINE.disk_mib * 5 // 4 + 256) * 2**20
    pid = int((tmp_path / PROCESS).read_text().split()[0])
    assert pid == int(status["Pid"])
    assert recorded_pid(tmp_path) is None, "it has ended, whoever has its number now"


def test_what_cannot_join_its_group_does_not_run(tmp_path: Path) -> None:
    done = launched(tmp_path, "echo", "it ran", groups=[str(tmp_path / "no-such-group")])
    assert done.returncode == 120
    assert "it ran" not in done.stdout
    assert not (tmp_path / PROCESS).exists()


def test_what_cannot_be_recorded_does_not_run(tmp_path: Path) -> None:
    (tmp_path / PROCESS).mkdir()
    done = launched(tmp_path, "echo", "it ran")
    assert done.returncode == 122
    assert "it ran" not in done.stdout


@pytest.mark.parametrize(("mode", "allowed"), [(0o666, True), (0o600, False)])
def test_whether_a_machine_may_open_a_device(tmp_path: Path, mode: int, allowed: bool) -> None:
    device = tmp_path / "kvm"
    confining = Confining(None)
    assert "not there" in confining.why_not(device)
    device.touch()
    device.chmod(mode)
    if os.geteuid() == 0:
        assert (confining.why_not(device) == "") == allowed
        os.chown(device, 0, 4242)
        device.chmod(0o660)
        assert confining.why_not(device) == ""
        claim = confining.claim(tmp_path, "vm-1", ())
        assert "--groups=4242" in confining.command(["x"], tmp_path, claim, MACHINE, device)
        os.chown(device, 0, 0)
        assert "root alone" in confining.why_not(device), "nobody is put into the group of root"
        assert "--clear-groups" in confining.command(["x"], tmp_path, claim, MACHINE, device)

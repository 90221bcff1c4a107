"""Control groups: what one machine's process may use of the processor, memory and processes, version 1 or 2.

Kernel: Documentation/admin-guide/cgroup-v1, cgroup-v2.rst. Under version 1 machines stand below the group of this
process, so that its own limits hold for them too; under version 2, where a group with processes may have none below
it, they stand below the root.
"""

import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from typing import Final

import msgspec

CONTROLLERS: Final = ("cpu", "memory", "pids")
PARENT: Final = "torpor"
PERIOD_US: Final = 100_000
SHARES: Final = 1024
WEIGHT: Final = 100
REMOVE_S: Final = 2.0
REMOVE_POLL_S: Final = 0.002


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a group may use. `share` is its weight against others, 1.0 for a machine of one vCPU."""

    cpus: float
    memory_mib: int
    pids: int
    share: float = 1.0


class CgroupsUnusable(Exception):  # noqa: N818  (a finding)
    """No machine can be limited here; `advice` says what to do about it."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


class Cgroups:
    """The groups of one kind of machine on this host, below `parents` (a controller's name -> its directory)."""

    def __init__(self, version: int, parents: dict[str, Path]) -> None:
        self.version = version
        self._parents = parents

    def directories(self, name: str) -> list[Path]:
        """Where the group of that name is, or would be: one place, or under version 1 one for each controller."""
        return sorted({parent / name for parent in self._parents.values()})

    def create(self, name: str, limits: Limits) -> None:
        """Make the group with its limits; one that is there is given these limits. Raises `OSError`."""
        for directory in self.directories(name):
            directory.mkdir(exist_ok=True)
        settings = _settings_1(limits) if self.version == 1 else _settings_2(limits)
        for controller, files in settings.items():
            for file, value in files.items():
                path = self._parents[controller] / name / file
                if path.exists():  # what a kernel is built without (swap, say) needs no limit
                    path.write_text(value)


def join(directories: list[Path], pid: int) -> None:
    """Move a process with all its threads into a group; raises `OSError`."""
    for directory in directories:
        (directory / "cgroup.procs").write_text(str(pid))


def are_there(directories: list[Path]) -> bool:
    """Whether anything of the group is there still."""
    return any(directory.exists() for directory in directories)


def members(directories: list[Path]) -> set[int]:
    """The processes in a group."""
    found: set[int] = set()
    for directory in directories:
        with contextlib.suppress(OSError):
            found.update(int(pid) for pid in (directory / "cgroup.procs").read_text().split())
    return found


def end(directories: list[Path]) -> None:
    """Kill whoever is in the group and remove it; idempotent. Raises `OSError` when it stays all the same."""
    deadline = time.perf_counter() + REMOVE_S
    for directory in directories:
        while True:
            for pid in members([directory]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                directory.rmdir()
            except FileNotFoundError:
                break
            except OSError as error:
                if error.errno != errno.EBUSY or time.perf_counter() > deadline:
                    raise
                time.sleep(REMOVE_POLL_S)
            else:
                break


def killed_for_memory(directories: list[Path]) -> bool:
    """Whether the kernel has ended somebody of the group because it used more memory than it may."""
    for directory in directories:
        for file in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                words = (directory / file).read_text().split()
                if dict(zip(words[::2], words[1::2], strict=False)).get("oom_kill", "0") != "0":
                    return True
    return False


def find_cgroups(proc: Path = Path("/proc/self")) -> Cgroups:
    """The groups this process can make for machines; raises `CgroupsUnusable`."""
    mounts = _mounts((proc / "mountinfo").read_text())
    own = _own_groups((proc / "cgroup").read_text())
    first = {name: mounts[name] for name in CONTROLLERS if name in mounts}
    if len(first) == len(CONTROLLERS):
        parents: dict[str, Path] = {
            name: mount / own.get(name, "/").removeprefix(root.rstrip("/")).lstrip("/") / PARENT
            for name, (mount, root) in first.items()
        }
        return _usable(Cgroups(1, parents))
    if "" in mounts:
        mount = mounts[""][0]
        _delegate(mount)
        return _usable(Cgroups(2, dict.fromkeys(CONTROLLERS, mount / PARENT)))
    raise CgroupsUnusable(
        f"no control groups for {', '.join(CONTROLLERS)} are mounted", "mount them, or run on a machine that has them"
    )


def _usable(found: Cgroups) -> Cgroups:
    probe = f"probe-{os.getpid()}"
    try:
        for parent in {directory.parent for directory in found.directories(probe)}:
            parent.mkdir(exist_ok=True)
            if found.version != 1:
                (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
        try:
            found.create(probe, Limits(cpus=1, memory_mib=64, pids=8))
        finally:
            end(found.directories(probe))
    except OSError as error:
        raise _refused(error) from error
    return found


def _delegate(mount: Path) -> None:
    """Version 2: let the groups below the root be limited."""
    try:
        there = set((mount / "cgroup.controllers").read_text().split())
        missing = set(CONTROLLERS) - there
        if missing:
            raise CgroupsUnusable(
                f"the control groups lack {', '.join(sorted(missing))}", "let this machine, or its container, have them"
            )
        enabled = set((mount / "cgroup.subtree_control").read_text().split())
        for name in sorted(set(CONTROLLERS) - enabled):
            (mount / "cgroup.subtree_control").write_text(f"+{name}")
    except OSError as error:
        raise _refused(error) from error


def _refused(error: OSError) -> CgroupsUnusable:
    return CgroupsUnusable(
        f"{error.filename}: {error.strerror}",
        "run the vm-host as root outside of a container, or in one that may write to its control groups",
    )


def _mounts(mountinfo: str) -> dict[str, tuple[Path, str]]:
    """Controller -> (where its hierarchy is mounted, which group of it is the mount's root); "" for version 2."""
    found: dict[str, tuple[Path, str]] = {}
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split()[:3]
        root, mount = fields.split()[3:5]
        if kind == "cgroup2":
            found.setdefault("", (Path(mount), root))
        elif kind == "cgroup":
            for name in options.split(","):
                found.setdefault(name, (Path(mount), root))
    return found


def _own_groups(text: str) -> dict[str, str]:
    """Controller -> the group this process is in."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _settings_1(limits: Limits) -> dict[str, dict[str, str]]:
    memory = str(limits.memory_mib * 2**20)
    return {
        "cpu": {
            "cpu.cfs_period_us": str(PERIOD_US),
            "cpu.cfs_quota_us": str(int(limits.cpus * PERIOD_US)),
            "cpu.shares": str(max(2, int(limits.share * SHARES))),
        },
        # In this order: memory and swap together may not be less than memory alone.
        "memory": {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
        "pids": {"pids.max": str(limits.pids)},
    }


def _settings_2(limits: Limits) -> dict[str, dict[str, str]]:
    return {
        "cpu": {
            "cpu.max": f"{int(limits.cpus * PERIOD_US)} {PERIOD_US}",
            "cpu.weight": str(max(1, int(limits.share * WEIGHT))),
        },
        "memory": {"memory.max": str(limits.memory_mib * 2**20), "memory.swap.max": "0", "memory.oom.group": "1"},
        "pids": {"pids.max": str(limits.pids)},
    }

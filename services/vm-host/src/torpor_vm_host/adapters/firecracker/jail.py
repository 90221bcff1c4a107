"""A machine's jail: the folder that is all Firecracker sees of this host, and the command that locks it in there."""

import contextlib
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.firecracker.cgroups import PARENT, Cgroups
from torpor_vm_host.adapters.firecracker.copying import copy
from torpor_vm_host.adapters.firecracker.engine import Engine

API_SOCKET: Final = "api.sock"
VSOCK: Final = "v.sock"
FAULTS_SOCKET: Final = "faults.sock"
DISK: Final = "disk"
MEMORY: Final = "memory"
STATE: Final = "state"
KERNEL: Final = "kernel"
INITRD: Final = "initrd"
MEMORY_OUT: Final = "memory.out"
STATE_OUT: Final = "state.out"
LOG: Final = "firecracker.log"
METRICS: Final = "metrics.json"
FILES_MAX: Final = 1024
FILE_SLACK_MIB: Final = 64


class Jailing(msgspec.Struct, frozen=True, kw_only=True):
    """How machines are jailed. Each runs as a user of its own among `uids`, chosen by its name; `netns`: a path."""

    uid_min: int = 300_000
    uids: int = 50_000
    netns: str | None = None
    cgroups: Cgroups | None = None

    def uid(self, name: str) -> int:
        """The user (and group) of the machine; two machines rarely have the same."""
        return self.uid_min + zlib.crc32(name.encode()) % self.uids


class Jail:
    """The jail of the machine `name` below `directory`. Paths inside it are the bare names above."""

    def __init__(self, directory: Path, name: str, engine: Engine, jailing: Jailing) -> None:
        self.directory = directory
        self.name = name
        self.owner = jailing.uid(name)
        self._engine = engine
        self._jailing = jailing
        self.chroots = directory / "jail"
        self.root = self.chroots / engine.firecracker.name / name / "root"
        self.pid_file = self.root / f"{engine.firecracker.name}.pid"

    def lay_out(self) -> None:
        """Make the empty jail."""
        shutil.rmtree(self.chroots, ignore_errors=True)
        self.root.mkdir(parents=True)

    def link(self, source: Path, name: str) -> None:
        """Let the machine read a file that nobody writes to again: a second name for it, or a copy where that fails."""
        target = self.root / name
        try:
            os.link(source, target)
        except OSError:
            copy(source, target)
            target.chmod(0o444)

    def own(self, name: str) -> Path:
        """Let the machine write to a file of the jail, made empty if it is not there."""
        path = self.root / name
        path.touch(mode=0o600)
        path.chmod(0o600)
        os.chown(path, self.owner, self.owner)
        return path

    def remove(self, *names: str) -> None:
        """Remove files of the jail; those that are not there are fine."""
        for name in names:
            (self.root / name).unlink(missing_ok=True)

    def command(self, machine: MachineSpec) -> list[str]:
        """The jailer's command line (Firecracker: docs/jailer.md)."""
        cgroups = self._jailing.cgroups
        argv = [
            str(self._engine.jailer),
            "--id", self.name,
            "--exec-file", str(self._engine.firecracker),
            "--uid", str(self.owner),
            "--gid", str(self.owner),
            "--chroot-base-dir", str(self.chroots),
            "--resource-limit", f"no-file={FILES_MAX}",
            "--resource-limit", f"fsize={_file_bytes_max(machine)}",
        ]  # fmt: skip
        if cgroups is not None:
            argv += ["--cgroup-version", str(cgroups.version), "--parent-cgroup", PARENT]
            argv += _repeated("--cgroup", cgroups.limits(machine))
        if self._jailing.netns is not None:
            argv += ["--netns", self._jailing.netns]
        return [*argv, "--new-pid-ns", "--", "--api-sock", API_SOCKET]

    def clear(self) -> None:
        """Remove the jail and what the jailer made outside of it; the machine's process has ended."""
        if self._jailing.cgroups is not None:
            self._jailing.cgroups.remove(self.name)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.chroots)


def _file_bytes_max(machine: MachineSpec) -> int:
    return (max(machine.disk_mib, machine.memory_mib) + FILE_SLACK_MIB) * 2**20


def _repeated(option: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (option, value)]

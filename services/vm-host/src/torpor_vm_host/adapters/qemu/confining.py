"""How a machine's process is confined: a user of its own without rights, limits of its own, and no way to more.

The claim is written beside the machine before any of it is taken, so a crash leaves a trace and never an orphan.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.errors import Rejected
from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.qemu import cgroups as groups
from torpor_vm_host.adapters.qemu.cgroups import Cgroups, CgroupsUnusable, Limits, find_cgroups
from torpor_vm_host.adapters.qemu.options import Enforcement
from torpor_vm_host.ports import DriverError

CLAIM: Final = "confinement.json"
PROCESS: Final = "process"
UID_MIN: Final = 0x7000_0000
UIDS: Final = 0x1000_0000
"""A range that neither distributions, containers nor systemd give out (systemd: docs/UIDS-GIDS.md)."""
HEADROOM_MIB: Final = 256
"""What QEMU needs beside the guest's memory: translated code, its own, and buffers while the disk is busy."""
THREADS: Final = 96
"""QEMU's own: up to 64 for the disk, and a few besides."""
CPU_BESIDE_GUEST: Final = 0.5
"""Of a processor, for QEMU's own work."""
IDLE_SHARE: Final = 0.1
"""The weight of a machine that nobody has asked for yet."""
FOR_ALL: Final = 0o006
FOR_GROUP: Final = 0o060
FILE_MIB_BESIDE_DISK: Final = 256
OOM_SCORE: Final = 300
"""When memory runs out, the kernel ends a machine rather than a service."""

LAUNCH: Final = """
for group in $1; do echo 0 > "$group/cgroup.procs" || exit 120; done
echo "$2" > /proc/self/oom_score_adj
ulimit -c 0 && ulimit -f "$3" || exit 121
read -r stat < /proc/self/stat && printf '%s\\n' "$stat" > "$4" || exit 122
shift 4
exec "$@"
"""
"""Confines itself, writes down who it is, and becomes QEMU: there is no moment at which it runs unrecorded."""
LAUNCH_FAILED: Final = {
    120: "it could not join its control groups",
    121: "its limits could not be set",
    122: "who it is could not be written down; is the disk full?",
}
"""The exit codes of the launch, in words."""

_log: Final = logging.getLogger(__name__)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine's process holds outside its directory. `boot_id`: pids mean something in one boot only."""

    boot_id: str
    uid: int | None
    groups: list[str]

    @property
    def directories(self) -> list[Path]:
        """Where its control groups are."""
        return [Path(group) for group in self.groups]


def boot_id() -> str:
    """This boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read_claim(directory: Path) -> Claim | None:
    """What the machine in this directory claims; None when it has claimed nothing yet, or in another boot."""
    try:
        claim = msgspec.json.decode((directory / CLAIM).read_bytes(), type=Claim)
    except (OSError, msgspec.MsgspecError):
        return None
    return claim if claim.boot_id == boot_id() else None


class Confining:
    """Confines processes. As root each gets a user of its own; as anybody else it runs as that user.

    `unlimited_because` says why there are no limits, if there are none.
    """

    def __init__(self, limits: Cgroups | None, *, unlimited_because: str = "") -> None:
        self.cgroups = limits
        self.unlimited_because = unlimited_because
        self._is_root = os.geteuid() == 0

    @classmethod
    def find(cls, enforcement: Enforcement) -> "Confining":
        """What this machine allows; raises `Rejected("limits-unusable")` when required limits cannot be had."""
        try:
            return cls(find_cgroups())
        except CgroupsUnusable as error:
            if enforcement == "required":
                advice = f"{error.advice}; or let limits be optional (TORPOR_VM_HOST_LIMITS=if-possible)"
                raise Rejected("limits-unusable", f"machines cannot be limited: {error}", advice) from error
            _log.warning("machines are not limited in what they use of this host: %s (%s)", error, error.advice)
            return cls(None, unlimited_because=str(error))

    def directories(self, name: str) -> list[Path]:
        """The control groups of the machine of that name."""
        return [] if self.cgroups is None else self.cgroups.directories(name)

    def groups_of(self, name: str) -> list[str]:
        """The same, as a claim has them."""
        return [str(directory) for directory in self.directories(name)]

    def claim(self, directory: Path, name: str, taken: Iterable[int]) -> Claim:
        """Write down what the machine in this directory is about to hold; `taken` are the users of others."""
        uid = _free_uid(name, set(taken)) if self._is_root else None
        return self.write(directory, Claim(boot_id=boot_id(), uid=uid, groups=self.groups_of(name)))

    def write(self, directory: Path, claim: Claim) -> Claim:
        """Write a claim as it is."""
        fresh = directory / f".{CLAIM}"
        fresh.write_bytes(msgspec.json.encode(claim))
        fresh.replace(directory / CLAIM)
        return claim

    def limit(self, name: str, machine: MachineSpec, *, wanted: bool) -> None:
        """Make the control group of a machine; raises `DriverError("limits-failed")`. Unwanted ones yield to others."""
        if self.cgroups is None:
            return
        limits = Limits(
            cpus=machine.vcpus + CPU_BESIDE_GUEST,
            memory_mib=machine.memory_mib + HEADROOM_MIB,
            pids=THREADS + machine.vcpus,
            share=machine.vcpus * (1.0 if wanted else IDLE_SHARE),
        )
        try:
            self.cgroups.create(name, limits)
        except OSError as error:
            raise DriverError("limits-failed", f"{name} cannot be limited: {error}", retryable=True) from error

    def why_not(self, device: Path) -> str:
        """Why a machine may not open this device; empty when it may."""
        if not os.access(device, os.R_OK | os.W_OK):
            return f"{device} is not there, or may not be used"
        found = device.stat()
        if self._is_root and found.st_mode & FOR_ALL != FOR_ALL and _group_of(device) is None:
            return (
                f"{device} is for root alone, and machines run as users without rights "
                f"(chgrp kvm {device} && chmod 660 {device} lets them)"
            )
        return ""

    def command(
        self, argv: list[str], directory: Path, claim: Claim, machine: MachineSpec, device: Path | None = None
    ) -> list[str]:
        """What to start so that `argv` runs confined; it is in the group of the `device` that it may open."""
        blocks = (machine.disk_mib * 5 // 4 + FILE_MIB_BESIDE_DISK) * 2048  # of 512 bytes
        launch = [shutil.which("sh") or "/bin/sh", "-c", LAUNCH, "torpor", " ".join(claim.groups)]
        rights = ["setpriv", "--no-new-privs"]
        if claim.uid is not None:
            group = None if device is None else _group_of(device)
            member = "--clear-groups" if group is None else f"--groups={group}"
            user = ["--reuid", str(claim.uid), "--regid", str(claim.uid), member]
            rights += [*user, "--bounding-set=-all", "--inh-caps=-all"]
        return [*launch, str(OOM_SCORE), str(blocks), str(directory / PROCESS), *rights, "--", *argv]


def release(claim: Claim) -> None:
    """End whoever is left in the claim's groups, and the groups; raises `DriverError("limits-stay")`."""
    try:
        groups.end(claim.directories)
    except OSError as error:
        raise DriverError("limits-stay", f"a control group cannot be removed: {error}", retryable=True) from error


def _group_of(device: Path) -> int | None:
    """The group that may use the device, where not everybody may; never that of root."""
    found = device.stat()
    if found.st_mode & FOR_ALL == FOR_ALL or found.st_mode & FOR_GROUP != FOR_GROUP:
        return None
    return found.st_gid or None


def _free_uid(name: str, taken: set[int]) -> int:
    offset = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    while UID_MIN + offset % UIDS in taken:
        offset += 1
    return UID_MIN + offset % UIDS

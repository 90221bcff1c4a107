"""Which Firecracker and jailer this machine has, and what their build can do; nothing is started but `--version`."""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.errors import Rejected

FIRECRACKER: Final = "firecracker"
JAILER: Final = "jailer"
VERSION_MIN: Final = (1, 12, 0)
"""The oldest release whose requests this driver was written for and tried with."""
TRACKS_SINCE: Final = (1, 14, 0)
"""From here on `snapshot/load` is told `track_dirty_pages`; before, by its old name `enable_diff_snapshots`."""
OVERRIDES_SINCE: Final = (1, 16, 0)
"""`snapshot/load` takes `vsock_override` and `clock_realtime`."""
BZIMAGE_SINCE: Final = (1, 17, 0)
"""A compressed kernel (bzImage) boots; before, only an ELF vmlinux does."""
ADVICE: Final = (
    "put the firecracker and jailer programs of one release on the PATH of root "
    "(see services/vm-host/docs/firecracker.md)"
)

Version = tuple[int, int, int]


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One Firecracker build on one kind of machine; snapshots load only in the same engine (`fingerprint`)."""

    firecracker: Path
    jailer: Path
    version: Version
    snapshot_version: str
    cpu: str
    kernel: str

    @property
    def fingerprint(self) -> str:
        """What must be equal where a snapshot is made and where it is loaded."""
        version = ".".join(map(str, self.version))
        return f"firecracker-{version}-snapshot-{self.snapshot_version}-cpu-{self.cpu}-linux-{self.kernel}"


def find_engine(path: str | None = None) -> Engine:
    """The engine on `path` (PATH when None); raises `Rejected` that says what is missing or too old."""
    firecracker, jailer = _find(FIRECRACKER, path), _find(JAILER, path)
    version = _version_of(firecracker)
    if version < VERSION_MIN:
        wanted = ".".join(map(str, VERSION_MIN))
        raise Rejected("firecracker-too-old", f"{firecracker} is {version}, {wanted} is the oldest that works", ADVICE)
    if _version_of(jailer) != version:
        raise Rejected("jailer-mismatched", f"{jailer} and {firecracker} are not of one release", ADVICE)
    printed = _printed(firecracker, "--snapshot-version")
    found = re.search(r"v?(\d+\.\d+\.\d+)", printed)
    if found is None:
        raise Rejected("firecracker-unknown", f"{firecracker} says of its snapshots: {printed.strip()!r}", ADVICE)
    return Engine(
        firecracker=firecracker,
        jailer=jailer,
        version=version,
        snapshot_version=found[1],
        cpu=cpu_model(Path("/proc/cpuinfo").read_text()),
        kernel=os.uname().release,
    )


def cpu_model(cpuinfo: str) -> str:
    """A name for the processor's model: equal on machines whose guests see the same processor."""
    known = {"vendor_id", "cpu family", "model", "stepping", "flags"}
    fields = dict(line.split(":", 1) for line in cpuinfo.split("\n\n", 1)[0].splitlines() if ":" in line)
    model = sorted((key.strip(), value.strip()) for key, value in fields.items() if key.strip() in known)
    return hashlib.sha256(msgspec.json.encode(model)).hexdigest()[:12]


def _find(name: str, path: str | None) -> Path:
    found = shutil.which(name, path=path)
    if found is None:
        raise Rejected(f"{name}-missing", f"{name} is not on the PATH", ADVICE)
    return Path(found).resolve()


def _version_of(program: Path) -> Version:
    printed = _printed(program, "--version")
    found = re.search(r"v(\d+)\.(\d+)\.(\d+)", printed)
    if found is None:
        raise Rejected("firecracker-unknown", f"{program} says of itself: {printed.strip()!r}", ADVICE)
    return int(found[1]), int(found[2]), int(found[3])


def _printed(program: Path, option: str) -> str:
    try:
        done = subprocess.run([program, option], capture_output=True, text=True, check=False, timeout=10)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Rejected("firecracker-unknown", f"{program} {option} does not run: {error}", ADVICE) from error
    return done.stdout

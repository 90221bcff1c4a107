"""The programs that build images, in a small: a PATH on which apt and mmdebstrap take no minute and need no network.

What mmdebstrap is told to run in the new root, and how the file system is made of it, is as in a real build.
"""

import os
import subprocess
from pathlib import Path
from typing import Final

APT_CACHE: Final = """
case $1 in
depends) printf '%s\\n  Depends: linux-image-6.1.0-9-cloud-amd64\\n' "$2" ;;
policy) shift 2; for one; do case $one in no-*) ;; *) printf '%s:\\n  Candidate: 1\\n' "$one" ;; esac; done ;;
esac
"""
APT_GET: Final = 'case " $* " in *" download "*) cp "$TOOLS"/*.deb . ;; esac'
MMDEBSTRAP: Final = """
echo started >> "$TOOLS/count"
echo 'I: running apt-get update...'
[ ! -e "$TOOLS/hold" ] || read -r _ < "$TOOLS/hold"
[ ! -e "$TOOLS/says" ] || { cat "$TOOLS/says"; exit 25; }
root=$(mktemp -d)
mkdir -p "$root/etc" "$root/var/cache/apt" "$root/var/log"
echo 'I: running --customize-hook in shell...'
for one; do
    case $one in --customize-hook=*) sh -c "${one#--customize-hook=}" exec "$root" 2>&1 || exit 25 ;; esac
done
rm -rf "$root"
"""
CHROOT: Final = 'cd "$1" && shift && exec "$@"'
MOUNT: Final = 'cp -a "$2/." "$3"'


class ImageTools:
    """The programs, in `place`; `count` builds were begun. `says`: what mmdebstrap fails with. `hold`: it waits."""

    def __init__(self, place: Path, *, busybox_bytes: int = 1000) -> None:
        self.place = place
        self._busybox_bytes = busybox_bytes
        place.mkdir()
        scripts = {"apt-cache": APT_CACHE, "apt-get": APT_GET, "mmdebstrap": MMDEBSTRAP, "chroot": CHROOT}
        for name, script in {**scripts, "mount": MOUNT, "umount": ""}.items():
            (place / name).write_text(f"#!/bin/sh\nTOOLS='{place}'\n{script}\n")
            (place / name).chmod(0o755)
        self._package()

    @property
    def path(self) -> str:
        """The PATH that has them first."""
        return f"{self.place}:{os.environ['PATH']}"

    @property
    def count(self) -> int:
        """How many times mmdebstrap was run."""
        counted = self.place / "count"
        return len(counted.read_text().splitlines()) if counted.exists() else 0

    @property
    def says(self) -> Path:
        """Write what mmdebstrap says before it fails."""
        return self.place / "says"

    @property
    def hold(self) -> Path:
        """A FIFO: while it is there, mmdebstrap waits for a line."""
        return self.place / "hold"

    def _package(self) -> None:
        tree = self.place / "tree"
        for folder in ("DEBIAN", "boot", "bin"):
            (tree / folder).mkdir(parents=True)
        (tree / "DEBIAN/control").write_text(
            "Package: linux-image-6.1.0-9-cloud-amd64\nVersion: 1\nArchitecture: amd64\nMaintainer: us <a@b>\n"
            "Description: a kernel\n"
        )
        (tree / "boot/vmlinuz-6.1.0-9-cloud-amd64").write_bytes(b"a kernel")
        (tree / "bin/busybox").write_bytes(os.urandom(self._busybox_bytes))
        subprocess.run(["dpkg-deb", "-Znone", "-b", tree, self.place / "kernel.deb"], check=True, capture_output=True)

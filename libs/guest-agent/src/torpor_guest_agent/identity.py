"""Who this machine is now: clock, randomness, names and epoch, given by the host after every start and restore.

Programs learn of a new epoch from `/run/torpor/epoch`, a JSON file that is replaced as a whole; see `torpor_guest.py`.
What an epoch changes lies in memory only (`/etc/hostname` and its like are links to it): a wake writes to no disk.
"""

import fcntl
import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "/run/torpor"
LINKED: Final = {"hostname": "/etc/hostname", "machine-id": "/etc/machine-id", "hosts": "/etc/hosts"}
"""File in `FOLDER` -> the link to it that an image has."""
PUBLISHED: Final = ("session_id", "incarnation", "epoch", "hostname", "machine_id")
OUR_LINE: Final = " # torpor"
"""How the line of `/etc/hosts` ends that is ours; the others are the user's."""
RNDADDENTROPY: Final = 0x40085203
RNDRESEEDCRNG: Final = 0x5207


class Self:
    """The machine's own idea of who it is."""

    def __init__(self, folder: str = FOLDER) -> None:
        self._folder = folder
        self._names: tuple[str, str] | None = None

    @property
    def epoch_file(self) -> str:
        """The file that says which epoch this is."""
        return f"{self._folder}/epoch"

    def become(self, request: dict[str, Any], entropy: bytes) -> None:
        """Become who the host says: step the clock, reseed the kernel's generator, set names, publish the epoch."""
        self.step_clock(int(request["clock_ns"]))
        self.reseed(entropy)
        names = str(request["hostname"]), str(request["machine_id"])
        if names != self._names:
            self._set_names(*names)
            self._names = names
        published = {key: request[key] for key in PUBLISHED}
        self._write("epoch", json.dumps({**published, "since_ns": time.time_ns()}) + "\n")

    def step_clock(self, clock_ns: int) -> None:
        """Set the wall clock to the host's, nanoseconds since the Unix epoch, UTC."""
        time.clock_settime_ns(time.CLOCK_REALTIME, clock_ns)

    def reseed(self, entropy: bytes) -> None:
        """Mix fresh entropy into the kernel's generator and make it take effect at once."""
        descriptor = os.open("/dev/urandom", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(descriptor, RNDADDENTROPY, struct.pack("ii", len(entropy) * 8, len(entropy)) + entropy)
            fcntl.ioctl(descriptor, RNDRESEEDCRNG)
        finally:
            os.close(descriptor)

    def set_hostname(self, hostname: str) -> None:
        """Tell the kernel the machine's name."""
        socket.sethostname(hostname)

    def _set_names(self, hostname: str, machine_id: str) -> None:
        self.set_hostname(hostname)
        self._write("hostname", f"{hostname}\n")
        self._write("machine-id", f"{machine_id}\n")
        try:
            lines = Path(f"{self._folder}/hosts").read_text().splitlines()
        except FileNotFoundError:
            lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
        kept = [line for line in lines if not line.endswith(OUR_LINE)]
        self._write("hosts", "\n".join([*kept, f"127.0.1.1 {hostname}{OUR_LINE}", ""]))

    def _write(self, name: str, text: str) -> None:
        """Replace a file as a whole: whoever reads it sees the old one or the new one."""
        fresh = f"{self._folder}/.{name}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
        os.rename(fresh, f"{self._folder}/{name}")  # noqa: PTH104  (pathlib's costs a wake a millisecond)

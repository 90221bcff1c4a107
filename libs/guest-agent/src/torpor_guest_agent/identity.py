"""Who this machine is now: clock, randomness, names and epoch, given by the host after every start and restore.

Programs learn of a new epoch from `/run/torpor/epoch`, a JSON file that is replaced as a whole; see `torpor_guest.py`.
"""

import fcntl
import json
import os
import random
import socket
import struct
import time
from pathlib import Path
from typing import Any, Final

EPOCH_FILE: Final = Path("/run/torpor/epoch")
RNDADDENTROPY: Final = 0x40085203
RNDRESEEDCRNG: Final = 0x5207


def take(request: dict[str, Any], entropy: bytes) -> None:
    """Become who the host says: step the clock, reseed the kernel's generator, set names, publish the epoch."""
    step_clock(int(request["clock_ns"]))
    reseed(entropy)
    socket.sethostname(str(request["hostname"]))
    machine_id = str(request["machine_id"])
    Path("/etc/hostname").write_text(f"{request['hostname']}\n")
    Path("/etc/machine-id").write_text(f"{machine_id}\n")
    _name_in_hosts(str(request["hostname"]))
    published = {key: request[key] for key in ("session_id", "incarnation", "epoch", "hostname", "machine_id")}
    _publish({**published, "since_ns": time.time_ns()})


def step_clock(clock_ns: int) -> None:
    """Set the wall clock to the host's, nanoseconds since the Unix epoch, UTC."""
    time.clock_settime_ns(time.CLOCK_REALTIME, clock_ns)


def reseed(entropy: bytes) -> None:
    """Mix fresh entropy into the kernel's generator and make it take effect at once; reseed our own too."""
    descriptor = os.open("/dev/urandom", os.O_RDWR)
    try:
        fcntl.ioctl(descriptor, RNDADDENTROPY, struct.pack("ii", len(entropy) * 8, len(entropy)) + entropy)
        fcntl.ioctl(descriptor, RNDRESEEDCRNG)
    finally:
        os.close(descriptor)
    random.seed(os.urandom(32))


def _name_in_hosts(hostname: str) -> None:
    lines = [f"127.0.0.1 localhost {hostname}", "::1 localhost ip6-localhost ip6-loopback"]
    Path("/etc/hosts").write_text("\n".join(lines) + "\n")


def _publish(epoch: dict[str, Any]) -> None:
    EPOCH_FILE.parent.mkdir(mode=0o755, exist_ok=True)
    fresh = EPOCH_FILE.with_suffix(".new")
    fresh.write_text(json.dumps(epoch) + "\n")
    fresh.chmod(0o644)
    fresh.rename(EPOCH_FILE)

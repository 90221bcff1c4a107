"""What this machine can run, and what to do about what it cannot; looks, and changes nothing."""

import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from torpor.embedded import runfile
from torpor.embedded.layout import DataDir
from torpor.embedded.server import check_version, find_server
from torpor.embedded.starting import SPACE_BYTES_MIN
from torpor.errors import CannotStart

POSTGRES_VARIABLE: Final = "TORPOR_LOG_DSN"
_POSTGRES_TIMEOUT_S: Final = 5.0
_PYTHON_MIN: Final = (3, 11)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing looked at. `absent`: something that is not needed is not there; `broken`: the whole cannot start."""

    name: str
    state: Literal["ok", "absent", "broken"]
    detail: str
    advice: str = ""


async def examine(data: DataDir) -> list[Finding]:
    """Look at everything; one that cannot be looked at is a finding too."""
    findings = [
        _looked("system", _system),
        _looked("python", _python),
        _looked("nats-server", _nats_server),
        _looked("data directory", lambda: _data_dir(data)),
        _looked("disk space", lambda: _space(data)),
        _looked("whole", lambda: _whole(data)),
    ]
    findings.append(await _postgres())
    findings += await _drivers()
    findings.append(_looked("kvm", _kvm))
    return findings


def _looked(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except CannotStart as error:
        return Finding(name=name, state="broken", detail=error.message, advice=error.advice)
    except OSError as error:
        return Finding(
            name=name, state="broken", detail=f"{error.filename or ''} {error.strerror}".strip(), advice="check it"
        )


def _system() -> Finding:
    detail = f"{platform.system()} {platform.release()}, {os.cpu_count()} cpus"
    if sys.platform.startswith("linux"):
        return Finding(name="system", state="ok", detail=detail)
    return Finding(name="system", state="broken", detail=detail, advice="run Torpor on Linux")


def _python() -> Finding:
    # Told, though this very process shows that it is new enough: a bug report starts with it.
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] >= _PYTHON_MIN:
        return Finding(name="python", state="ok", detail=detail)
    return Finding(name="python", state="broken", detail=detail, advice="install Python 3.11 or newer")


def _nats_server() -> Finding:
    binary = find_server()
    return Finding(name="nats-server", state="ok", detail=f"{check_version(binary)} at {binary}")


def _data_dir(data: DataDir) -> Finding:
    existing = next(path for path in (data.root, *data.root.parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        made = "" if existing == data.root else " (made by the first torpor up)"
        return Finding(name="data directory", state="ok", detail=f"{data.root}{made}")
    return Finding(
        name="data directory",
        state="broken",
        detail=f"{existing} cannot be written by this user",
        advice="make it writable, or choose another directory with --data-dir",
    )


def _space(data: DataDir) -> Finding:
    existing = next(path for path in (data.root, *data.root.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{free / 2**30:.1f} GiB free at {existing}"
    if free < SPACE_BYTES_MIN:
        return Finding(name="disk space", state="broken", detail=detail, advice="free some space")
    return Finding(name="disk space", state="ok", detail=detail)


def _whole(data: DataDir) -> Finding:
    run = runfile.read(data)
    if run is not None and run.supervisor_runs():
        return Finding(name="whole", state="ok", detail=f"runs here (pid {run.supervisor.pid}); see `torpor status`")
    if run is not None:
        return Finding(
            name="whole", state="absent", detail="was killed", advice="`torpor up` goes on with every session"
        )
    return Finding(name="whole", state="absent", detail="does not run here", advice="start it with `torpor up`")


async def _postgres() -> Finding:
    dsn = os.environ.get(POSTGRES_VARIABLE, "")
    if not dsn.startswith(("postgres://", "postgresql://")):
        return Finding(
            name="postgresql",
            state="absent",
            detail="not configured: the log is kept in SQLite",
            advice=f"for a cluster, name a database with {POSTGRES_VARIABLE}=postgresql://…",
        )
    import asyncpg  # noqa: PLC0415  (only where it is configured)

    try:
        connection = await asyncpg.connect(dsn, timeout=_POSTGRES_TIMEOUT_S)
        version = await connection.fetchval("show server_version")
        await connection.close()
    except (OSError, TimeoutError, ValueError, asyncpg.PostgresError) as error:
        return Finding(
            name="postgresql",
            state="broken",
            detail=f"cannot be reached: {type(error).__name__}: {error}",
            advice=f"start it, or correct {POSTGRES_VARIABLE}",
        )
    return Finding(name="postgresql", state="ok", detail=f"{version}, as {POSTGRES_VARIABLE} says")


async def _drivers() -> list[Finding]:
    from torpor_vm_host.drivers import probe_all  # noqa: PLC0415  (heavy)

    return [
        Finding(name=f"driver {name}", state="ok" if found.ok else "absent", detail=found.reason, advice=found.advice)
        for name, found in (await probe_all()).items()
    ]


def _kvm() -> Finding:
    device = Path("/dev/kvm")
    if not device.exists():
        return Finding(
            name="kvm",
            state="absent",
            detail="/dev/kvm is not there: real machines run in emulation, or not at all",
            advice="use a machine, or a cloud instance, with (nested) virtualisation for full speed",
        )
    if os.access(device, os.R_OK | os.W_OK):
        return Finding(name="kvm", state="ok", detail="/dev/kvm can be opened")
    return Finding(
        name="kvm", state="absent", detail="/dev/kvm is there, this user may not use it", advice="join the group kvm"
    )

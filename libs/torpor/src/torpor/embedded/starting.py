"""From a data directory to a running supervisor: every check that needs no heavy library, then the start itself."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torpor.embedded import runfile
from torpor.embedded.console import Console
from torpor.embedded.layout import DataDir
from torpor.embedded.lock import DataDirLock
from torpor.embedded.process_table import boot_id, end
from torpor.embedded.runfile import Run
from torpor.embedded.server import check_version, choose_port, find_server
from torpor.embedded.supervised import ProcessSpec
from torpor.embedded.supervisor import Supervisor, supervisor_identity
from torpor.errors import CannotStart

SPACE_BYTES_MIN: Final = 64 * 1024 * 1024
STALE_PATIENCE_S: Final = 5.0


def start(data_dir: str, driver: str, nats_port: int, console: Console) -> int:
    """Run the whole of a data directory until it is told to stop; the exit code."""
    if not sys.platform.startswith("linux"):
        raise CannotStart("not-linux", "torpor up needs Linux", "run it in a Linux machine or container")
    data = DataDir.choose(data_dir)
    with _said_well(data):
        _make(data)
        with DataDirLock(data):
            _end_stale(data, console)
            binary = find_server()
            version = check_version(binary)
            port = choose_port(data, nats_port)
            whole = _Whole(data, driver, binary, port)
            run = Run(supervisor=supervisor_identity(), version=f"nats-server {version}")
            return Supervisor(
                data, run, console, preparation=whole.preparation(), arrange=whole.arrange, leave=whole.leave
            ).run()


@contextmanager
def _said_well(data: DataDir) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise CannotStart("disk-full", f"the disk of {data.root} is full", "free some space") from error
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT}:
            where = error.filename or data.root
            raise CannotStart(
                "not-writable",
                f"{where} cannot be written: {error.strerror}",
                "make the data directory writable for this user, or choose another with --data-dir",
            ) from error
        raise CannotStart("system", f"{error.strerror or error}", f"see {data.logs}") from error


def _make(data: DataDir) -> None:
    for directory in (data.root, data.logs, data.views, data.nats, data.keys, data.heads_file.parent, data.chunks):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    probe = data.root / ".writable"
    probe.write_bytes(b"x")
    probe.unlink()
    free = shutil.disk_usage(data.root).free
    if free < SPACE_BYTES_MIN:
        raise CannotStart(
            "disk-full",
            f"{data.root} has {free // 2**20} MiB left, at least {SPACE_BYTES_MIN // 2**20} are needed to start",
            "free some space, or choose another directory with --data-dir",
        )


def _end_stale(data: DataDir, console: Console) -> None:
    """End what a killed supervisor of this directory may have left; only processes that are surely its own."""
    before = runfile.read(data)
    if before is None or before.boot_id != boot_id():
        return
    for process in before.processes:
        if not end(process.pid, process.started_ticks, STALE_PATIENCE_S):
            raise CannotStart(
                "stale-process",
                f"{process.name} (pid {process.pid}) of an earlier start does not end",
                f"kill -9 {process.pid}, then start again",
            )
    console.say("recovering", "torpor up: the last start was killed; going on from the log")


class _Whole:
    """Which processes make up the whole, and what each is told."""

    def __init__(self, data: DataDir, driver: str, binary: Path, port: int) -> None:
        self._data = data
        self._driver = driver
        self._binary = binary
        self._port = port

    def preparation(self) -> ProcessSpec:
        options = {
            "data_dir": str(self._data.root),
            "driver": self._driver,
            "nats_port": self._port,
            "supervisor_pid": os.getpid(),
        }
        return self._spec("prepare", [sys.executable, "-m", "torpor.embedded.preparing", json.dumps(options)], {})

    def arrange(self, run: Run, told: dict[str, Any]) -> tuple[ProcessSpec, list[ProcessSpec]]:
        """The server and the services, once the preparation has said what they need."""
        for name in ("nats_url", "driver", "log_dsn", "client_seed_file", "operator_seed_file", "admin_seed_file"):
            setattr(run, name, told[name])
        server = self._spec("nats-server", [str(self._binary), "--config", told["nats_config"]], {})
        services = [
            self._spec(name, [sys.executable, "-m", module], env) for name, (module, env) in told["services"].items()
        ]
        return server, services

    def leave(self, run: Run, timeout_s: float) -> ProcessSpec | None:
        """What puts the sessions to sleep; None where machines are files, which need nobody to look after them."""
        if run.driver == "simulated":
            return None
        options = {"data_dir": str(self._data.root), "timeout_s": timeout_s}
        return self._spec("leave", [sys.executable, "-m", "torpor.embedded.leaving", json.dumps(options)], {})

    def _spec(self, name: str, argv: list[str], env: dict[str, str]) -> ProcessSpec:
        # Our own settings come from the data directory alone: what the user's shell has set is for clients.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORPOR_")}
        passed = {key: value for key, value in os.environ.items() if key.startswith(_PASSED)}
        return ProcessSpec(
            name=name,
            argv=argv,
            env={**inherited, **passed, **env},
            cwd=self._data.root,
            log=self._data.logs / f"{name}.log",
        )


_PASSED: Final = (
    "TORPOR_BILLING_",
    "TORPOR_CACHE_DIR",
    "TORPOR_CHUNKS_",
    "TORPOR_IMAGES_DIR",
    "TORPOR_REAPER_",
    "TORPOR_SCHEDULER_",
    "TORPOR_SNAPSHOT_STORE_",
    "TORPOR_VM_HOST_",
)
"""Settings of single services, of the chunk store and of guest images, which the operator may set for the whole."""

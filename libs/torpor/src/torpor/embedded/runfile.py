"""The run file: what of the whole runs where; written whole or not at all, and removed when the whole stops."""

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from torpor.embedded.layout import DataDir
from torpor.embedded.process_table import boot_id, is_running

FORMAT = 1


@dataclass
class RunningProcess:
    """One process of the whole; with `started_ticks` a pid names one process for ever."""

    name: str
    pid: int
    started_ticks: int
    restarts: int = 0


@dataclass
class Run:
    """One start of the whole."""

    supervisor: RunningProcess
    boot_id: str = field(default_factory=boot_id)
    nats_url: str = ""
    driver: str = ""
    tenant: str = "default"
    log_dsn: str = ""
    client_seed_file: str = ""
    operator_seed_file: str = ""
    admin_seed_file: str = ""
    version: str = ""
    ready: bool = False
    processes: list[RunningProcess] = field(default_factory=list)
    format: int = FORMAT

    def supervisor_runs(self) -> bool:
        """Whether this whole is up now, and not left over from a killed one."""
        return self.boot_id == boot_id() and is_running(self.supervisor.pid, self.supervisor.started_ticks)


def write(data: DataDir, run: Run) -> None:
    """Replace the run file; readers see the old one or the new one."""
    fresh = data.run_file.with_suffix(".json.new")
    fresh.write_text(json.dumps(asdict(run), indent=1) + "\n", encoding="utf-8")
    fresh.chmod(0o600)
    os.replace(fresh, data.run_file)  # noqa: PTH105  (says what it is: an atomic rename)


def read(data: DataDir) -> Run | None:
    """The run file's content; None when there is none, or none of ours."""
    try:
        raw: dict[str, Any] = json.loads(data.run_file.read_text(encoding="utf-8"))
        if raw.get("format") != FORMAT:
            return None
        raw["supervisor"] = RunningProcess(**raw["supervisor"])
        raw["processes"] = [RunningProcess(**entry) for entry in raw["processes"]]
        return Run(**raw)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def remove(data: DataDir) -> None:
    """The whole is down."""
    data.run_file.unlink(missing_ok=True)

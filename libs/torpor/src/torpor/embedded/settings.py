"""Which services the whole has, and what each is told by its environment."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote

from torpor.embedded.layout import DataDir

MODULES: Final = {
    "scheduler": "torpor_scheduler",
    "vm-host": "torpor_vm_host",
    "snapshot-store": "torpor_snapshot_store",
    "billing": "torpor_billing",
    "reaper": "torpor_reaper",
    "log-relay": "torpor_log_relay",
}
"""Service -> the module that runs it."""


def sqlite_dsn(path: Path) -> str:
    """The DSN of an SQLite file at an absolute path, whatever characters are in it."""
    return f"sqlite:///{quote(str(path))}"


def views_file(data: DataDir, service: str) -> Path:
    """Where a service keeps its views."""
    return data.views / f"views-{service}.db"


def services_of(
    data: DataDir, nats_url: str, seeds: Mapping[str, Path], driver: str
) -> dict[str, tuple[str, dict[str, str]]]:
    """Service -> its module and its environment; keys by the user's name."""
    # It has no second host: the store may have its templates late, so that they slow down no first steps.
    keep = os.environ.get("TORPOR_VM_HOST_KEEP_TEMPLATES", "background")
    own = {"vm-host": {"TORPOR_VM_HOST_DRIVER": driver, "TORPOR_VM_HOST_KEEP_TEMPLATES": keep}}
    return {
        name: (
            module,
            {
                "TORPOR_DATA_DIR": str(data.root),
                "TORPOR_NATS_URL": nats_url,
                "TORPOR_NKEY_SEED_FILE": str(seeds[name]),
                "TORPOR_LOG_DSN": sqlite_dsn(data.log_database),
                "TORPOR_VIEWS_DSN": sqlite_dsn(views_file(data, name)),
                **own.get(name, {}),
            },
        )
        for name, module in MODULES.items()
    }

"""Which services the whole has, and what each is told by its environment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

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


def services_of(
    data: DataDir, nats_url: str, seeds: Mapping[str, Path], driver: str
) -> dict[str, tuple[str, dict[str, str]]]:
    """Service -> its module and its environment; keys by the user's name."""
    own = {"vm-host": {"TORPOR_VM_HOST_DRIVER": driver}}
    return {
        name: (
            module,
            {
                "TORPOR_DATA_DIR": str(data.root),
                "TORPOR_CHUNKS_DIRECTORY": str(data.chunks),
                "TORPOR_NATS_URL": nats_url,
                "TORPOR_NKEY_SEED_FILE": str(seeds[name]),
                "TORPOR_LOG_DSN": f"sqlite:///{data.log_database}",
                "TORPOR_VIEWS_DSN": f"sqlite:///{data.views / f'views-{name}.db'}",
                **own.get(name, {}),
            },
        )
        for name, module in MODULES.items()
    }

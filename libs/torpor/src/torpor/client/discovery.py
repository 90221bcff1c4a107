"""Where the whole is that a client talks to, and as whom: given, from the environment, or from a data directory."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torpor.embedded import runfile
from torpor.embedded.layout import DataDir
from torpor.errors import Unavailable

Role = Literal["tenant", "operator"]
"""`tenant` sees its own sessions; `operator` acts for the tenant `system`: hosts, and the whole's health."""


@dataclass(frozen=True)
class Endpoint:
    """How to reach a whole: `seed_file` holds the nkey seed of a user of `tenant`."""

    nats_url: str
    seed_file: Path | None
    tenant: str


def find(
    data_dir: Path | str | None = None,
    nats_url: str | None = None,
    nkey_seed_file: Path | str | None = None,
    tenant: str | None = None,
    role: Role = "tenant",
) -> Endpoint:
    """The endpoint to use. A URL (given, or `TORPOR_NATS_URL`) wins over the data directory, unless that is given."""
    url = nats_url or (None if data_dir else os.environ.get("TORPOR_NATS_URL"))
    if url:
        seed = nkey_seed_file or os.environ.get("TORPOR_NKEY_SEED_FILE")
        named = tenant or os.environ.get("TORPOR_TENANT") or ("system" if role == "operator" else "default")
        return Endpoint(url, Path(seed) if seed else None, named)
    data = DataDir.choose(data_dir)
    run = runfile.read(data)
    if run is None or not run.supervisor_runs():
        raise Unavailable(
            f"no Torpor runs on {data.root}",
            "start one with `torpor up`, name its directory with --data-dir, or set TORPOR_NATS_URL",
        )
    if not run.nats_url or not run.client_seed_file:
        raise Unavailable(f"the Torpor on {data.root} is still starting", "wait until `torpor up` says it is ready")
    if role == "operator":
        return Endpoint(run.nats_url, Path(run.operator_seed_file), "system")
    seed_file = Path(nkey_seed_file) if nkey_seed_file else Path(run.client_seed_file)
    return Endpoint(run.nats_url, seed_file, tenant or run.tenant)

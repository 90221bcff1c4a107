"""A supervisor over small scripts instead of nats-server and services: `whole_of_scripts.py DATA_DIR SCRIPTS_JSON`.

SCRIPTS_JSON names Python sources: `prepare`, `server`, `leave` if there is to be one, and each service. Run as a
process of its own, since a supervisor owns its process's signals.
"""

import json
import sys
from pathlib import Path
from typing import Any

from torpor.embedded.console import Console
from torpor.embedded.layout import DataDir
from torpor.embedded.lock import DataDirLock
from torpor.embedded.restarting import RestartRule
from torpor.embedded.runfile import Run
from torpor.embedded.supervised import ProcessSpec
from torpor.embedded.supervisor import Supervisor, supervisor_identity
from torpor.errors import CannotStart


def main() -> int:
    data = DataDir(Path(sys.argv[1]))
    scripts: dict[str, str] = json.loads(sys.argv[2])
    data.root.mkdir(parents=True, exist_ok=True)

    def spec(name: str) -> ProcessSpec:
        argv = [sys.executable, "-S", "-c", scripts[name]]
        return ProcessSpec(name=name, argv=argv, env={}, cwd=data.root, log=data.logs / f"{name}.log")

    def arrange(run: Run, _told: dict[str, Any]) -> tuple[ProcessSpec, list[ProcessSpec]]:
        run.nats_url = "nats://scripts"
        return spec("server"), [spec(name) for name in scripts if name not in {"prepare", "server", "leave"}]

    def leave(_run: Run, _timeout_s: float) -> ProcessSpec | None:
        return spec("leave") if "leave" in scripts else None

    console = Console(as_json=True)
    rule = RestartRule(first_s=0.05, longest_s=0.2, attempts_max=4, steady_s=5.0)
    try:
        with DataDirLock(data):
            return Supervisor(
                data,
                Run(supervisor=supervisor_identity()),
                console,
                preparation=spec("prepare"),
                arrange=arrange,
                leave=leave,
                rule=rule,
            ).run()
    except CannotStart as error:
        console.say("error", "", code=error.code, message=error.message, advice=error.advice)
        return 1


if __name__ == "__main__":
    sys.exit(main())

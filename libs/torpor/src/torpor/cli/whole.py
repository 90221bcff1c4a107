"""`torpor up`, `down` and `status`."""

import json
import os
import sys
from typing import Annotated, Final, Literal

from cyclopts import Parameter

from torpor.cli import printing
from torpor.cli.options import DEFAULTS, Common
from torpor.embedded import runfile
from torpor.embedded.process_table import end, is_running, wait_gone
from torpor.embedded.warnings import recent_warnings
from torpor.errors import CannotStart, Unavailable

DOWN_TIMEOUT_S: Final = 120.0
"""Sessions fall asleep first (`supervisor.LEAVE_S`), and then each process may take its time."""

Driver = Literal["auto", "simulated", "qemu", "firecracker"]


def up(
    *,
    driver: Annotated[Driver, Parameter(help="What makes the machines; auto takes the best one that boots.")] = "auto",
    nats_port: Annotated[int, Parameter(help="The port of nats-server; 0 takes a free one.")] = 0,
    common: Common = DEFAULTS,
) -> int:
    """Start the whole here, and keep it running until Ctrl-C."""
    options = {
        "data_dir": str(common.data.root),
        "driver": driver,
        "nats_port": nats_port,
        "json": common.json,
    }
    # The supervisor stays for days: it starts afresh without this command's libraries in its memory.
    os.execv(sys.executable, [sys.executable, "-m", "torpor.embedded", json.dumps(options)])  # noqa: S606


def down(*, common: Common = DEFAULTS) -> int:
    """Stop the whole of a data directory, and wait until no process of it is left."""
    run = runfile.read(common.data)
    if run is None or not run.supervisor_runs():
        _say(common, stopped=False, text=f"no Torpor runs on {common.data.root}")
        return 0
    supervisor = run.supervisor
    if not end(supervisor.pid, supervisor.started_ticks, DOWN_TIMEOUT_S):
        raise CannotStart(
            "not-stopped", f"the supervisor (pid {supervisor.pid}) does not end", f"kill -9 {supervisor.pid}"
        )
    # Killed rather than stopped, it took its processes with it; a moment passes until they are gone.
    left = [p for p in run.processes if not wait_gone(p.pid, p.started_ticks, DOWN_TIMEOUT_S)]
    if left:
        raise CannotStart(
            "not-stopped", f"still running: {', '.join(p.name for p in left)}", "see `torpor status`, or kill them"
        )
    _say(common, stopped=True, text=f"stopped the Torpor on {common.data.root}; the sessions stay")
    return 0


def _say(common: Common, *, stopped: bool, text: str) -> None:
    if common.json:
        printing.emit({"stopped": stopped, "data_dir": str(common.data.root)})
    else:
        printing.say(text)


def status(*, common: Common = DEFAULTS) -> int:
    """Show what runs where, and whether it answers; exit code 3 unless everything does."""
    from torpor.embedded.answering import answering  # noqa: PLC0415  (needs NATS)

    run = runfile.read(common.data)
    if run is None or not run.supervisor_runs():
        raise Unavailable(
            f"no Torpor runs on {common.data.root}", "start one with `torpor up`, or name its directory with --data-dir"
        )
    answers, warnings = answering(run), recent_warnings(common.data)
    rows = []
    for process in run.processes:
        lives = is_running(process.pid, process.started_ticks)
        state = "running" if answers.get(process.name, lives) else "running, does not answer" if lives else "ended"
        rows.append((process.name, state, process.pid, process.restarts, warnings.get(process.name)))
    sound = run.ready and all(row[1] == "running" for row in rows)
    if common.json:
        printing.emit(
            {
                "ready": sound,
                "data_dir": str(common.data.root),
                "nats_url": run.nats_url,
                "driver": run.driver,
                "supervisor": {"pid": run.supervisor.pid},
                "processes": [
                    {"name": name, "state": state, "pid": pid, "restarts": restarts, "warning": warning}
                    for name, state, pid, restarts, warning in rows
                ],
            }
        )
    else:
        printing.pairs(
            {
                "data": common.data.root,
                "nats": run.nats_url,
                "driver": run.driver,
                "supervisor": run.supervisor.pid,
            }
        )
        headings = ("process", "state", "pid", "restarts", "last warning (of the last minute)")
        printing.table(headings, rows, "nothing is started yet")
    return 0 if sound else 3

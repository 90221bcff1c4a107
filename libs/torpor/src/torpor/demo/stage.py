"""Where the story happens: an embedded whole of its own, started for it and stopped after it."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from torpor.demo.telling import Telling
from torpor.embedded import runfile
from torpor.embedded.layout import DataDir
from torpor.embedded.process_table import is_running, started_ticks
from torpor.embedded.runfile import RunningProcess
from torpor.errors import CannotStart

STOP_S: Final = 90.0
"""Sessions that run are put to sleep before the whole stops."""
LOOK_S: Final = 0.05


class Stage:
    """The whole that was started, as the operating system shows it."""

    def __init__(self, data: DataDir) -> None:
        self.data = data

    def process(self, name: str) -> RunningProcess:
        """A process of the whole as it runs now."""
        run = runfile.read(self.data)
        for found in run.processes if run is not None else ():
            if found.name == name:
                return found
        raise CannotStart("no-such-process", f"no {name} runs on {self.data.root}", f"see {self.data.logs}")

    def machine_pid(self, vm_id: str | None) -> int | None:
        """The process that is a session's machine; None when there is none."""
        if vm_id is None:
            return None
        for claim in (self.data.root / "vm-host").glob(f"*/vms/{vm_id}/process"):
            pid, _, _ = claim.read_text(encoding="utf-8", errors="replace").partition(" ")
            return int(pid) if pid.isdigit() and started_ticks(int(pid)) is not None else None
        return None

    def left(self) -> list[str]:
        """Processes of this whole, machines included, that the system still knows."""
        mark, ours = os.fsencode(self.data.root), _ancestors()
        found = []
        for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = cmdline.read_bytes()
            except OSError:
                continue
            if mark in words and int(cmdline.parent.name) not in ours:
                found.append(f"{cmdline.parent.name} {os.fsdecode(words.split(bytes(1))[0])}")
        return found


def _ancestors() -> set[int]:
    """This process and those that have started it, whose words may name the directory too."""
    pid, found = os.getpid(), set[int]()
    while pid:
        found.add(pid)
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        pid = int(stat.rpartition(")")[2].split()[1])
    return found


def memory_mib(pid: int) -> float:
    """The memory that is a process's own share, MiB (proportional set size)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


@asynccontextmanager
async def raised(data: DataDir, driver: str, telling: Telling, *, keep: bool) -> AsyncIterator[Stage]:
    """A whole that runs on this directory, until the block ends; with `keep` it goes on."""
    options = {"data_dir": str(data.root), "driver": driver, "nats_port": 0, "json": True}
    supervisor = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "torpor.embedded",
        json.dumps(options),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for us: we stop it in order
    )
    stays = False
    try:
        await _ready(supervisor, telling)
        yield Stage(data)
        stays = keep
    finally:
        if not stays:
            await _stopped(supervisor)


async def _ready(supervisor: asyncio.subprocess.Process, telling: Telling) -> None:
    """Wait until it is ready; raises `CannotStart` with what it says when it will not be."""
    error: dict[str, Any] = {}
    async for line in _lines(supervisor):
        match line:
            case {"event": "working", "doing": str() as doing}:
                telling.say(doing)
            case {"event": "error", "error": dict() as told}:
                error = told
            case {"event": "ready"}:
                return
            case _:
                pass
    raise CannotStart(
        str(error.get("code", "not-started")),
        str(error.get("message", "the whole ended before it was ready")),
        str(error.get("advice", "see its logs/")),
    )


async def _lines(supervisor: asyncio.subprocess.Process) -> AsyncIterator[Any]:
    assert supervisor.stdout is not None
    while line := await supervisor.stdout.readline():
        yield json.loads(line)


async def _stopped(supervisor: asyncio.subprocess.Process) -> None:
    """Stop the whole in order, whatever becomes of us meanwhile; the last resort takes all of it."""
    if supervisor.returncode is not None:
        return
    supervisor.send_signal(signal.SIGTERM)
    ending = asyncio.ensure_future(supervisor.communicate())
    try:
        await asyncio.wait_for(asyncio.shield(ending), STOP_S)
    except BaseException:
        if supervisor.returncode is None:
            supervisor.kill()
        await ending
        raise


async def until_gone(process: RunningProcess, limit_s: float) -> bool:
    """Wait until a process is gone, looking often."""
    for _ in range(int(limit_s / LOOK_S)):
        if not is_running(process.pid, process.started_ticks):
            return True
        await asyncio.sleep(LOOK_S)
    return False

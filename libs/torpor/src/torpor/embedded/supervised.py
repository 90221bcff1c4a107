"""One process of the whole: started, watched, ended."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torpor.embedded.child import spawn
from torpor.embedded.process_table import started_ticks
from torpor.embedded.restarting import RestartRule, RestartState
from torpor.embedded.runfile import RunningProcess


@dataclass(frozen=True)
class ProcessSpec:
    """How to start a process of the whole."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    log: Path


@dataclass
class Supervised:
    """A process that is to run, and whether it does."""

    spec: ProcessSpec
    rule: RestartRule
    state: RestartState = field(default_factory=RestartState)
    restarts: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _ticks: int = 0
    _since_s: float = 0.0

    def start(self) -> None:
        """Start it now; OSError when the system cannot (no memory, no processes left)."""
        process = spawn(self.spec.argv, env=self.spec.env, cwd=self.spec.cwd, log=self.spec.log)
        self._process, self._since_s = process, time.monotonic()
        self._ticks = started_ticks(process.pid) or 0

    @property
    def running(self) -> RunningProcess | None:
        """Its identity while it runs."""
        if self._process is None:
            return None
        return RunningProcess(self.spec.name, self._process.pid, self._ticks, self.restarts)

    @property
    def ran_s(self) -> float:
        """How long the present process has been running, seconds."""
        return time.monotonic() - self._since_s

    def ended(self) -> int | None:
        """The exit code (negative: the signal) if the process has ended since last asked; reaps it."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is not None:
            self._sweep()
            self._process = None
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it; its whole group when it is to be killed."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        if number == signal.SIGKILL:
            self._sweep()
        else:
            process.send_signal(number)

    def _sweep(self) -> None:
        # What it started in its session goes with it; a machine that must outlive its host has a session of its own.
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

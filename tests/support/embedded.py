"""The embedded whole as a user starts it, and the `torpor` command as a user calls it: subprocesses, nothing else."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torpor.embedded import runfile
from torpor.embedded.layout import DataDir
from torpor.embedded.process_table import is_running, wait_gone
from torpor.embedded.runfile import Run, RunningProcess

TORPOR: Final = Path(sys.executable).parent / "torpor"
READY_S_MAX: Final = 60.0
COMMAND_S_MAX: Final = 90.0


class RefusedError(AssertionError):
    """The command refused, where the test wanted an answer."""


def torpor(data_dir: Path, *arguments: str, stdin: str = "", env: Mapping[str, str] | None = None) -> Any:
    """Call the command with `--data-dir`; what it exited with, and its output."""
    if "--" in arguments:
        at = arguments.index("--")
        line = [*arguments[:at], "--data-dir", str(data_dir), *arguments[at:]]
    else:
        line = [*arguments, "--data-dir", str(data_dir)]
    return subprocess.run(
        [TORPOR, *line],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=COMMAND_S_MAX,
        check=False,
        env={**clean_environment(), **(env or {})},
    )


def clean_environment() -> dict[str, str]:
    """This process's environment without settings of Torpor."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TORPOR_")}


class EmbeddedWhole:
    """`torpor up` on a data directory; its machines are simulated unless another driver is named."""

    def __init__(
        self, root: Path, *options: str, driver: str = "simulated", env: Mapping[str, str] | None = None
    ) -> None:
        self.data = DataDir(root)
        self.said: deque[dict[str, Any]] = deque(maxlen=1000)
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [TORPOR, "up", "--driver", driver, "--json", "--data-dir", str(root), *options],
            stdout=subprocess.PIPE,
            text=True,
            env={**clean_environment(), **(env or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.said.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def until(self, event: str, **details: Any) -> dict[str, Any]:
        """Wait until it says this."""

        def found() -> dict[str, Any] | None:
            for said in self.said:
                if said["event"] == event and all(said.get(name) == value for name, value in details.items()):
                    return said
            return None

        with self._changed:
            self._changed.wait_for(lambda: found() or not self._reader.is_alive(), READY_S_MAX)
            said = found()
        assert said is not None, f"it never said {event} {details}, but {list(self.said)}; logs in {self.data.logs}"
        return said

    def forget(self) -> None:
        """Forget what it has said so far."""
        with self._changed:
            self.said.clear()

    @property
    def run(self) -> Run:
        """The run file."""
        run = runfile.read(self.data)
        assert run is not None
        return run

    def process_named(self, name: str) -> RunningProcess:
        """A process of the whole by its name; waits while it is being started again."""
        give_up_at = time.monotonic() + READY_S_MAX
        while time.monotonic() < give_up_at:
            for process in self.run.processes:
                if process.name == name and is_running(process.pid, process.started_ticks):
                    return process
            with self._changed:
                self._changed.wait(0.1)
        raise AssertionError(f"{name} does not run")

    def call(self, *arguments: str, **options: Any) -> Any:
        """Call the command with `--json`; its answer, when it was done."""
        at = arguments.index("--") if "--" in arguments else len(arguments)
        done = torpor(self.data.root, *arguments[:at], "--json", *arguments[at:], **options)
        if done.returncode != 0:
            raise RefusedError(
                f"torpor {' '.join(arguments)} exited with {done.returncode}: {done.stdout}{done.stderr}"
            )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return lines[0] if len(lines) == 1 else lines

    def refused(self, *arguments: str) -> dict[str, Any]:
        """Call the command with `--json`; its error."""
        at = arguments.index("--") if "--" in arguments else len(arguments)
        done = torpor(self.data.root, *arguments[:at], "--json", *arguments[at:])
        assert done.returncode != 0, done.stdout
        assert "Traceback" not in done.stderr, done.stderr
        error: dict[str, Any] = json.loads(done.stdout)["error"]
        return {**error, "exit_code": done.returncode}

    def kill(self) -> None:
        """kill -9 of the supervisor and, with it, of everything."""
        processes = self.run.processes
        self.process.kill()
        self.process.wait(READY_S_MAX)
        assert all(wait_gone(process.pid, process.started_ticks, 10) for process in processes)

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Stop it as Ctrl-C does; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(READY_S_MAX)

    def close(self) -> None:
        """End it whatever its state."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

"""Runs the programs that build an image; none of them, and no mount of theirs, outlives the build that started it."""

import os
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from torpor_vm_host.images.failures import SAID_MAX, failed

STEP_S_MAX: Final = 1800
TOLD: Final = ("running apt-get update", "downloading", "extracting", "installing")
"""How the lines of mmdebstrap begin that say how far it is."""
KEPT_MAX: Final = 200

Progress = Callable[[str], None]


class StepFailed(Exception):  # noqa: N818  (an answer, as the refusals of the contracts are)
    """A program that is followed failed; `said` are its last lines."""

    def __init__(self, said: Sequence[str]) -> None:
        super().__init__("\n".join(said))
        self.said = said


def run(step: str, *command: str, cwd: Path | None = None) -> str:
    """Run one step of a build; raises `Rejected("image-build-failed")` with what it said."""
    try:
        done = subprocess.run(  # noqa: S603
            command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=STEP_S_MAX,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise failed(step, f"it took longer than {STEP_S_MAX} s") from error
    except FileNotFoundError as error:
        raise failed(step, str(error)) from error
    if done.returncode != 0:
        raise failed(step, "\n".join(done.stderr.strip().splitlines()[-SAID_MAX:]))
    return done.stdout


def follow(command: Sequence[str], told: Progress, env: Mapping[str, str]) -> None:
    """Run mmdebstrap, handing on what it says of its steps; raises `StepFailed` with its last words."""
    process = subprocess.Popen(  # noqa: S603
        [*_alone(), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
        env={**os.environ, **env},
    )
    assert process.stdout is not None
    last: deque[str] = deque(maxlen=KEPT_MAX)
    limit = threading.Timer(STEP_S_MAX, process.kill)
    limit.daemon = True
    limit.start()
    try:
        with process.stdout as lines:
            for line in lines:
                last.append(line.rstrip())
                step = line.removeprefix("I: ").rstrip(". \n")
                if step.startswith(TOLD):
                    told(step)
        code = process.wait()
    finally:
        limit.cancel()
        process.kill()  # of no effect on one that has ended; one that was interrupted leaves nothing behind
        process.wait()
    if code != 0:
        raise StepFailed([*last])


def _alone() -> list[str]:
    """What dies with us, takes all its children along, and has mounts that nobody else sees."""
    dying = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    if os.geteuid() != 0:
        return dying  # mmdebstrap makes itself name spaces of its own
    return [*dying, "unshare", "--mount", "--pid", "--fork", "--kill-child=KILL"]

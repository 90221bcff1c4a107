"""Starts one process of the whole, such that it cannot outlive its supervisor."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from torpor.embedded.log_files import open_log

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def _die_with(supervisor_pid: int) -> None:
    # SIGKILL, not SIGTERM: a killed supervisor takes the whole along as a power failure would, which is the case that
    # every service is built to come back from; a half-orderly end without a supervisor is one nobody waits for.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor_pid:
        os._exit(1)  # the supervisor died between fork and prctl


def spawn(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path | None, pipe: bool = False
) -> subprocess.Popen[bytes]:
    """Start `argv` in a session of its own (a terminal's Ctrl-C reaches the supervisor alone).

    Output goes to the end of `log`; with `pipe`, standard output comes to the caller instead.
    Must be called from the main thread: the death signal is tied to the thread that forks.
    """
    supervisor_pid = os.getpid()
    output = open_log(log) if log is not None else subprocess.DEVNULL
    try:
        return subprocess.Popen(  # noqa: S603  (our own argv, no shell)
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipe else output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: _die_with(supervisor_pid),  # noqa: PLW1509  (one thread only)
        )
    finally:
        if log is not None:
            os.close(output)

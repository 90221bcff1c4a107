"""Starts a machine's page-fault handler, finds it again, and notices its end."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from torpor_vm_host.adapters.firecracker import faults
from torpor_vm_host.adapters.firecracker.jail import FAULTS_SOCKET, Jail
from torpor_vm_host.adapters.firecracker.process import Recorded, last_words
from torpor_vm_host.adapters.qemu.memory import HEADER, read_header
from torpor_vm_host.adapters.qemu.wire import listening_at
from torpor_vm_host.ports import DriverError

RECORD: Final = "faults.json"
OUTPUT: Final = "faults.log"
START_S_MAX: Final = 20.0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler serves: the descriptor of the base memory, and a page file over it or None."""

    base: int
    pages: Path | None


def start_handler(directory: Path, jail: Jail, memory: Memory) -> Recorded:
    """Start the handler; it listens in the jail when this returns. Raises `DriverError("faults-failed")`."""
    socket = jail.root / FAULTS_SOCKET
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(listening_at(socket))
        os.chown(socket, jail.owner, jail.owner)
        socket.chmod(0o600)
        keep = [listening.fileno(), memory.base]
        options = ["--socket", str(listening.fileno()), "--base", str(memory.base), "--user", str(jail.owner)]
        if memory.pages is not None:
            count = read_header(memory.pages).pages
            pages = stack.enter_context(memory.pages.open("rb"))
            keep.append(pages.fileno())
            options += ["--pages", str(pages.fileno()), "--count", str(count), "--numbers-at", str(HEADER.size)]
        try:
            started = subprocess.run(  # noqa: S603
                [sys.executable, "-I", "-S", faults.__file__, *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context((directory / OUTPUT).open("wb")),
                pass_fds=keep,
                start_new_session=True,
                cwd="/",
                timeout=START_S_MAX,
                check=True,
            )
            pid = int(started.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            detail = f"no page-fault handler: {error}; {last_words(directory / OUTPUT)}"
            raise DriverError("faults-failed", detail, retryable=True) from error
    return Recorded.note(pid, directory / RECORD)

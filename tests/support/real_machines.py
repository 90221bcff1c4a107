"""Real machines of an embedded whole, seen from outside: their processes, their limits, and what is left of them."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.support.embedded import EmbeddedWhole
from tests.support.qemu import need_qemu
from torpor.embedded.process_table import wait_gone
from torpor_vm_host.adapters.qemu.confining import CLAIM, Claim, read_claim
from torpor_vm_host.adapters.qemu.process import recorded_pid, start_ticks

WAIT_S: Final = 20.0
POLL_S: Final = 0.05


def eventually(holds: Callable[[], Any], what: str, within_s: float = WAIT_S) -> Any:
    """Wait until something is so; what it answered."""
    give_up_at, never = time.monotonic() + within_s, threading.Event()
    while time.monotonic() < give_up_at:
        found = holds()
        if found:
            return found
        never.wait(POLL_S)  # what is waited for happens in other processes, which tell nobody
    raise AssertionError(f"{what}: not within {within_s} s")


class RealWhole(EmbeddedWhole):
    """A whole whose sessions run on QEMU."""

    def __init__(self, root: Path, **keywords: Any) -> None:
        need_qemu()
        super().__init__(root, driver="qemu", **keywords)

    @property
    def host(self) -> Path:
        """The host's directory."""
        return self.data.root / "vm-host" / "host-local"

    def machines(self) -> dict[int, Claim]:
        """The processes of sessions' machines that run now, and what they claim."""
        return _running(self.host / "vms")

    def slots(self) -> dict[int, Claim]:
        """The processes of machines that wait for somebody."""
        return _running(self.host / "slots")

    def the_machine(self) -> int:
        """The process of the one machine there is."""
        eventually(lambda: len(self.machines()) == 1, "one machine runs")
        return next(iter(self.machines()))

    def run_in(self, session: str, *argv: str) -> str:
        """What a program says that ends well."""
        result = self.call("session", "exec", session, "--", *argv)
        assert (result["outcome"], result["exit_code"]) == ("exited", 0), result
        return str(result["stdout"])


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Whether a process ends in time."""
    ticks = start_ticks(pid)
    return ticks is None or wait_gone(pid, ticks, within_s)


def _running(place: Path) -> dict[int, Claim]:
    found: dict[int, Claim] = {}
    for path in place.glob(f"*/{CLAIM}"):
        claim, pid = read_claim(path.parent), recorded_pid(path.parent)
        if claim is not None and pid is not None:
            found[pid] = claim
    return found

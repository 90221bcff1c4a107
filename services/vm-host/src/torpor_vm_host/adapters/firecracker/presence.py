"""What can be seen of a machine from outside: its processes, what is written about it, and what Firecracker says."""

import contextlib
from pathlib import Path
from typing import Final, Literal

from torpor_contracts.ids import VmId
from torpor_vm_host.adapters.firecracker import paging
from torpor_vm_host.adapters.firecracker.api import Api
from torpor_vm_host.adapters.firecracker.jail import API_SOCKET, Jail
from torpor_vm_host.adapters.firecracker.machine import READY, read_kept
from torpor_vm_host.adapters.firecracker.process import RECORD, Recorded
from torpor_vm_host.ports import DriverError, PresentVm

ASK_S_MAX: Final = 2.0

State = Literal["starting", "running", "paused", "dead"]


async def present(jail: Jail) -> PresentVm:
    """The machine of this jail, as `ports.Driver.machines` lists it."""
    directory = jail.directory
    kept = read_kept(directory)
    state: State = "dead"
    detail = "nothing can be read about it" if kept is None else ""
    if Recorded.find(directory / RECORD) is not None and kept is not None:
        if stalled(directory):
            detail = "its page-fault handler is gone"
        else:
            state = await _running_or_paused(jail) if (directory / READY).exists() else "starting"
    session_id, incarnation = (None, None) if kept is None else (kept.session_id, kept.incarnation)
    return PresentVm(
        vm_id=VmId(directory.name), session_id=session_id, incarnation=incarnation, state=state, detail=detail
    )


def stalled(directory: Path) -> bool:
    """Whether the machine needed a page-fault handler that is gone: it hangs, and is as good as dead."""
    return (directory / paging.RECORD).exists() and Recorded.find(directory / paging.RECORD) is None


async def _running_or_paused(jail: Jail) -> State:
    """What Firecracker itself says; one that is busy (with a snapshot, say) is taken to run."""
    try:
        with contextlib.closing(Api(jail.root / API_SOCKET)) as api:
            found = await api.describe(timeout_s=ASK_S_MAX)
    except OSError:
        return "dead"
    except DriverError as error:
        return "running" if error.retryable else "dead"
    return "paused" if found.state == "Paused" else "running"

"""Which machine a session has now, as its own stream says: no other may begin anything in its name."""

from typing import Any, Final

import msgspec

from torpor_contracts.errors import Rejected
from torpor_contracts.ids import VmId
from torpor_contracts.session import (
    SessionFailed,
    SessionLost,
    SessionRecovered,
    SessionStartFailed,
    SessionSuspended,
    SessionTerminated,
    TerminateRequested,
    VmStartRequested,
)
from torpor_contracts.session_branches import RollbackRequested
from torpor_vm_host.domain.observations import Place


class Tenure(msgspec.Struct, frozen=True, kw_only=True):
    """`vm_id` is the session's machine, None while it has none; `said` tells that from a stream that says nothing.

    `ending`: the machine is to end, with its session or because that goes back. `before`: the machines it had last,
    newest first.
    """

    said: bool = False
    vm_id: VmId | None = None
    ending: bool = False
    before: tuple[VmId, ...] = ()

    def wants(self, vm_id: VmId) -> bool:
        """Whether the session would have this machine run on, as far as it has said anything."""
        return not self.said or (self.vm_id == vm_id and not self.ending)


UNSAID: Final = Tenure()

BEFORE_MAX: Final = 4
"""Earlier machines of a session in which a program is looked for before it is begun."""


def follow(tenure: Tenure, event: Any) -> Tenure:
    """The tenure after an event of the session; most of them do not change it."""
    had = tenure.vm_id
    before = tenure.before if had is None or had in tenure.before[:1] else (had, *tenure.before)[:BEFORE_MAX]
    match event:
        case VmStartRequested() | SessionRecovered():
            return Tenure(said=True, vm_id=event.vm_id, before=tuple(vm for vm in before if vm != event.vm_id))
        case SessionStartFailed() | SessionSuspended() | SessionLost() | SessionTerminated() | SessionFailed():
            return Tenure(said=True, vm_id=None, before=before)
        case TerminateRequested():
            return Tenure(said=True, vm_id=event.vm_id, ending=True, before=tenure.before)
        case RollbackRequested() if event.vm_id is not None:
            return Tenure(said=True, vm_id=event.vm_id, ending=True, before=tenure.before)
        case _:
            return tenure


def check(tenure: Tenure, place: Place) -> None:
    """Refuse to begin something in a machine that its session has given up or replaced."""
    if not tenure.wants(place.vm_id):
        now = "it is ending" if tenure.ending else f"it has {tenure.vm_id or 'none'} now"
        raise Rejected(
            "stale-incarnation",
            f"nothing more is begun in {place.vm_id} for its session: {now}",
            "act on the machine that the session names",
        )

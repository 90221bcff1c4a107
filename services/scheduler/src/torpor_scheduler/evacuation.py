"""Tells the sessions on a host that it is lost, or that it is to be emptied.

Told when that happens, and again while a view still shows a session there: a session that was just being placed is
not in the view when the host goes.
"""

from contextlib import aclosing
from datetime import datetime

from torpor_contracts.ids import HostId, TenantId
from torpor_contracts.session_reports import ReportHostDraining, ReportHostLost
from torpor_eventlog.views_port import ViewStore
from torpor_scheduler.domain.session import Phase
from torpor_scheduler.paging import pages
from torpor_scheduler.projections import SESSIONS, SessionRow
from torpor_scheduler.sending import Sender


class Evacuation:
    """Reports to every session whose machine is on a host. `round_` tells repeats of the same report apart."""

    def __init__(self, views: ViewStore, sender: Sender) -> None:
        self._views = views
        self._sender = sender

    async def host_lost(self, host_id: HostId, last_seen_at: datetime, position: int, round_: int = 0) -> None:
        """The host was declared lost at `position`."""
        async with aclosing(pages(self._views, SESSIONS, {"host_id": host_id})) as rows:
            async for row in rows:
                report = ReportHostLost(
                    host_id=host_id,
                    incarnation=_incarnation(row),
                    last_seen_at=last_seen_at,
                    position=position,
                )
                await self._tell(row, report, f"host-lost-{position}-{row.step_position}-{round_}")

    async def host_draining(self, host_id: HostId, position: int, round_: int = 0) -> None:
        """The host was asked at `position` to be emptied; only machines that run can be suspended."""
        where = {"host_id": host_id, "phase": str(Phase.RUNNING)}
        async with aclosing(pages(self._views, SESSIONS, where)) as rows:
            async for row in rows:
                report = ReportHostDraining(host_id=host_id, incarnation=_incarnation(row), position=position)
                await self._tell(row, report, f"host-draining-{position}-{row.step_position}-{round_}")

    async def _tell(self, row: SessionRow, report: ReportHostLost | ReportHostDraining, command_id: str) -> None:
        await self._sender.to_session(TenantId(row.tenant_id), row.session_id, report, command_id)


def _incarnation(row: SessionRow) -> int:
    machine = row.folded.machine
    return 0 if machine is None else machine.incarnation

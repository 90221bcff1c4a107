"""Compares what sessions expect of machines with what hosts observe, and makes good what got lost on the way.

It never decides: it sends a report or an order again, and the session decides under its epoch. Every wait it looks
after has a deadline of its own in the session, so its repeats have an end.
"""

from collections.abc import Mapping
from contextlib import aclosing
from datetime import datetime
from typing import Final

from torpor_contracts.host import VmObservation
from torpor_contracts.ids import TenantId, VmId
from torpor_contracts.session_reports import ReportVmStarted, ReportVmStopped
from torpor_contracts.vm import VmCheckpointed
from torpor_eventlog.port import Recorded
from torpor_messaging.service_ports import ServicePorts
from torpor_scheduler.domain.host import HostPhase
from torpor_scheduler.domain.session import Phase, unstarted
from torpor_scheduler.orders import Order, checkpoint_order, exec_orders, pending_order
from torpor_scheduler.paging import pages
from torpor_scheduler.projections import HOSTS, SESSIONS, HostRow, SessionRow, microseconds
from torpor_scheduler.reporting import ENDS, Reported, report_of, told_by
from torpor_scheduler.sending import Sender
from torpor_scheduler.spacing import Spacing
from torpor_scheduler.strays import Strays
from torpor_scheduler.watch import HostWatch, Inventory

OWED: Final = (Phase.STARTING, Phase.RESUMING, Phase.SUSPENDING, Phase.ROLLING_BACK, Phase.TERMINATING)
"""Phases in which a host owes the session a report."""

RUNS: Final = (Phase.RUNNING, Phase.SUSPENDING, Phase.ROLLING_BACK, Phase.TERMINATING)
"""Phases in which the session's machine was seen running."""


class Reconciler:
    """One pass looks at all that waits. `after_s` is how long a report may be on its way before it is missed."""

    def __init__(self, ports: ServicePorts, watch: HostWatch, sender: Sender, strays: Strays, after_s: float) -> None:
        self._log = ports.log
        self._views = ports.views
        self._clock = ports.clock
        self._watch = watch
        self._sender = sender
        self._strays = strays
        self._after_s = after_s
        self._spacing = Spacing(after_s)

    async def look(self) -> None:
        """One pass."""
        await self._ask_again()
        await self._follow_running()
        async with aclosing(pages(self._views, HOSTS, {"phase": str(HostPhase.UP)})) as rows:
            async for host in rows:
                await self._compare(host)

    async def _ask_again(self) -> None:
        """Orders that have had no effect for a while are sent again: the first one may never have arrived."""
        for phase in OWED:
            bound = ("step_us", self._before_us())
            async with aclosing(pages(self._views, SESSIONS, {"phase": str(phase)}, at_most=bound)) as rows:
                async for row in rows:
                    order = pending_order(row.folded)
                    number = self._due("order", row.session_id, row.step_position, row.step_us)
                    if order is not None and number is not None:
                        await self._order(row, order, f"again-{row.step_position}-{number}")

    async def _follow_running(self) -> None:
        """Programs and checkpoints whose reports are overdue: look into the machine's stream, or ask for them again."""
        async with aclosing(pages(self._views, SESSIONS, at_most=("runs_us", self._before_us()))) as rows:
            async for row in rows:
                number = self._due("programs", row.session_id, row.position, row.runs_us or 0)
                if number is not None:
                    await self._follow_machine_of(row, number)

    async def _follow_machine_of(self, row: SessionRow, number: int) -> None:
        session = row.folded
        if session.machine is None:
            return
        told = await told_by(self._log, session.machine.vm_id)
        in_flight = {program.exec_id for program in session.execs}
        known = set()
        waited_for, taken = session.checkpointing, False
        for recorded, event in told:
            exec_id = getattr(event, "exec_id", None)
            if exec_id in in_flight:
                known.add(exec_id)
                await self._report(row, event, recorded)
            elif waited_for is not None and getattr(event, "checkpoint_id", None) == waited_for.checkpoint_id:
                taken = taken or isinstance(event, VmCheckpointed)
                # An earlier try may have failed under the same id.
                if isinstance(event, VmCheckpointed) or recorded.position > row.step_position:
                    await self._report(row, event, recorded)
        versions = {program.version for program in unstarted(session) if program.exec_id not in known}
        for version, order in await exec_orders(self._log, session, versions):
            await self._order(row, order, f"again-{row.step_position}-{version}-{number}")
        wanted = checkpoint_order(session)
        if wanted is not None and not taken:
            await self._order(row, wanted, f"again-{row.step_position}-checkpoint-{number}")

    async def _compare(self, host: HostRow) -> None:
        """Compare a host's last two inventories with the sessions that are to be there."""
        seen = self._watch.inventories(host.folded.host_id, host.folded.boot_id)
        if seen is None:
            return
        latest, previous = seen
        ours: set[VmId] = set()
        async with aclosing(pages(self._views, SESSIONS, {"host_id": host.host_id})) as rows:
            async for row in rows:
                if row.folded.machine is not None:
                    ours.add(row.folded.machine.vm_id)
                await self._compare_session(row, host, latest, previous)
        for vm_id, observation in latest.vms.items():
            if vm_id not in ours:
                await self._strays.settle(host.folded.host_id, observation, latest, again=vm_id in previous.vms)

    async def _compare_session(self, row: SessionRow, host: HostRow, latest: Inventory, previous: Inventory) -> None:
        session, machine = row.folded, row.folded.machine
        since_us = max(row.step_us, host.step_us) + round(self._after_s * 1_000_000)
        if machine is None or microseconds(previous.received_at) < since_us:
            return
        if session.phase in (Phase.STARTING, Phase.RESUMING):
            if _runs(latest.vms, machine.vm_id):
                report = ReportVmStarted(
                    vm_id=machine.vm_id,
                    incarnation=machine.incarnation,
                    observed_at=latest.observed_at,
                    position=0,
                )
                await self._tell(row, report, f"seen-{row.step_position}-{_stamp(latest)}")
        elif session.phase in RUNS and machine.vm_id not in latest.vms and machine.vm_id not in previous.vms:
            await self._find_end(row, latest)

    async def _find_end(self, row: SessionRow, latest: Inventory) -> None:
        """A machine that is not there any more: its own stream says how it ended, or nobody knows."""
        machine = row.folded.machine
        if machine is None:
            return
        for recorded, event in reversed(await told_by(self._log, machine.vm_id)):
            if isinstance(event, ENDS):
                await self._report(row, event, recorded)
                return
        report = ReportVmStopped(
            vm_id=machine.vm_id,
            incarnation=machine.incarnation,
            expected=False,
            cause=f"host {machine.host_id} does not have it any more",
            observed_at=latest.observed_at,
            position=0,
        )
        await self._tell(row, report, f"missing-{row.step_position}-{_stamp(latest)}")

    async def _report(self, row: SessionRow, event: Reported, recorded: Recorded) -> None:
        _, report = report_of(event, recorded.position)
        command_id = f"found-{recorded.position}-{row.position}"
        await self._sender.to_session(TenantId(row.tenant_id), row.session_id, report, command_id, recorded)

    async def _tell(self, row: SessionRow, report: ReportVmStarted | ReportVmStopped, command_id: str) -> None:
        await self._sender.to_session(TenantId(row.tenant_id), row.session_id, report, command_id)

    async def _order(self, row: SessionRow, order: Order, command_id: str) -> None:
        await self._sender.order(TenantId(row.tenant_id), order, command_id)

    def _due(self, what: str, session_id: str, position: int, since_us: int) -> int | None:
        age_s = (microseconds(self._clock.now()) - since_us) / 1e6
        return self._spacing.due(f"{what}/{session_id}/{position}", age_s)

    def _before_us(self) -> int:
        return microseconds(self._clock.now()) - round(self._after_s * 1_000_000)


def _runs(vms: Mapping[VmId, VmObservation], vm_id: VmId) -> bool:
    observation = vms.get(vm_id)
    return observation is not None and observation.state == "running"


def _stamp(inventory: Inventory) -> int:
    moment: datetime = inventory.received_at
    return microseconds(moment)

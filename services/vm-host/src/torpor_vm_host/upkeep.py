"""Brings what the log says of this host's machines and what is really there together: at the start, and ever after.

It acts only where nobody else is at work on a machine, and records only what it has seen. What it cannot settle now
it tries again later, less and less often; nothing is forgotten, nothing is done twice. It never touches a machine that
the log does not know: the reaper decides about those.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from torpor_chunks.port import ChunkError
from torpor_contracts.errors import Rejected, Transient
from torpor_contracts.ids import VmId
from torpor_contracts.vm import VmClaimed, VmQuarantined
from torpor_eventlog.codec import decode_event
from torpor_eventlog.port import EventLog
from torpor_eventlog.views_port import ViewStore
from torpor_vm_host.domain import observations
from torpor_vm_host.domain.observations import Failure
from torpor_vm_host.domain.vm import Absent, Claimed, Ended, Quarantined, Running, Suspending, VmState, running_execs
from torpor_vm_host.hosting import Hosting
from torpor_vm_host.ledger import About
from torpor_vm_host.live import LiveCheckpoints
from torpor_vm_host.ports import DriverError, PresentVm
from torpor_vm_host.projections import VMS, Vms
from torpor_vm_host.starting import Starting, about_state
from torpor_vm_host.suspending import Suspends

READ_ROWS: Final = 1000
AT_ONCE_MAX: Final = 16
"""Machines that are settled side by side."""

PAUSE_S: Final = 1.0
PAUSE_S_MAX: Final = 60.0

_log: Final = logging.getLogger(__name__)


class Upkeep:
    """`claim_s_max`: how long a claim may wait for the command behind it before it is given up."""

    def __init__(
        self,
        hosting: Hosting,
        *,
        starting: Starting,
        suspends: Suspends,
        live: LiveCheckpoints,
        log: EventLog,
        views: ViewStore,
        claim_s_max: float,
    ) -> None:
        self._hosting = hosting
        self._starting = starting
        self._suspends = suspends
        self._live = live
        self._log = log
        self._views = views
        self._claim_s_max = claim_s_max
        self._claims_seen_s: dict[VmId, float] = {}
        self._tried: dict[VmId, tuple[int, float]] = {}
        self._adopted: set[VmId] = set()
        self._working: dict[VmId, asyncio.Task[None]] = {}
        self._at_once = asyncio.Semaphore(AT_ONCE_MAX)

    async def recover(self) -> None:
        """Learn from the log which machines may be here, and settle them; a broken-off suspend may take longer."""
        ledger = self._hosting.ledger
        for vm_id in await self._claimed_here():
            await ledger.state(vm_id)
        await self.look()
        quick = [task for vm_id, task in self._working.items() if not isinstance(ledger.known.get(vm_id), Suspending)]
        await asyncio.gather(*quick)

    async def look(self) -> None:
        """Set somebody to work on each machine that is not as the log says."""
        self._hosting.workers.check()
        try:
            present = {one.vm_id: one for one in await self._hosting.driver.machines()}
        except DriverError as error:
            _log.warning("the machines cannot be looked at: %s", error)
            return
        known = dict(self._hosting.ledger.known)
        self._forget_others(known)
        for vm_id, state in known.items():
            if self._is_due(vm_id) and not self._is_settled(state, present.get(vm_id)):
                self._working[vm_id] = self._hosting.workers.spawn(f"settle {vm_id}", self._settle(vm_id))

    async def _claimed_here(self) -> list[VmId]:
        """Machines that may be here: those of the view, and those that the log has beyond it."""
        host_id = self._hosting.host.host_id
        position = await self._views.prepare(Vms.name, Vms.tables)
        found: dict[VmId, None] = {}
        after: str | None = None
        async with self._views.reading() as rows:
            while page := await rows.find(VMS, {"host_id": host_id}, after_key=after, limit=READ_ROWS):
                found.update((row.vm_id, None) for row in page)
                after = page[-1].vm_id
        tags = {str(kind.__struct_config__.tag) for kind in (VmClaimed, VmQuarantined)}
        while rest := await self._log.read(position, READ_ROWS):
            for recorded in rest:
                if recorded.tag in tags and decode_event(recorded).host_id == host_id:
                    found[VmId(recorded.stream)] = None
            position = rest[-1].position
        return list(found)

    def _is_settled(self, state: VmState, present: PresentVm | None) -> bool:
        """Whether there is nothing to do about the machine, as far as can be told without reading anything."""
        match state:
            case Running(claim=claim) if self._live.working(claim.vm_id):
                return True
            case Running(claim=claim):
                runs = present is not None and present.state == "running"
                followed = self._hosting.programs.following(claim.vm_id)
                quiet = state.checkpoint is None and followed.issuperset(running_execs(state))
                return runs and claim.vm_id in self._adopted and quiet
            case Quarantined(claim=claim):
                # One that the log never heard of has nothing to let go of; the reaper sees that it is gone.
                return claim is None if present is None else present.state in {"paused", "dead"}
            case Claimed(claim=claim):
                now_s = self._hosting.clock.monotonic_s()
                runs = present is not None and present.state == "running"
                return not runs and now_s - self._claims_seen_s.setdefault(claim.vm_id, now_s) < self._claim_s_max
            case Absent() | Suspending() | Ended():
                return isinstance(state, Absent)

    async def _settle(self, vm_id: VmId) -> None:
        try:
            async with self._at_once, self._hosting.locks.holding(vm_id):
                state = await self._hosting.ledger.state(vm_id)
                present = {one.vm_id: one for one in await self._hosting.driver.machines()}.get(vm_id)
                about = about_state(state, "upkeep")
                if about is not None and not self._is_settled(state, present):
                    await self._bring_together(about, state, present)
        except (DriverError, ChunkError, Transient, Rejected) as error:
            self._put_off(vm_id, error)
        else:
            self._tried.pop(vm_id, None)
        finally:
            del self._working[vm_id]

    async def _bring_together(self, about: About, state: VmState, present: PresentVm | None) -> None:
        match state:
            case Claimed():
                await self._bring_claimed(about, state, present)
            case Running():
                await self._bring_running(about, state, present)
            case Suspending():
                await self._suspends.finish(about, state)
            case Quarantined() if present is not None:
                await self._hosting.driver.freeze(present.vm_id)
            case Quarantined():
                await self._found_gone(about, state, "it ended while it was frozen")
            case Ended():
                await self._bring_ended(about, state)
            case Absent():
                return

    async def _bring_claimed(self, about: About, state: Claimed, present: PresentVm | None) -> None:
        if present is not None and present.state == "running":
            await self._starting.take_over(about, state)
            self._adopted.add(state.claim.vm_id)
            return
        why = Failure("host-restarted", "the start was broken off and not asked for again", retryable=True)
        await self._starting.give_up(about, state, why)

    async def _bring_ended(self, about: About, state: Ended) -> None:
        if state.claim is None:
            return
        vm_id = state.claim.vm_id
        gone = await self._hosting.clearing.clear(vm_id, state.held)
        await self._hosting.ledger.observe(about, vm_id, lambda now, place: observations.released(now, place, gone))
        if len(gone) < len(state.held):
            raise Transient(f"{vm_id} holds something still")

    async def _bring_running(self, about: About, state: Running, present: PresentVm | None) -> None:
        vm_id, hosting = state.claim.vm_id, self._hosting
        if present is None or present.state == "dead":
            cause = "the machine ended by itself" if vm_id in self._adopted else "the machine is gone since a restart"
            if present is not None and present.detail:
                cause = f"{cause}: {present.detail}"
            await self._found_gone(about, state, cause)
            return
        if present.state != "running":
            # A suspend or a quarantine was broken off before anything of it was recorded.
            await hosting.driver.resume(vm_id)
        await self._starting.take_over(about, state)
        self._adopted.add(vm_id)
        self._live.go_on(about, state)

    async def _found_gone(self, about: About, state: Running | Quarantined, cause: str) -> None:
        claim, hosting = state.claim, self._hosting
        assert claim is not None, "what nobody claimed is settled once it is gone"
        await hosting.programs.detach(claim.vm_id)
        gone = await hosting.clearing.clear(claim.vm_id, state.held)
        # A stop that was broken off between its effect and its record is no surprise: the session had asked for it.
        wanted = await hosting.ledger.wanted(claim)
        await hosting.ledger.observe(
            about, claim.vm_id, lambda now, place: observations.found_gone(now, place, cause, gone, wanted=wanted)
        )

    def _is_due(self, vm_id: VmId) -> bool:
        if vm_id in self._working or self._hosting.locks.busy(vm_id):
            return False
        return self._hosting.clock.monotonic_s() >= self._tried.get(vm_id, (0, 0.0))[1]

    def _put_off(self, vm_id: VmId, error: Exception) -> None:
        tries = self._tried.get(vm_id, (0, 0.0))[0]
        pause_s = min(PAUSE_S * 2.0**tries, PAUSE_S_MAX)
        self._tried[vm_id] = (min(tries + 1, 16), self._hosting.clock.monotonic_s() + pause_s)
        _log.warning("%s is not settled, again in %g s: %s", vm_id, pause_s, error)

    def _forget_others(self, known: Mapping[VmId, VmState]) -> None:
        self._adopted.intersection_update(known)
        for kept in (self._claims_seen_s, self._tried):
            for vm_id in kept.keys() - known.keys():
                del kept[vm_id]

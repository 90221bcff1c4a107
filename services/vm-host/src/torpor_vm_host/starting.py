"""Starts machines: claim, acquire, look, record; a start that comes to nothing gives back what it took.

After a crash the claim says that something may be there: it is taken over if it runs, else ended and started anew
under the same claim.
"""

import logging
from datetime import datetime
from typing import Final

from torpor_chunks.port import ChunkError
from torpor_contracts.errors import Transient
from torpor_contracts.ids import VmId
from torpor_contracts.replies import Receipt
from torpor_contracts.session_reports import ContinuedExec
from torpor_contracts.vm import StartVm
from torpor_messaging.service import Incoming
from torpor_vm_host.checkpoints import NotDone, failure_of
from torpor_vm_host.domain import decisions, observations
from torpor_vm_host.domain.observations import Failure
from torpor_vm_host.domain.vm import Claim, Claimed, Running, VmState, claim_of
from torpor_vm_host.hosting import Hosting
from torpor_vm_host.ledger import About
from torpor_vm_host.ports import CheckpointFiles, DriverError, PresentVm, VmSpec

RESTORE: Final = "restore"
"""The subdirectory of a machine that holds the parts it was started from."""

_log: Final = logging.getLogger(__name__)


class Starting:
    """Handles `StartVm`, and takes over machines that an earlier process started."""

    def __init__(self, hosting: Hosting) -> None:
        self._driver = hosting.driver
        self._workspace = hosting.workspace
        self._checkpoints = hosting.checkpoints
        self._bases = hosting.bases
        self._clearing = hosting.clearing
        self._ledger = hosting.ledger
        self._programs = hosting.programs
        self._clock = hosting.clock
        self._host_id = hosting.host.host_id
        self._capacity = hosting.capacity

    async def start(self, incoming: Incoming, vm_id: VmId) -> Receipt | None:
        """Claim a machine and bring it up; the receipt is that of the claim, or of the failure that came before it."""
        command: StartVm = incoming.command
        state = await self._ledger.state(vm_id)
        decisions.check_tenant(state, incoming.tenant_id)
        claim = Claim(
            vm_id=vm_id,
            host_id=self._host_id,
            tenant_id=incoming.tenant_id,
            session_id=command.session_id,
            incarnation=command.incarnation,
            machine=command.machine,
            checkpoint_id=command.checkpoint_id,
        )
        resources = [self._workspace.resource(vm_id), *self._driver.resources(self._spec(claim))]
        room = self._ledger.reserve(vm_id, command.machine, self._capacity)
        try:
            receipt = await self._ledger.command_of(
                incoming,
                vm_id,
                command.session_id,
                lambda now, place: decisions.start(now, command, incoming.tenant_id, place, resources, room=room),
            )
            state = await self._ledger.state(vm_id)
        finally:
            self._ledger.settle_reservation(vm_id)
        if isinstance(state, Claimed) and state.claim.incarnation == command.incarnation:
            await self._bring_up(About.command(incoming), state, command.deadline_at)
        return receipt

    async def take_over(self, about: About, state: Claimed | Running) -> VmState:
        """Take charge of a machine that is there and runs; raises `DriverError` when its guest does not answer."""
        vm_id = state.claim.vm_id
        await self._driver.adopt(vm_id)
        return await self._seen_running(about, vm_id, 0)

    async def give_up(self, about: About, state: Claimed, failure: Failure) -> None:
        """End what a claim may have acquired, and record that the start came to nothing."""
        vm_id = state.claim.vm_id
        try:
            gone = await self._clearing.clear(vm_id, state.held)
        except DriverError as error:
            # The claim stays open on what may be there; upkeep goes on trying to let go of it.
            _log.warning("what %s has acquired could not be given back yet: %s", vm_id, error)
            gone = []
        await self._ledger.observe(
            about, vm_id, lambda now, place: observations.start_gave_up(now, place, failure, gone)
        )

    async def _bring_up(self, about: About, state: Claimed, deadline_at: datetime) -> None:
        vm_id = state.claim.vm_id
        began_s = self._clock.monotonic_s()
        try:
            if await self._taken_over(about, state):
                return
            await self._acquire(state.claim, deadline_at)
        except (DriverError, ChunkError, NotDone) as error:
            await self.give_up(about, state, failure_of(error))
            return
        start_ms = round(1000 * (self._clock.monotonic_s() - began_s))
        try:
            await self._seen_running(about, vm_id, start_ms)
        except DriverError as error:
            raise Transient(f"{vm_id} was started, but is not to be seen now: {error}") from error

    async def _taken_over(self, about: About, state: Claimed) -> bool:
        """Whether an earlier attempt under this claim had come to its end; what is left of any other is ended."""
        vm_id = state.claim.vm_id
        present = find(await self._driver.machines(), vm_id)
        if present is None:
            return False
        if present.state == "running":
            try:
                await self.take_over(about, state)
            except DriverError as error:
                _log.warning("%s runs but cannot be taken over, it is started anew: %s", vm_id, error)
            else:
                return True
        await self._driver.destroy(vm_id)
        return False

    async def _acquire(self, claim: Claim, deadline_at: datetime) -> None:
        late = decisions.deadline_failure(deadline_at, self._clock.now())
        if late is not None:
            raise NotDone(late)
        manifest = None
        if claim.checkpoint_id is not None:
            fingerprint = await self._driver.fingerprint()
            manifest = await self._checkpoints.manifest(claim.checkpoint_id, claim.tenant_id, fingerprint)
        await self._workspace.create(claim.vm_id)
        files: CheckpointFiles | None = None
        if manifest is not None and claim.checkpoint_id is not None:
            directory = await self._workspace.subdirectory(claim.vm_id, RESTORE)
            files = await self._checkpoints.fetch(claim.checkpoint_id, claim.tenant_id, manifest, directory)
            await self._bases.have(claim.vm_id, files)
        await self._driver.start(self._spec(claim), files)

    async def _seen_running(self, about: About, vm_id: VmId, start_ms: int) -> VmState:
        inherited = [
            ContinuedExec(exec_id=one.exec_id, remaining_s=one.remaining_s) for one in await self._driver.execs(vm_id)
        ]
        state = await self._ledger.observe(
            about, vm_id, lambda now, place: observations.started(now, place, start_ms, inherited)
        )
        if isinstance(state, Running):
            await self._programs.follow_all(about, state)
        return state

    def _spec(self, claim: Claim) -> VmSpec:
        return VmSpec(
            vm_id=claim.vm_id,
            tenant_id=claim.tenant_id,
            session_id=claim.session_id,
            incarnation=claim.incarnation,
            machine=claim.machine,
            directory=self._workspace.path(claim.vm_id),
        )


def find(present: list[PresentVm], vm_id: VmId) -> PresentVm | None:
    """The machine among those present."""
    return next((one for one in present if one.vm_id == vm_id), None)


def about_state(state: VmState, what: str) -> About | None:
    """On whose behalf upkeep acts on a machine; None when the log knows no owner."""
    claim = claim_of(state)
    if claim is None:
        return None
    return About(tenant_id=claim.tenant_id, causation_id=f"vm-host/{what}", correlation_id=claim.session_id)

"""Suspends machines: pause and write, keep, register, destroy, record; whatever fails, the machine runs on.

The intention is recorded first and the finished checkpoint is noted on the disk, so that a process that comes after a
crash finishes the same suspend. A machine whose checkpoint is noted is never let run on past it under that note.
"""

import logging
from typing import Final

from torpor_chunks.port import ChunkError
from torpor_contracts.checkpoint import CheckpointManifest
from torpor_contracts.errors import Transient
from torpor_contracts.ids import VmId
from torpor_contracts.replies import Receipt
from torpor_contracts.vm import ResourceRef, SuspendVm
from torpor_messaging.service import Incoming
from torpor_vm_host.checkpoints import NotDone, failure_of
from torpor_vm_host.domain import decisions, observations
from torpor_vm_host.domain.observations import Failure
from torpor_vm_host.domain.vm import Running, Suspending, VmState, held_by, running_execs
from torpor_vm_host.hosting import Hosting
from torpor_vm_host.ledger import About
from torpor_vm_host.ports import VM_GONE, DriverError
from torpor_vm_host.starting import find

CHECKPOINT: Final = "checkpoint"
"""The subdirectory of a machine into which its checkpoint is written."""

_log: Final = logging.getLogger(__name__)


class Suspends:
    """Handles `SuspendVm`, and finishes what an earlier process began."""

    def __init__(self, hosting: Hosting) -> None:
        self._driver = hosting.driver
        self._workspace = hosting.workspace
        self._checkpoints = hosting.checkpoints
        self._bases = hosting.bases
        self._clearing = hosting.clearing
        self._ledger = hosting.ledger
        self._programs = hosting.programs
        self._uses = hosting.uses
        self._clock = hosting.clock

    async def suspend(self, incoming: Incoming, vm_id: VmId) -> Receipt | None:
        """Suspend a machine; the receipt is that of the recorded intention, or of the failure that came before it."""
        command: SuspendVm = incoming.command
        state = await self._ledger.state(vm_id)
        decisions.check_tenant(state, incoming.tenant_id)
        used = self._in_use(state, command)
        receipt = await self._ledger.command(
            incoming, vm_id, lambda now, place: decisions.suspend(now, command, place, used)
        )
        state = await self._ledger.state(vm_id)
        if isinstance(state, Suspending) and state.suspend.checkpoint_id == command.checkpoint_id:
            await self.finish(About.command(incoming), state)
        return receipt

    def _in_use(self, state: VmState, command: SuspendVm) -> str:
        """Why the machine is not idle after all; nothing when it is, or need not be."""
        if command.idle_s is None or not isinstance(state, Running):
            return ""
        if running_execs(state):
            return "programs run in it"
        unused_s = self._uses.unused_s(state.claim.vm_id)
        if unused_s is not None and unused_s < command.idle_s:
            return f"it was used {unused_s:.1f} s ago, through files or a terminal"
        return ""

    async def finish(self, about: About, state: Suspending) -> None:
        """Bring a suspend that is under way to one of its ends; raises `Transient` when neither can be had now."""
        vm_id, began_s = state.claim.vm_id, self._clock.monotonic_s()
        await self._programs.detach(vm_id)
        try:
            manifest = await self._checkpoint(state)
            await self._checkpoints.register(about, state.suspend.checkpoint_id, manifest, state.suspend.deadline_at)
            gone = await self._ended(state)
            suspend_ms = round(1000 * (self._clock.monotonic_s() - began_s))
            after = await self._ledger.observe(
                about,
                vm_id,
                lambda now, place: observations.suspended(now, place, manifest.fingerprint, suspend_ms, gone),
                given=lambda: self._checkpoints.still_recorded(state.suspend.checkpoint_id, manifest),
            )
        except (DriverError, ChunkError, NotDone) as error:
            _log.warning("%s is not suspended: %s", vm_id, error)
            await self._run_on(about, state, failure_of(error))
            return
        await self._let_go(about, vm_id, after)

    async def _checkpoint(self, state: Suspending) -> CheckpointManifest:
        """The machine's checkpoint, complete in the chunk store: the noted one, else a new one."""
        vm_id, suspend = state.claim.vm_id, state.suspend
        present = find(await self._driver.machines(), vm_id)
        noted = await self._workspace.read_manifest(vm_id, suspend.checkpoint_id)
        if noted is not None and (present is None or present.state in {"paused", "dead"}):
            return noted
        if present is None or present.state == "dead":
            raise DriverError(VM_GONE, f"{vm_id} is gone before its checkpoint was complete", retryable=False)
        # It runs still: the first time this may take seconds.
        await self._bases.promise(vm_id)
        late = decisions.deadline_failure(suspend.deadline_at, self._clock.now())
        if late is not None:
            raise NotDone(late)
        fingerprint = await self._driver.fingerprint()
        if present.state == "running":
            await self._forget_recorded(vm_id)
        directory = await self._workspace.subdirectory(vm_id, CHECKPOINT)
        written = await self._driver.checkpoint(vm_id, directory)
        # The machine stands still: what the log says now is in the checkpoint's past.
        log_position = await self._checkpoints.log_position()
        kept = await self._checkpoints.keep(state.claim.tenant_id, written, suspend.parent_id)
        manifest = CheckpointManifest(
            session_id=state.claim.session_id,
            incarnation=state.claim.incarnation,
            parent_id=suspend.parent_id,
            fingerprint=fingerprint,
            parts=kept.parts,
            packs=kept.packs,
            log_position=log_position,
        )
        await self._workspace.write_manifest(vm_id, suspend.checkpoint_id, manifest)
        return manifest

    async def _ended(self, state: Suspending) -> list[ResourceRef]:
        """End a machine whose checkpoint is registered. The note stays until that is recorded: it says what was."""
        vm_id = state.claim.vm_id
        try:
            return await self._clearing.end(vm_id, state.held)
        except DriverError:
            present = find(await self._driver.machines(), vm_id)
            if present is not None and present.state != "dead":
                raise
            return []

    async def _let_go(self, about: About, vm_id: VmId, state: VmState) -> None:
        """Give back the rest of what a suspended machine held; what cannot be given back now, upkeep will."""
        try:
            gone = await self._clearing.clear(vm_id, held_by(state))
        except DriverError as error:
            _log.warning("%s holds something still: %s", vm_id, error)
            return
        await self._ledger.observe(about, vm_id, lambda now, place: observations.released(now, place, gone))

    async def _forget_recorded(self, vm_id: VmId) -> None:
        state = await self._ledger.state(vm_id)
        if isinstance(state, Suspending):
            await self._programs.forget_recorded(vm_id, state.execs)

    async def _run_on(self, about: About, state: Suspending, failure: Failure) -> None:
        """Let the machine run on and record why; when it is gone instead, record that."""
        vm_id = state.claim.vm_id
        try:
            # First the note: a machine that runs on is no longer what was noted.
            await self._workspace.forget_manifest(vm_id, state.suspend.checkpoint_id)
            await self._driver.resume(vm_id)
        except DriverError as error:
            if error.code != VM_GONE:
                raise Transient(f"{vm_id} is neither suspended nor running: {error}") from error
            await self._lost(about, state, failure)
            return
        except ChunkError as error:
            raise Transient(f"{vm_id} is neither suspended nor running: {error}") from error
        after = await self._ledger.observe(
            about, vm_id, lambda now, place: observations.suspend_failed(now, place, failure)
        )
        await self._drop_directory(vm_id)
        if isinstance(after, Running):
            try:
                await self._programs.follow_all(about, after)
            except DriverError as error:
                _log.warning("the programs of %s are followed later: %s", vm_id, error)

    async def _lost(self, about: About, state: Suspending, failure: Failure) -> None:
        vm_id = state.claim.vm_id
        try:
            gone = await self._clearing.clear(vm_id, state.held)
        except DriverError as error:
            raise Transient(f"{vm_id} is gone, but not what it held: {error}") from error
        cause = f"gone while it was being suspended: {failure.code}"
        wanted = await self._ledger.wanted(state.claim)
        await self._ledger.observe(
            about, vm_id, lambda now, place: observations.found_gone(now, place, cause, gone, wanted=wanted)
        )

    async def _drop_directory(self, vm_id: VmId) -> None:
        try:
            await self._workspace.remove_subdirectory(vm_id, CHECKPOINT)
        except ChunkError as error:
            _log.warning("what a failed checkpoint of %s left is removed with the machine: %s", vm_id, error)

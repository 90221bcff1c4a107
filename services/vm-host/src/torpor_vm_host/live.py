"""Checkpoints machines that run on: pause, capture, run on, write, keep, register, record.

The intention is recorded first, and what was captured is noted on the disk before it is registered: a process that
comes after a crash, or a second try, registers the very same. Whatever fails, the machine runs on. All of it is done
beside the machine's other commands, which need not wait for a disk or a store.
"""

import asyncio
import logging
from typing import Final

from torpor_chunks.port import ChunkError
from torpor_contracts.checkpoint import CheckpointManifest
from torpor_contracts.errors import Transient
from torpor_contracts.ids import VmId
from torpor_contracts.replies import Receipt
from torpor_contracts.vm import CheckpointVm, VmCheckpointStarted
from torpor_messaging.service import Incoming
from torpor_vm_host.checkpoints import NotDone, failure_of
from torpor_vm_host.domain import decisions, observations
from torpor_vm_host.domain.observations import Failure
from torpor_vm_host.domain.vm import Running
from torpor_vm_host.hosting import Hosting
from torpor_vm_host.ledger import About
from torpor_vm_host.ports import VM_GONE, DriverError, TakenCheckpoint
from torpor_vm_host.starting import find

LIVE: Final = "live-checkpoint"
"""The subdirectory of a machine into which a checkpoint is written while it runs."""

_log: Final = logging.getLogger(__name__)


class LiveCheckpoints:
    """Handles `CheckpointVm`, and finishes what an earlier process began; one task for each machine at most."""

    def __init__(self, hosting: Hosting) -> None:
        self._driver = hosting.driver
        self._workspace = hosting.workspace
        self._checkpoints = hosting.checkpoints
        self._bases = hosting.bases
        self._ledger = hosting.ledger
        self._programs = hosting.programs
        self._workers = hosting.workers
        self._clock = hosting.clock
        self._working: dict[VmId, asyncio.Task[None]] = {}

    async def checkpoint(self, incoming: Incoming, vm_id: VmId) -> Receipt | None:
        """Begin to checkpoint a machine; the receipt is that of the recorded intention, or of the failure before it."""
        command: CheckpointVm = incoming.command
        decisions.check_tenant(await self._ledger.state(vm_id), incoming.tenant_id)
        receipt = await self._ledger.command_of(
            incoming, vm_id, command.session_id, lambda now, place: decisions.checkpoint(now, command, place)
        )
        state = await self._ledger.state(vm_id)
        if isinstance(state, Running):
            self.go_on(About.command(incoming), state)
        return receipt

    def working(self, vm_id: VmId) -> bool:
        """Whether a checkpoint of the machine is being worked on, so that it may stand still for a moment."""
        return vm_id in self._working

    def go_on(self, about: About, state: Running) -> None:
        """Work on the checkpoint that the machine's stream says is to be taken, unless somebody does already."""
        vm_id, pending = state.claim.vm_id, state.checkpoint
        if pending is None or vm_id in self._working:
            return
        task = self._workers.spawn(f"checkpoint {vm_id}", self._work(about, state, pending))
        self._working[vm_id] = task
        task.add_done_callback(lambda _: self._working.pop(vm_id, None))

    async def let_go(self, vm_id: VmId) -> None:
        """Break off what is being done to the machine for a checkpoint: something else is to be done to it."""
        task = self._working.get(vm_id)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _work(self, about: About, state: Running, pending: VmCheckpointStarted) -> None:
        try:
            await self._finish(about, state, pending)
        except Transient as error:
            _log.warning("the checkpoint of %s is not settled yet: %s", state.claim.vm_id, error)

    async def _finish(self, about: About, state: Running, pending: VmCheckpointStarted) -> None:
        """Bring a checkpoint to one of its ends; raises `Transient` when that cannot be had now."""
        vm_id = state.claim.vm_id
        try:
            taken = await self._taken(state, pending)
            await self._checkpoints.register(about, pending.checkpoint_id, taken.manifest, pending.deadline_at)
        except (DriverError, ChunkError, NotDone) as error:
            _log.warning("%s is not checkpointed: %s", vm_id, error)
            await self._run_on(about, vm_id, failure_of(error))
            return
        await self._ledger.observe(about, vm_id, lambda now, place: observations.checkpointed(now, place, taken))
        await self._drop(vm_id, pending)

    async def _taken(self, state: Running, pending: VmCheckpointStarted) -> TakenCheckpoint:
        """The checkpoint, complete in the chunk store: the noted one, else a new one. The machine runs then."""
        vm_id = state.claim.vm_id
        present = find(await self._driver.machines(), vm_id)
        if present is None or present.state == "dead":
            raise DriverError(VM_GONE, f"{vm_id} is gone before its checkpoint was complete", retryable=False)
        if present.state == "paused":
            # An earlier process died while it was capturing.
            await self._driver.resume(vm_id)
        noted = await self._workspace.read_taken(vm_id, pending.checkpoint_id)
        if noted is not None:
            return noted
        await self._bases.promise(vm_id)
        late = decisions.deadline_failure(pending.deadline_at, self._clock.now())
        if late is not None:
            raise NotDone(late)
        await self._programs.forget_recorded(vm_id, state.execs)
        taken = await self._capture(state, pending)
        await self._workspace.write_taken(vm_id, pending.checkpoint_id, taken)
        return taken

    async def _capture(self, state: Running, pending: VmCheckpointStarted) -> TakenCheckpoint:
        vm_id, taken_at, log_position = state.claim.vm_id, self._clock.now(), 0

        async def at_pause() -> None:
            """What the log says now is in the checkpoint's past, and nothing that it says later."""
            nonlocal taken_at, log_position
            taken_at, log_position = self._clock.now(), await self._checkpoints.log_position()

        fingerprint = await self._driver.fingerprint()
        directory = await self._workspace.subdirectory(vm_id, LIVE)
        live = await self._driver.checkpoint_live(vm_id, directory, at_pause)
        kept = await self._checkpoints.keep(state.claim.tenant_id, live.parts, pending.parent_id)
        manifest = CheckpointManifest(
            session_id=state.claim.session_id,
            incarnation=state.claim.incarnation,
            parent_id=pending.parent_id,
            fingerprint=fingerprint,
            parts=kept.parts,
            packs=kept.packs,
            log_position=log_position,
        )
        return TakenCheckpoint(manifest=manifest, pause_ms=live.pause_ms, taken_at=taken_at)

    async def _run_on(self, about: About, vm_id: VmId, failure: Failure) -> None:
        """Make sure that the machine runs, and record why it was not checkpointed; who is gone is upkeep's."""
        try:
            await self._driver.resume(vm_id)
        except DriverError as error:
            if error.code == VM_GONE:
                return
            raise Transient(f"{vm_id} may stand still: {error}") from error
        await self._ledger.observe(about, vm_id, lambda now, place: observations.checkpoint_failed(now, place, failure))

    async def _drop(self, vm_id: VmId, done: VmCheckpointStarted) -> None:
        """What is recorded needs no note, and what is kept needs no copy."""
        try:
            await self._workspace.forget_manifest(vm_id, done.checkpoint_id)
            await self._workspace.remove_subdirectory(vm_id, LIVE)
        except ChunkError as error:
            _log.warning("what a checkpoint of %s left is removed with the machine: %s", vm_id, error)

"""The law of what machines hold: all that ended in them and in the checkpoint they came from, and none of it twice.

Told from the machines' own streams and positions of the log, never from clocks: a checkpoint holds what had ended by
the time its machine stood still, and the log had come to its `log_position`.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from torpor_contracts.checkpoint import CheckpointRecorded
from torpor_contracts.ids import CheckpointId, VmId
from torpor_contracts.vm import VmCheckpointStarted, VmClaimed, VmExecEnded, VmSuspendStarted
from torpor_scheduler.domain.session import Phase
from torpor_simulation.checks_rest import content_of
from torpor_simulation.history import History, Violation
from torpor_simulation.workload import NOTES
from torpor_vm_host.adapters.simulated.machine import Machine
from torpor_vm_host.adapters.simulated.parts import Disk

if TYPE_CHECKING:
    from torpor_simulation.world import World


class Contents:
    """Which programs' work a machine or a checkpoint must hold, as the log has it."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._recorded = {event.checkpoint_id: event for _, event in history.of(CheckpointRecorded)}
        self._made_by: dict[CheckpointId, VmId] = {}
        for _, suspend in history.of(VmSuspendStarted):
            self._made_by[suspend.checkpoint_id] = suspend.vm_id
        for _, begun in history.of(VmCheckpointStarted):
            self._made_by[begun.checkpoint_id] = begun.vm_id
        self._from = {event.vm_id: event.checkpoint_id for _, event in history.of(VmClaimed)}

    def of_machine(self, vm_id: VmId, until: int | None = None) -> set[str]:
        """The programs that exited in the machine up to a position, or in what it was started from."""
        base = self._from.get(vm_id)
        ended = {
            str(entry.event.exec_id)
            for entry in self._history.streams.get(vm_id, ())
            if isinstance(entry.event, VmExecEnded)
            and entry.event.outcome == "exited"
            and (until is None or entry.row.position <= until)
        }
        return ended | (set() if base is None else self.of_checkpoint(base))

    def of_checkpoint(self, checkpoint_id: CheckpointId) -> set[str]:
        """The programs whose work is in a checkpoint."""
        recorded, vm_id = self._recorded.get(checkpoint_id), self._made_by.get(checkpoint_id)
        if recorded is None or vm_id is None:
            return set()
        return self.of_machine(vm_id, recorded.manifest.log_position)


def notes_where_they_belong(world: "World", history: History, noted: Mapping[str, str]) -> Iterator[Violation]:
    """Every session's disk has each note once that its machine, or those before it on its branch, have written."""
    contents = Contents(history)
    recorded = {event.checkpoint_id: event for _, event in history.of(CheckpointRecorded)}
    for session_id, session in world.sessions.folded.items():
        words: list[str] | None = None
        must: set[str] = set()
        if session.phase is Phase.RUNNING and session.machine is not None:
            kept = world.hosts[session.machine.host_id].machines.kept.get(session.machine.vm_id)
            words = None if kept is None else _on_machine(kept)
            must = contents.of_machine(session.machine.vm_id)
        elif session.phase is Phase.SUSPENDED and session.checkpoint is not None:
            words = _in_checkpoint(world, recorded.get(session.checkpoint.checkpoint_id))
            must = contents.of_checkpoint(session.checkpoint.checkpoint_id)
        if words is None:
            continue
        for exec_id in sorted(must & noted.keys()):
            if noted[exec_id] not in words:
                yield Violation("content", f"{session_id} has lost what {exec_id} wrote; it has {words}")
        for word in sorted(set(words)):
            if words.count(word) > 1:
                yield Violation("content", f"{session_id} has {word!r} {words.count(word)} times")


def _on_machine(kept: bytes) -> list[str] | None:
    try:
        machine = msgspec.json.decode(kept, type=Machine)
    except msgspec.MsgspecError:
        return None
    return machine.files.get(NOTES, b"").decode().split()


def _in_checkpoint(world: "World", recorded: CheckpointRecorded | None) -> list[str] | None:
    disk = None if recorded is None else content_of(world, recorded, "disk")
    return None if disk is None else msgspec.json.decode(disk, type=Disk).files.get(NOTES, b"").decode().split()

"""Laws of a world at rest: sessions are as asked, machines are as sessions say, nothing was lost on the way."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from torpor_contracts.checkpoint import CheckpointRecorded
from torpor_contracts.host import HostLost
from torpor_contracts.ids import CheckpointId
from torpor_contracts.session import ExecEnded, SessionLost, SessionRecovered, SessionSuspended
from torpor_contracts.session_branches import RollbackRequested, SessionCheckpointed
from torpor_scheduler.domain.session import Phase, Session
from torpor_simulation.history import History, Violation
from torpor_simulation.sessions import STABLE
from torpor_simulation.workload import NOTES, SessionLife
from torpor_vm_host.adapters.simulated.machine import Machine
from torpor_vm_host.adapters.simulated.parts import Disk

if TYPE_CHECKING:
    from torpor_simulation.world import World

UNWANTED = frozenset({Phase.LOST, Phase.FAILED})
"""What may become of a session although nobody asked for it."""


def as_asked(world: "World") -> Iterator[Violation]:
    """Each session is what was asked for last, or says why it cannot be."""
    for session_id, session in world.sessions.folded.items():
        wanted = world.sessions.wanted[session_id]
        if session.phase is not wanted and (session.phase not in UNWANTED or wanted is Phase.TERMINATED):
            yield Violation("as-asked", f"{session_id} is {session.phase} and was to be {wanted}")
        if session.phase not in STABLE:
            yield Violation("as-asked", f"{session_id} is {session.phase} for ever")


def machines_as_said(world: "World") -> Iterator[Violation]:
    """A running session has its machine, running, on a host that is there; no other machine exists."""
    said: set[str] = set()
    for session_id, session in world.sessions.folded.items():
        machine = session.machine
        if session.phase is not Phase.RUNNING or machine is None:
            continue
        said.add(machine.vm_id)
        kept = world.hosts[machine.host_id].machines.kept.get(machine.vm_id)
        if kept is None:
            yield Violation("machines", f"{session_id} runs in {machine.vm_id}, which does not exist")
        elif _machine(kept) is None or _machine(kept).state != "running":  # type: ignore[union-attr]
            yield Violation("machines", f"{session_id} runs in {machine.vm_id}, which does not run")
    for vm_id in world.live.machines:
        if vm_id not in said:
            yield Violation("machines", f"{vm_id} exists and is no session's")


def woken(world: "World", history: History) -> Iterator[Violation]:
    """Every session that could be woken at the end was, and ran the program it was then given."""
    ended = {(row.stream, str(event.exec_id)): event for row, event in history.of(ExecEnded)}
    for session_id, exec_id in world.last_programs.items():
        end = ended.get((session_id, exec_id))
        if end is None or (end.outcome, end.exit_code) != ("exited", 0):
            said = "no end" if end is None else f"{end.outcome} {end.exit_code} {end.detail}"
            yield Violation("woken", f"{session_id} was woken in peace, and {exec_id} has {said}")


def lost_hosts(world: "World", history: History) -> Iterator[Violation]:
    """A host that is gone for good was declared lost."""
    declared = {event.host_id for _, event in history.of(HostLost)}
    registered = {row.stream for row in world.log.rows if row.tag.startswith("host-registered")}
    for host_id in sorted(world.gone & registered):
        if host_id not in declared:
            yield Violation("lost-hosts", f"{host_id} is gone and nobody has said so")


def restorable(world: "World", history: History) -> Iterator[Violation]:
    """Every session that sleeps, or could be gone back to, has its checkpoint, whole."""
    manifests = _manifests(history)
    for session_id, session in world.sessions.folded.items():
        checkpoint = session.checkpoint
        if checkpoint is None or session.phase is Phase.TERMINATED:
            continue
        recorded = manifests.get(checkpoint.checkpoint_id)
        if recorded is None:
            yield Violation("restorable", f"{session_id} rests on {checkpoint.checkpoint_id}, which nobody recorded")
        elif any(content_of(world, recorded, part.kind) is None for part in recorded.manifest.parts):
            yield Violation("restorable", f"{session_id} rests on {checkpoint.checkpoint_id}, whose parts are gone")


def notes_kept(world: "World", history: History, lives: list[SessionLife]) -> Iterator[Violation]:
    """What programs wrote is there after all suspends and resumes: once, unless the log says that it was lost."""
    for life in lives:
        session = world.sessions.folded.get(life.session_id)
        text = None if session is None else _notes(world, history, session)
        if text is None:
            continue
        words = text.split()
        for word in sorted(set(words)):
            if words.count(word) > 1:
                yield Violation("notes", f"{life.session_id} has {word!r} {words.count(word)} times")
        for exec_id in _must_have_left_a_note(history, life):
            if life.noted[exec_id] not in words:
                yield Violation("notes", f"{life.session_id} has lost the note of {exec_id}; it has {words}")


def _must_have_left_a_note(history: History, life: SessionLife) -> list[str]:
    """Programs that exited, but for those whose effect was lost with their machine."""
    kept: dict[str, ExecEnded] = {}
    before_loss: dict[str, ExecEnded] = {}
    running_on = False
    for entry in history.streams.get(life.session_id, ()):
        event = entry.event
        match event:
            case ExecEnded() if event.outcome == "exited" and event.exec_id in life.noted:
                kept[event.exec_id] = event
            case SessionLost() if running_on:
                # When a host's clock is off, moments say too little; what a checkpoint holds is checked by positions.
                before_loss, kept = dict(kept), {}
            case SessionLost():
                before_loss = dict(kept)
                kept = {exec_id: end for exec_id, end in kept.items() if end.observed_at <= event.lost_since}
            case SessionRecovered():
                kept = {**before_loss, **kept}
            case SessionCheckpointed():
                running_on = True
            case SessionSuspended():
                running_on = False
            case RollbackRequested():
                kept, before_loss = {}, {}
            case _:
                pass
    return list(kept)


def _notes(world: "World", history: History, session: Session) -> str | None:
    """The session's notes as they are on its machine's disk, or in its checkpoint; None when it has neither."""
    if session.phase is Phase.RUNNING and session.machine is not None:
        kept = world.hosts[session.machine.host_id].machines.kept.get(session.machine.vm_id)
        machine = None if kept is None else _machine(kept)
        return None if machine is None else machine.files.get(NOTES, b"").decode()
    if session.phase is Phase.SUSPENDED and session.checkpoint is not None:
        recorded = _manifests(history).get(session.checkpoint.checkpoint_id)
        disk = None if recorded is None else content_of(world, recorded, "disk")
        if disk is not None:
            return msgspec.json.decode(disk, type=Disk).files.get(NOTES, b"").decode()
    return None


def content_of(world: "World", recorded: CheckpointRecorded, kind: str) -> bytes | None:
    """A part of a checkpoint as the chunk store has it, or None."""
    return world.chunks.content(recorded.tenant_id, recorded.manifest.packs[0].address, kind)


def _manifests(history: History) -> dict[CheckpointId, CheckpointRecorded]:
    return {event.checkpoint_id: event for _, event in history.of(CheckpointRecorded)}


def _machine(kept: bytes) -> Machine | None:
    try:
        return msgspec.json.decode(kept, type=Machine)
    except msgspec.MsgspecError:
        return None

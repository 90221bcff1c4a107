"""Laws of branching: forks are made whole and know where they came from, one checkpoint at a time, no way back lost."""

from collections.abc import Iterator

from torpor_contracts.checkpoint import CheckpointRecorded
from torpor_contracts.session import ResumeRequested, SessionRequested, VmStartRequested
from torpor_contracts.session_branches import (
    CheckpointFailed,
    CheckpointRequested,
    ForkFailed,
    ForkRequested,
    RollbackRequested,
    SessionCheckpointed,
    SessionForked,
)
from torpor_contracts.vm import VmCheckpointed
from torpor_simulation.history import Entry, History, Violation


def forks_whole(history: History) -> Iterator[Violation]:
    """All sessions of a fork begin in its commit, from its checkpoint; no other session begins in a checkpoint."""
    made: dict[str, str] = {}
    for row, fork in history.of(SessionForked):
        for session_id in fork.session_ids:
            made[session_id] = row.command_id
            begins = [
                entry for entry in history.streams.get(session_id, ()) if isinstance(entry.event, SessionRequested)
            ]
            if len(begins) != 1 or begins[0].row.command_id != row.command_id:
                yield Violation("forks", f"{session_id} was not made with its fork at {row.position}")
                continue
            lineage = begins[0].event.lineage
            if lineage is None or (lineage.session_id, lineage.checkpoint_id) != (row.stream, fork.checkpoint_id):
                yield Violation("forks", f"{session_id} does not know that it came from {row.stream}")
    for row, requested in history.of(SessionRequested):
        if requested.lineage is not None and row.stream not in made:
            yield Violation("forks", f"{row.stream} says it is a fork, and nobody forked it")


def begins_where_forked(history: History) -> Iterator[Violation]:
    """A fork's first machine is asked for from the checkpoint it was made from, as incarnation 1."""
    for row, requested in history.of(SessionRequested):
        if requested.lineage is None:
            continue
        starts = [entry.event for entry in history.streams[row.stream] if isinstance(entry.event, VmStartRequested)]
        if starts and (starts[0].incarnation, starts[0].checkpoint_id) != (1, requested.lineage.checkpoint_id):
            yield Violation("forks", f"{row.stream} began as {starts[0].incarnation} from {starts[0].checkpoint_id}")


def one_at_a_time(history: History) -> Iterator[Violation]:
    """A session waits for one checkpoint at a time, and every wait ends; so does every fork that waits."""
    for stream, entries in history.streams.items():
        waiting: str | None = None
        forking: str | None = None
        for entry in entries:
            match entry.event:
                case CheckpointRequested() as asked:
                    if waiting not in (None, asked.checkpoint_id):
                        yield Violation("checkpoints", f"{stream} waits for {waiting} and {asked.checkpoint_id}")
                    waiting = asked.checkpoint_id
                case SessionCheckpointed() | CheckpointFailed() as ended:
                    again = isinstance(ended, CheckpointFailed) and ended.retry_at is not None
                    waiting = waiting if again or ended.checkpoint_id != waiting else None
                case ForkRequested() as asked:
                    forking = asked.checkpoint_id
                case SessionForked() | ForkFailed() as ended if ended.checkpoint_id == forking:
                    forking = None
                case _:
                    pass
        if waiting or forking:
            yield Violation("checkpoints", f"{stream} waits for {waiting or forking} for ever")


def checkpoints_true(history: History) -> Iterator[Violation]:
    """What a host calls checkpointed is with the store already; what stands behind its place in the log came later."""
    recorded: dict[str, int] = {}
    for entry in history.entries:
        match entry.event:
            case CheckpointRecorded() as kept:
                recorded[kept.checkpoint_id] = entry.row.position
            case VmCheckpointed() as taken:
                if taken.checkpoint_id not in recorded:
                    yield Violation("checkpoints", f"{taken.checkpoint_id} is said to be taken and is not recorded")
                elif not 0 < taken.log_position < recorded[taken.checkpoint_id]:
                    yield Violation("checkpoints", f"{taken.checkpoint_id} claims to hold up to {taken.log_position}")
            case _:
                pass


def rollbacks_end(history: History) -> Iterator[Violation]:
    """A session that goes back comes back as a new incarnation, from that checkpoint, or is ended by its client."""
    for stream, entries in history.streams.items():
        for number, entry in enumerate(entries):
            if not isinstance(entry.event, RollbackRequested):
                continue
            after = next((one for one in entries[number + 1 :] if _goes_on(one)), None)
            if after is None:
                yield Violation("rollbacks", f"{stream} goes back since {entry.row.position} and never arrives")
            elif isinstance(after.event, ResumeRequested) and after.event.checkpoint_id != entry.event.checkpoint_id:
                yield Violation("rollbacks", f"{stream} went back to {after.event.checkpoint_id}, asked was another")


def _goes_on(entry: Entry) -> bool:
    return isinstance(entry.event, ResumeRequested) or type(entry.event).__name__ == "TerminateRequested"

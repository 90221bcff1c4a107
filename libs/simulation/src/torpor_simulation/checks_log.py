"""Laws that the log alone must show: gap-free, chained, each command once, no incarnation twice, no program twice."""

from collections.abc import Iterator

from torpor_contracts.session import (
    ExecEnded,
    ExecRequested,
    ResumeRequested,
    SessionResumed,
    SessionStarted,
    VmStartRequested,
)
from torpor_contracts.session_branches import ExecContinued
from torpor_contracts.vm import VmClaimed, VmExecStarted, VmReleased, VmStarted, VmStopped, VmSuspended
from torpor_eventlog.canonical import NO_DIGEST, row_digest
from torpor_eventlog.merkle import Frontier
from torpor_eventlog.port import Head
from torpor_simulation.history import History, Violation


def positions(history: History) -> Iterator[Violation]:
    """Positions and versions count from 1 without a gap."""
    for number, entry in enumerate(history.entries, start=1):
        if entry.row.position != number:
            yield Violation("positions", f"position {entry.row.position} stands where {number} belongs")
    for stream, entries in history.streams.items():
        for number, entry in enumerate(entries, start=1):
            if entry.row.version != number:
                yield Violation("positions", f"{stream} has version {entry.row.version} where {number} belongs")


def chain(history: History, head: Head) -> Iterator[Violation]:
    """Each row's digest follows from the row before, and the head is the tree over all of them."""
    previous = NO_DIGEST
    frontier = Frontier()
    for entry in history.entries:
        if entry.row.digest != row_digest(previous, entry.row):
            yield Violation("chain", f"the digest at position {entry.row.position} is not that of its row")
        previous = entry.row.digest
        frontier.extend([previous])
    if head != Head(position=len(history.entries), digest=previous, root=frontier.root()):
        yield Violation("chain", f"the head at {head.position} is not the tree over {len(history.entries)} rows")


def commands_once(history: History) -> Iterator[Violation]:
    """The events of one command stand together: it was decided once."""
    last_position: dict[str, int] = {}
    for entry in history.entries:
        row = entry.row
        known = last_position.get(row.command_id)
        if known is not None and known != row.position - 1:
            yield Violation("commands-once", f"command {row.command_id} has events at {known} and at {row.position}")
        last_position[row.command_id] = row.position


def incarnations(history: History) -> Iterator[Violation]:
    """A session's incarnations only grow, each begins once, and each try to start one has a machine of its own."""
    for stream, entries in history.streams.items():
        newest = 0
        begun: set[int] = set()
        for entry in entries:
            event = entry.event
            if isinstance(event, (VmStartRequested, ResumeRequested)):
                if event.incarnation < newest:
                    yield Violation("incarnations", f"{stream} went back from {newest} to {event.incarnation}")
                newest = max(newest, event.incarnation)
            if isinstance(event, (SessionStarted, SessionResumed)):
                if event.incarnation in begun:
                    yield Violation("incarnations", f"{stream} began incarnation {event.incarnation} twice")
                begun.add(event.incarnation)
    owners: dict[str, tuple[str, int, int]] = {}
    for _, event in history.of(VmStartRequested):
        owner = (event.session_id, event.incarnation, event.attempt)
        if owners.setdefault(event.vm_id, owner) != owner:
            yield Violation("incarnations", f"{event.vm_id} was asked for by {owners[event.vm_id]} and {owner}")


def one_running(history: History) -> Iterator[Violation]:
    """For one session and incarnation no two machines are observed running at the same time."""
    running: dict[tuple[str, int], str] = {}
    for entry in history.entries:
        event = entry.event
        if isinstance(event, VmStarted):
            key = (event.session_id, event.incarnation)
            other = running.setdefault(key, event.vm_id)
            if other != event.vm_id:
                yield Violation("one-running", f"{event.vm_id} started while {other} runs for {key}")
        elif isinstance(event, (VmStopped, VmSuspended)):
            key = (event.session_id, event.incarnation)
            if running.get(key) == event.vm_id:
                del running[key]


def programs(history: History) -> Iterator[Violation]:
    """A program is asked for or came along before it ends, ends once each time, and is started in one machine."""
    for stream, entries in history.streams.items():
        in_flight: set[str] = set()
        for entry in entries:
            match entry.event:
                case ExecRequested() | ExecContinued() as came:
                    if came.exec_id in in_flight:
                        yield Violation("programs", f"{stream}/{came.exec_id} is in flight twice")
                    in_flight.add(came.exec_id)
                case ExecEnded() as ended:
                    if ended.exec_id not in in_flight:
                        yield Violation("programs", f"{stream}/{ended.exec_id} ended and was not in flight")
                    in_flight.discard(ended.exec_id)
                case _:
                    pass
    started: set[tuple[str, str]] = set()
    for _, begun in history.of(VmExecStarted):
        key = (begun.session_id, begun.exec_id)
        if key in started:
            yield Violation("programs", f"{key} was started twice")
        started.add(key)


def claims(history: History) -> Iterator[Violation]:
    """A machine is claimed before it runs, and what is released was claimed."""
    claimed: dict[str, set[tuple[str, str]]] = {}
    for entry in history.entries:
        event = entry.event
        if isinstance(event, VmClaimed):
            claimed.setdefault(event.vm_id, set()).update((ref.kind, ref.name) for ref in event.resources)
        elif isinstance(event, VmStarted) and event.vm_id not in claimed:
            yield Violation("claims", f"{event.vm_id} runs and was never claimed")
        elif isinstance(event, VmReleased):
            unclaimed = {(ref.kind, ref.name) for ref in event.resources} - claimed.get(event.vm_id, set())
            if unclaimed:
                yield Violation("claims", f"{event.vm_id} released {sorted(unclaimed)}, which it did not hold")
            claimed.get(event.vm_id, set()).difference_update((ref.kind, ref.name) for ref in event.resources)

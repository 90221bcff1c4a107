"""When a world has come to rest: nothing is on its way between what was asked for and what is."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torpor_contracts.ids import VmId
from torpor_scheduler.domain.session import Phase, unstarted
from torpor_simulation.sessions import STABLE

if TYPE_CHECKING:
    from torpor_simulation.world import World


async def unsettled(world: "World") -> list[str]:
    """What is on its way still; nothing when the world is at rest."""
    return [
        *_sessions_on_their_way(world),
        *_machines_on_their_way(world),
        *_messages_on_their_way(world),
        *_hosts_on_their_way(world),
        *await _followers_behind(world),
    ]


def running_machines(world: "World") -> dict[VmId, str]:
    """The machines that sessions say they run on, and the session of each."""
    return {
        session.machine.vm_id: session_id
        for session_id, session in world.sessions.folded.items()
        if session.phase is Phase.RUNNING and session.machine is not None
    }


def _sessions_on_their_way(world: "World") -> Iterator[str]:
    for session_id, session in world.sessions.folded.items():
        if session.phase not in STABLE:
            yield f"{session_id} is {session.phase}"
        if session.checkpointing is not None:
            yield f"{session_id} waits for a checkpoint"
        # A program that was running when its session was put to sleep sleeps with it.
        for program in unstarted(session) if session.phase is Phase.SUSPENDED else session.execs:
            yield f"program {program.exec_id} of {session_id} has not ended ({session.phase})"
        if session.checkpointing is not None or session.fork is not None:
            yield f"{session_id} waits for a checkpoint"
        machine = session.machine
        if session.phase is Phase.RUNNING and machine is not None and machine.vm_id not in world.live.machines:
            yield f"{session_id} is said to run in {machine.vm_id}, which does not exist"


def _machines_on_their_way(world: "World") -> Iterator[str]:
    running = running_machines(world)
    for vm_id, sighting in world.live.machines.items():
        if vm_id not in running:
            yield f"{vm_id} exists on {sighting.host_id} and is no session's"
    for (vm_id, host_id), held in world.live.held.items():
        if held and vm_id not in running and host_id not in world.gone:
            yield f"{vm_id} is over and {sorted(ref.name for ref in held)} is not released on {host_id}"


def _messages_on_their_way(world: "World") -> Iterator[str]:
    for message in world.broker.streams["COMMANDS"].messages.values():
        if not any(f".{host_id}." in message.subject for host_id in world.gone):
            yield f"{message.subject} is not handled"
    if len(world.events.rows) < len(world.log.rows):
        yield f"the stream ends at {len(world.events.rows)}, the log at {len(world.log.rows)}"


def _hosts_on_their_way(world: "World") -> Iterator[str]:
    for host_id in sorted(world.gone):
        if world.live.hosts_up.get(host_id):
            yield f"{host_id} is gone and is not declared lost"


async def _followers_behind(world: "World") -> list[str]:
    last = len(world.log.rows)
    behind = []
    there = [found for found in world.fleet.followers() if found[0] not in world.gone]
    for kind, store, followers in there:
        for follower in followers:
            position = await store.position(follower)
            if position < last:
                behind.append(f"{kind}/{follower} is at {position} of {last}")
    return behind

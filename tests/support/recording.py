"""Records candidates for golden histories: production's services live through a scenario in a simulated world.

`python -m tests.support.recording DIR [NAME…]` writes `DIR/NAME.jsonl`. Read what was written before it goes to
`schemas/golden`; from then on it is never written again.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tests.support.golden import line_of
from torpor_contracts.checkpoint import CheckpointRecorded, FreeCheckpoint
from torpor_contracts.host import DrainHost, UndrainHost
from torpor_contracts.ids import CheckpointId, CommandId, ExecId, SessionId
from torpor_contracts.replies import Reply
from torpor_contracts.session import (
    CreateSession,
    ExecSession,
    ExecSpec,
    MachineSpec,
    ResumeSession,
    RetryRule,
    SuspendSession,
    TerminateSession,
)
from torpor_contracts.session_branches import CheckpointSession, ForkSession, RollbackSession
from torpor_contracts.vm import VmStarted
from torpor_eventlog.codec import decode_event
from torpor_messaging.ports import OutgoingCommand
from torpor_simulation.disasters import Disasters
from torpor_simulation.plan import Disaster, Plan
from torpor_simulation.running import run_world
from torpor_simulation.world import TENANT, World

SEED: Final = 2026
LOOK_S: Final = 0.25
PATIENCE_S: Final = 600.0
SMALL: Final = MachineSpec(vcpus=1, memory_mib=64, disk_mib=64)
HUGE: Final = MachineSpec(vcpus=32, memory_mib=131_072, disk_mib=64)
ALWAYS: Final = 2.0
"""A probability that hits every call, also where a fault has half of it."""


class Stage:
    """A world, a client in it, and patience."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._client, _ = world.client(TENANT, "client")
        self._disasters = Disasters(world)

    async def ask(self, session: str, command: msgspec.Struct) -> Reply | None:
        """Send a command to a session until it is answered."""
        name = str(command.__struct_config__.tag).partition(".")[0]
        return await self._client.ask(session, command, self._client.new_id(name))

    async def create(self, session: str, **given: object) -> None:
        """Ask for a small session that never sleeps of itself, unless something else is given."""
        shape: dict[str, object] = {"machine": SMALL, "idle_after_s": None, **given}
        await self.ask(session, msgspec.convert(msgspec.to_builtins(shape), CreateSession))

    async def run(self, session: str, exec_id: str, *argv: str) -> None:
        """Have a program run."""
        program = ExecSpec(argv=list(argv), timeout_s=600)
        await self.ask(session, ExecSession(exec_id=ExecId(exec_id), program=program))

    async def end(self, session: str, reason: str = "done") -> None:
        """Terminate a session and see it terminated."""
        done = self.count("session-terminated") + 1
        await self.ask(session, TerminateSession(reason=reason))
        await self.until("session-terminated", done)

    def count(self, type_: str) -> int:
        """How many events of a type the log has."""
        return sum(row.tag.partition(".")[0] == type_ for row in self.world.log.rows)

    async def until(self, type_: str, times: int = 1) -> None:
        """Wait for an event."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + PATIENCE_S
        while self.count(type_) < times:
            assert loop.time() < give_up_s, f"{type_} did not happen {times} times"
            await asyncio.sleep(LOOK_S)

    def host_of_newest_machine(self) -> str:
        """Where the machine runs that was started last."""
        started = [event for event in map(decode_event, self.world.log.rows) if isinstance(event, VmStarted)]
        return started[-1].host_id

    async def stranger(self) -> None:
        """Let a machine be on the first host that nobody asked for."""
        await self._disasters._stranger(
            self.world.hosts["host-1"], Disaster(kind="stranger", at_s=0, lasts_s=0, which=0)
        )


async def session_life(stage: Stage) -> None:
    """Create, run programs, suspend and resume (once while still being suspended), wake by work, terminate."""
    await stage.create("s-agent", metadata={"owner": "example"})
    await stage.until("session-started")
    await stage.run("s-agent", "hello", "echo", "hello")
    await stage.until("exec-ended")
    await stage.run("s-agent", "long", "sleep", "20")
    await stage.until("exec-started", 2)
    await stage.ask("s-agent", SuspendSession())
    await stage.ask("s-agent", ResumeSession())
    await stage.until("session-resumed")
    await stage.until("exec-ended", 2)
    await stage.ask("s-agent", SuspendSession(incarnation=2))
    await stage.until("session-suspended", 2)
    await stage.run("s-agent", "wake", "true")
    await stage.until("exec-ended", 3)
    await stage.end("s-agent")


async def start_failures(stage: Stage) -> None:
    """A start that fails once, one that fails for good, and a machine that no host has room for."""
    driver = stage.world.plan.driver
    driver.start_failed = ALWAYS
    rule = RetryRule(attempts_max=2, backoff_s=1, backoff_s_max=4, deadline_s=60)
    await stage.create("s-retry", start_retry=rule)
    await stage.until("session-start-failed")
    driver.start_failed = 0.0
    await stage.until("session-started")
    driver.start_failed = ALWAYS
    await stage.create("s-fails", start_retry=rule)
    await stage.run("s-fails", "never", "true")
    await stage.until("session-failed")
    driver.start_failed = 0.0
    short = RetryRule(attempts_max=2, backoff_s=1, backoff_s_max=2, deadline_s=5)
    await stage.create("s-large", machine=HUGE, start_retry=short)
    await stage.until("session-failed", 2)
    for session in ("s-fails", "s-large", "s-retry"):
        await stage.end(session)


async def host_lost(stage: Stage) -> None:
    """A host is cut off with a machine on it; the session goes on elsewhere; the host comes back with the old one."""
    await stage.create("s-agent")
    await stage.until("session-started")
    await stage.ask("s-agent", SuspendSession())
    await stage.until("session-suspended")
    await stage.ask("s-agent", ResumeSession())
    await stage.until("session-resumed")
    await stage.run("s-agent", "work", "sleep", "300")
    await stage.until("exec-started")
    host_id = stage.host_of_newest_machine()
    stage.world.network.take_down(host_id)
    await stage.until("session-lost")
    await stage.ask("s-agent", ResumeSession())
    await stage.until("session-resumed", 2)
    registered = stage.count("host-registered")
    stage.world.network.bring_back(host_id)
    await stage.until("host-registered", registered + 1)
    await stage.until("vm-released", 2)
    await stage.end("s-agent")


async def machine_recovered(stage: Stage) -> None:
    """A host is cut off and comes back before the session has gone on: nothing is lost but the program's end."""
    await stage.create("s-agent")
    await stage.until("session-started")
    await stage.run("s-agent", "work", "sleep", "30")
    await stage.until("exec-started")
    stage.world.network.take_down("host-1")
    await stage.until("session-lost")
    stage.world.network.bring_back("host-1")
    await stage.until("session-recovered")
    await stage.end("s-agent")


async def idle_suspend(stage: Stage) -> None:
    """Idleness suspends (at the second try), work wakes, and both checkpoints are freed in the end, the child first."""
    driver = stage.world.plan.driver
    driver.checkpoint_failed = ALWAYS
    await stage.create("s-idle", idle_after_s=5.0)
    await stage.until("suspend-failed")
    driver.checkpoint_failed = 0.0
    await stage.until("session-suspended")
    await stage.run("s-idle", "wake", "count", "3")
    await stage.until("session-suspended", 2)
    await stage.end("s-idle")
    recorded = [event for event in map(decode_event, stage.world.log.rows) if isinstance(event, CheckpointRecorded)]
    for number, event in enumerate(reversed(recorded), 1):
        await _free(stage, event)
        await stage.until("checkpoint-freed", number)


async def branches(stage: Stage) -> None:
    """Checkpoints of a session that runs on, one that fails, forks of it running and asleep, and the way back."""
    driver = stage.world.plan.driver
    await stage.create("s-agent", metadata={"owner": "example"})
    await stage.until("session-started")
    await stage.run("s-agent", "long", "sleep", "300")
    await stage.until("exec-started")
    first = CheckpointId("ckp-first")
    await stage.ask("s-agent", CheckpointSession(checkpoint_id=first, label="before the forks"))
    await stage.until("session-checkpointed")
    driver.checkpoint_failed = ALWAYS
    await stage.ask("s-agent", ForkSession(session_ids=[SessionId("s-never")]))
    await stage.until("fork-failed")
    driver.checkpoint_failed = 0.0
    await stage.ask("s-agent", ForkSession(session_ids=[SessionId("s-left"), SessionId("s-right")]))
    await stage.until("session-started", 3)
    await stage.until("exec-continued", 2)
    await stage.ask("s-agent", RollbackSession(checkpoint_id=first))
    await stage.until("session-resumed")
    await stage.until("exec-continued", 3)
    await stage.ask("s-left", SuspendSession())
    await stage.until("session-suspended")
    await stage.ask("s-left", CheckpointSession(label="asleep"))
    await stage.until("session-checkpointed", 3)
    named = ForkSession(session_ids=[SessionId("s-leaf")], checkpoint_id=first, metadata={"try": "2"})
    await stage.ask("s-left", named)
    await stage.until("session-started", 4)
    for session in ("s-leaf", "s-right", "s-left", "s-agent"):
        await stage.end(session)


async def in_use(stage: Stage) -> None:
    """A session is called idle although a program runs in it that was given up for lost; it sleeps once that ends."""
    await stage.create("s-agent", idle_after_s=5.0)
    await stage.until("session-started")
    await stage.run("s-agent", "work", "sleep", "40")
    await stage.until("exec-started")
    stage.world.network.take_down("host-1")
    await stage.until("session-lost")
    stage.world.network.bring_back("host-1")
    await stage.until("session-recovered")
    await stage.until("suspend-withdrawn")
    await stage.until("session-suspended")
    await stage.end("s-agent")


async def _free(stage: Stage, event: CheckpointRecorded) -> None:
    bus = stage.world.client(TENANT, "cleaner")[0]._bus
    await bus.send(
        OutgoingCommand(
            tenant_id=TENANT,
            service="snapshot-store",
            target=event.checkpoint_id,
            command=FreeCheckpoint(reason="its session is over"),
            command_id=CommandId(f"free-{event.checkpoint_id}"),
        )
    )


async def host_drained(stage: Stage) -> None:
    """A host is emptied: its session goes on elsewhere with the program it was running."""
    await stage.create("s-agent")
    await stage.until("session-started")
    await stage.run("s-agent", "work", "sleep", "15")
    await stage.until("exec-started")
    host_id, operator = stage.host_of_newest_machine(), stage.world.operator
    await operator.ask(host_id, DrainHost(reason="maintenance"), operator.new_id("drain"))
    await stage.until("session-resumed")
    await stage.until("exec-ended")
    await operator.ask(host_id, UndrainHost(), operator.new_id("undrain"))
    await stage.end("s-agent")


async def clean_up(stage: Stage) -> None:
    """Three machines nobody asked for: one is reaped, one goes by itself, one cannot be destroyed at first."""
    await stage.create("s-agent")
    await stage.until("session-started")
    await stage.stranger()
    await stage.until("cleanup-carried-out")
    await stage.stranger()
    await stage.until("cleanup-proposed", 2)
    machines = stage.world.hosts["host-1"].machines
    for vm_id in [vm_id for vm_id in machines.kept if "stranger" in vm_id]:
        machines.vanish(vm_id)
    await stage.until("cleanup-withdrawn")
    stage.world.plan.driver.destroy_failed = ALWAYS
    await stage.stranger()
    await stage.until("cleanup-given-up")
    stage.world.plan.driver.destroy_failed = 0.0
    await stage.end("s-agent")


class Scenario(NamedTuple):
    """What happens, and on how many hosts."""

    live: Callable[[Stage], Awaitable[None]]
    hosts: int


SCENARIOS: Final = {
    "session-life": Scenario(session_life, 1),
    "start-failures": Scenario(start_failures, 1),
    "host-lost": Scenario(host_lost, 2),
    "machine-recovered": Scenario(machine_recovered, 1),
    "idle-suspend": Scenario(idle_suspend, 1),
    "host-drained": Scenario(host_drained, 2),
    "clean-up": Scenario(clean_up, 1),
    "branches": Scenario(branches, 1),
    "in-use": Scenario(in_use, 1),
}


def record(name: str) -> list[str]:
    """The lines of a scenario's log."""
    scenario, worlds = SCENARIOS[name], list[World]()

    def prepare(world: World) -> None:
        async def trouble() -> None:
            worlds.append(world)
            await scenario.live(Stage(world))
            world.calm()

        world._trouble = trouble  # type: ignore[method-assign]

    outcome = run_world(Plan(seed=SEED, hosts=scenario.hosts, sessions=0), None, prepare)
    broken = [str(violation) for violation in outcome.violations]
    assert not broken, f"{name}: {broken}"
    return [line_of(row) for row in worlds[0].log.rows]


def main(folder: str, *names: str) -> int:
    """Record the scenarios named, or all."""
    for name in names or SCENARIOS:
        lines = record(name)
        (Path(folder) / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
        sys.stdout.write(f"{name}: {len(lines)} events\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

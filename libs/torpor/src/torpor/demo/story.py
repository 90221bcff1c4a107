"""The story: an agent works, sleeps, wakes with its memory, is forked into five, and outlives a killed host service."""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torpor.client.api import Torpor
from torpor.client.models import Event
from torpor.client.session import Session
from torpor.demo.stage import Stage, memory_mib, until_gone
from torpor.demo.telling import NotSo, Telling
from torpor.embedded.process_table import started_ticks
from torpor_contracts.scheduling import SessionView

GUEST: Final = Path(__file__).parent / "guest"
HOME: Final = "/root/work"
AGENT: Final = "agent"
TELL: Final = "echo $0 > /run/agent.asked && cat /run/agent.answered"
IDLE_S: Final = 1.0
ASLEEP_S_MAX: Final = 30.0
LOOK_S: Final = 0.02
COUNT: Final = 15
COUNTING: Final = f"import time\nfor n in range({COUNT}):\n    print(n, flush=True)\n    time.sleep(0.2)"
TOLD: Final = {
    "session-requested.v1": "asked for",
    "session-started.v1": "its machine runs",
    "session-suspended.v1": "asleep: a checkpoint on disk",
    "session-resumed.v1": "awake again",
    "session-checkpointed.v1": "checkpointed while it ran on",
    "session-forked.v1": "forked",
    "session-terminated.v1": "ended",
}
"""The events that the timeline shows, and how it says them."""


@dataclass
class Story:
    """Tells it, one chapter after the other, and looks at everything that it says."""

    torpor: Torpor
    stage: Stage
    telling: Telling
    sessions: list[str] = field(default_factory=list)

    async def tell(self) -> dict[str, Any]:
        """All of it; the facts as data. Raises `NotSo` at the first thing that is not so."""
        agent = await self._works()
        token = await self._sleeps_and_wakes(agent)
        kept, fix = await self._forks(agent, token)
        await self._outlives_a_kill(kept, token)
        return {"session": AGENT, "kept": kept.session_id, "fix": fix}

    # --- chapters ---------------------------------------------------------------------------------------------

    async def _works(self) -> Session:
        self.telling.chapter("An agent works, in a machine of its own")
        began_s = _now_s()
        agent = await self.torpor.sessions.create(session_id=AGENT, idle_after_s=IDLE_S)
        self.sessions.append(AGENT)
        took_s = self.telling.figure("create_s", _now_s() - began_s)
        kernel = (await self._run(agent, "uname", "-r")).strip()
        self.telling.claim("the machine has a kernel of its own", holds=kernel != os.uname().release, found=kernel)
        self.telling.say(f"session {AGENT} runs, on its own Linux {kernel}", took_s)
        began_s = _now_s()
        for path in sorted(GUEST.rglob("*.py")):
            await agent.files.write(f"{HOME}/{path.relative_to(GUEST)}", path.read_bytes())
        await self._run(agent, "python3", f"{HOME}/agent.py")
        seen = await self._told(agent, "look")
        self.telling.claim("some of the project's tests fail", holds=0 < seen["failed"] < seen["ran"], found=seen)
        self.telling.say(
            f"it has read {seen['files']} files and run {seen['ran']} tests: {seen['failed']} fail, it wonders why",
            _now_s() - began_s,
        )
        return agent

    async def _sleeps_and_wakes(self, agent: Session) -> str:
        self.telling.chapter("Nobody needs it, so it sleeps; work arrives, so it wakes")
        before = await self._told(agent, "status")
        view = await agent.show()
        pid, vm_id = self.stage.machine_pid(view.vm_id), view.vm_id
        self.telling.claim("its machine is a process of this host", holds=pid is not None, found=pid)
        held_mib = memory_mib(pid or 0)
        began_s = _now_s()
        view = await self._until_asleep(agent)
        idle_s = _now_s() - began_s
        left = self.stage.machine_pid(vm_id)
        gone = left is None and started_ticks(pid or 0) is None
        self.telling.claim("asleep, no process of its machine is left", holds=gone, found=left or "none")
        stored = await self.torpor.checkpoints.get(str(view.checkpoint_id), at_least=view.position)
        disk_mib = stored.stored_bytes / 2**20
        self.telling.say(f"asleep: memory {held_mib:.0f} -> 0 MiB, on disk {disk_mib:.1f} MiB, no process left", idle_s)
        began_s = _now_s()
        first_s: float | None = None
        async for _ in agent.exec("echo", "awake"):
            first_s = first_s or _now_s() - began_s
        wake_s = self.telling.figure("wake_s", first_s or _now_s() - began_s)
        self.telling.say("woken by a command: its first output came after", wake_s)
        after = await self._told(agent, "status")
        same = all(after[key] == before[key] for key in ("token", "pid", "notes", "log_bytes"))
        self.telling.claim("it woke with its memory, process and open file in place", holds=same, found=after)
        self.telling.say(f"the same process {after['pid']}, its {len(after['notes'])} notes and its open log in place")
        return str(before["token"])

    async def _forks(self, agent: Session, token: str) -> tuple[Session, str]:
        self.telling.chapter("One agent, five ideas: fork it, and let each try its own")
        ideas = sorted(path.stem for path in (GUEST / "fixes").glob("*.py"))
        began_s = _now_s()
        names = [f"{AGENT}-{idea}" for idea in ideas]
        self.sessions += names
        forks = await agent.fork(session_ids=names)
        fork_s = self.telling.figure("fork_five_s", _now_s() - began_s)
        self.telling.say("five forks of the running agent run", fork_s)
        found = await asyncio.gather(
            *(self._tried(fork, idea, began_s) for fork, idea in zip(forks, ideas, strict=True))
        )
        self.telling.figure("fork_five_answers_s", max(one["answered_s"] for one in found))
        hosts = [one["host"] for one in found]
        self.telling.claim("each fork is somebody", holds=len(set(hosts)) == len(forks), found=hosts)
        inherited = all(one["token"] == token for one in found)
        self.telling.claim("each fork has the agent's memory", holds=inherited, found=[one["token"] for one in found])
        passed = [idea for idea, result in zip(ideas, found, strict=True) if result["ran"] and not result["failed"]]
        self.telling.claim("the tests pass with one idea of five", holds=len(passed) == 1, found=passed)
        winner = forks[ideas.index(passed[0])]
        await asyncio.gather(*(fork.terminate(reason="another idea was right") for fork in forks if fork is not winner))
        ended = [await fork.show() for fork in forks if fork is not winner]
        over = all(view.state == "terminated" and self.stage.machine_pid(view.vm_id) is None for view in ended)
        self.telling.claim("the others have ended", holds=over, found=[view.state for view in ended])
        self.telling.say(f"{winner.session_id} is kept, the other four have ended")
        return winner, passed[0]

    async def _tried(self, fork: Session, idea: str, began_s: float) -> dict[str, Any]:
        state = await self._told(fork, "status")
        answered_s = _now_s() - began_s
        found = await self._told(fork, "try", idea)
        verdict = "all tests pass" if not found["failed"] else f"{found['failed']} of {found['ran']} tests fail"
        self.telling.say(f"  {fork.session_id:<15} answers after {answered_s:.2f} s; {verdict}", _now_s() - began_s)
        return state | found | {"answered_s": answered_s}

    async def _outlives_a_kill(self, kept: Session, token: str) -> None:
        self.telling.chapter("The service that runs its machine is killed; the agent does not notice")
        host, killed_s = self.stage.process("vm-host"), 0.0
        view, machine = await kept.show(), None
        lines: list[str] = []
        counting = kept.exec("python3", "-c", COUNTING)
        async for chunk in counting:
            lines += chunk.text.split()
            if not killed_s:
                view = await kept.show()
                machine = self.stage.machine_pid(view.vm_id)
                os.kill(host.pid, signal.SIGKILL)
                killed_s = _now_s()
                gone = await until_gone(host, 5.0)
                self.telling.claim("vm-host is dead", holds=gone, found=host.pid)
        self.telling.say(f"kill -9 {host.pid} (vm-host), while a program of the agent counts to {COUNT}")
        counted = counting.result.ok and lines == [str(n) for n in range(COUNT)]
        self.telling.claim("the program went on, and no word of it is lost", holds=counted, found=lines)
        after = await kept.show()
        same = (after.vm_id, after.incarnation) == (view.vm_id, view.incarnation)
        now = self.stage.machine_pid(after.vm_id)
        self.telling.claim("the machine is the one it was", holds=same and now == machine is not None, found=now)
        again = self.stage.process("vm-host")
        self.telling.claim("vm-host runs again", holds=again.pid != host.pid, found=again.pid)
        state = await self._told(kept, "status")
        self.telling.claim("the agent still knows what it knew", holds=state["token"] == token, found=state["token"])
        self.telling.say(f"vm-host {again.pid} took over machine {now}; every line arrived, once", _now_s() - killed_s)

    # --- what happened, from the log --------------------------------------------------------------------------

    async def timeline(self) -> list[Event]:
        """What happened to the story's sessions, in the order of the log."""
        told = set(self.sessions)
        return [event async for event in self.torpor.events() if event.stream in told and event.type in TOLD]

    # --- inside -----------------------------------------------------------------------------------------------

    async def _run(self, session: Session, *argv: str) -> str:
        result = await session.exec(*argv)
        if not result.ok:
            raise NotSo(f"{' '.join(argv)} works", f"{result.outcome} {result.exit_code}: {result.stderr}")
        return result.stdout

    async def _told(self, session: Session, *words: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(await self._run(session, "sh", "-c", TELL, " ".join(words)))
        return answer

    async def _until_asleep(self, session: Session) -> SessionView:
        deadline_s = _now_s() + ASLEEP_S_MAX
        while _now_s() < deadline_s:
            view = await session.show()
            if view.state == "suspended":
                return view
            await asyncio.sleep(LOOK_S)
        raise NotSo(f"a session that is idle for {IDLE_S} s falls asleep", (await session.show()).state)


def timeline_lines(events: Sequence[Event]) -> list[str]:
    """The timeline as people read it: position in the log, seconds since the beginning, who, and what."""
    first = events[0].occurred_at
    return [
        f"{event.position:>5}  {(event.occurred_at - first).total_seconds():>6.2f} s  {event.stream:<15}  "
        f"{TOLD[event.type]}"
        for event in events
    ]


def _now_s() -> float:
    return asyncio.get_running_loop().time()

"""What clients do in a simulated world: sessions with lives of their own, drawn from a seed."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any, Final

from torpor_contracts.ids import ExecId
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
from torpor_messaging.ports import Clock
from torpor_simulation.clients import Client

START_RETRY: Final = RetryRule(attempts_max=5, backoff_s=0.5, backoff_s_max=5.0, deadline_s=60.0)
IDLE_AFTER_S: Final = 8.0
EXEC_TIMEOUT_S: Final = 20.0
NOTES: Final = "/root/notes"


@dataclass
class SessionLife:
    """One session as its client knows it. `noted`: exec id -> the word that this program appended to the notes."""

    session_id: str
    noted: dict[str, str] = field(default_factory=dict)


class Workload:
    """Draws what a client does with its sessions."""

    def __init__(self, seed: str, client: Client, clock: Clock) -> None:
        self._random = random.Random(seed)  # noqa: S311  (a seeded world)
        self._client = client
        self._clock = clock
        self._execs = 0

    async def live(self, life: SessionLife, acts: int) -> None:
        """Live through one session: create it, do some things with it, and sometimes end it."""
        idle_after_s = self._random.choice((IDLE_AFTER_S, IDLE_AFTER_S, None))
        create = CreateSession(
            machine=MachineSpec(memory_mib=64, disk_mib=64), idle_after_s=idle_after_s, start_retry=START_RETRY
        )
        created = await self._ask(life, create)
        if created is None or created.receipt is None:
            return
        for _ in range(acts):
            await self._pause()
            await self._act(life)
        if self._random.random() < 0.4:  # noqa: PLR2004  (so many sessions are ended by their client)
            await self._pause()
            await self._ask(life, TerminateSession(reason="done"))

    async def note(self, life: SessionLife) -> Reply | None:
        """Run a program that appends a word to the session's notes."""
        sleep = self._random.choice(("", "", f"sleep {self._random.uniform(0.1, 6):.1f}; "))
        return await self._ask(life, self._program(life, sleep))

    async def resume(self, life: SessionLife) -> Reply | None:
        """Wake the session."""
        return await self._ask(life, ResumeSession())

    async def last_program(self, life: SessionLife) -> ExecId | None:
        """Give the session a last thing to do; None when it takes none any more."""
        command = self._program(life, "")
        reply = await self._ask(life, command)
        return command.exec_id if reply is not None and reply.receipt is not None else None

    def _program(self, life: SessionLife, first: str) -> ExecSession:
        self._execs += 1
        word = f"w{self._execs}"
        exec_id = ExecId(f"exec-{life.session_id}-{self._execs}")
        life.noted[exec_id] = word
        script = f"{first}append {NOTES} {word}; count"
        return ExecSession(exec_id=exec_id, program=ExecSpec(argv=["sh", "-c", script], timeout_s=EXEC_TIMEOUT_S))

    async def _act(self, life: SessionLife) -> None:
        await self._random.choices(
            (self.note, self._suspend, self.resume, self._burst, self._stale, self._terminate),
            weights=(50, 22, 22, 6, 4, 2),
        )[0](life)

    async def _burst(self, life: SessionLife) -> None:
        """Ask for several things at once, some of which exclude each other."""
        asked = [self.resume, self.resume, self.resume, self._suspend, self.note]
        self._random.shuffle(asked)
        await asyncio.gather(*(ask(life) for ask in asked))

    async def _suspend(self, life: SessionLife) -> Reply | None:
        return await self._ask(life, SuspendSession())

    async def _terminate(self, life: SessionLife) -> Reply | None:
        return await self._ask(life, TerminateSession(reason="early"))

    async def _stale(self, life: SessionLife) -> Reply | None:
        command = self._random.choice((SuspendSession(incarnation=-1), ResumeSession(incarnation=-1)))
        return await self._ask(life, command)

    async def _ask(self, life: SessionLife, command: Any) -> Reply | None:
        """Ask, and now and then ask again with the same id, as a client that doubts what it heard."""
        command_id = self._client.new_id(type(command).__name__.lower())
        reply = await self._client.ask(life.session_id, command, command_id)
        if self._random.random() < 0.15:  # noqa: PLR2004  (so many commands are repeated)
            await self._pause()
            await self._client.ask(life.session_id, command, command_id)
        return reply

    async def _pause(self) -> None:
        """Mostly a moment, sometimes nothing, sometimes long enough to fall idle."""
        kind = self._random.random()
        if kind < 0.3:  # noqa: PLR2004
            return
        await self._clock.sleep(self._random.uniform(0, 3) if kind < 0.85 else self._random.uniform(5, 15))  # noqa: PLR2004

"""What clients do in a simulated world: sessions with lives of their own, drawn from a seed."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torpor_contracts.ids import CheckpointId, ExecId, SessionId
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
from torpor_messaging.ports import Clock
from torpor_simulation.clients import Client

START_RETRY: Final = RetryRule(attempts_max=5, backoff_s=0.5, backoff_s_max=5.0, deadline_s=60.0)
IDLE_AFTER_S: Final = 8.0
EXEC_TIMEOUT_S: Final = 20.0
NOTES: Final = "/root/notes"


@dataclass
class SessionLife:
    """One session as its client knows it, and those it has asked to be forked from it.

    `noted`: exec id -> the word that this program appended to the notes. `checkpoints` are those it has asked for.
    """

    session_id: str
    noted: dict[str, str] = field(default_factory=dict)
    checkpoints: list[CheckpointId] = field(default_factory=list)
    forks: list["SessionLife"] = field(default_factory=list)

    def family(self) -> Iterator["SessionLife"]:
        """The session, its forks, and theirs."""
        yield self
        for fork in self.forks:
            yield from fork.family()


def all_noted(lives: Sequence[SessionLife]) -> dict[str, str]:
    """What all programs of these sessions and their forks were to note."""
    return {exec_id: word for life in lives for one in life.family() for exec_id, word in one.noted.items()}


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
        """Give the session a last thing to do; None when it takes none any more.

        All forks but the first are ended before, so that there is room; that one is given something to do too, or
        nobody would notice what became of its machine.
        """
        for fork in [one for one in life.family() if one not in (life, *life.forks[:1])]:
            await self._ask(fork, TerminateSession(reason="enough"))
        for fork in life.forks[:1]:
            await self._ask(fork, self._program(fork, ""))
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
        acts = (self.note, self._suspend, self.resume, self._checkpoint, self._fork, self._roll_back, self._burst)
        weights = (50, 18, 18, 12, 7, 7, 6, 4, 2)
        chosen = self._random.choices((*acts, self._stale, self._terminate), weights=weights)[0]
        forked = bool(life.forks) and self._random.random() < 0.4  # noqa: PLR2004  (so many acts are a fork's)
        await chosen(self._random.choice(life.forks) if forked else life)

    async def _checkpoint(self, life: SessionLife) -> Reply | None:
        checkpoint_id = CheckpointId(f"ckp-{life.session_id}-{len(life.checkpoints) + 1}")
        life.checkpoints.append(checkpoint_id)
        return await self._ask(life, CheckpointSession(checkpoint_id=checkpoint_id))

    async def _fork(self, life: SessionLife) -> Reply | None:
        """Fork the session into one or two; from a checkpoint of it, or however it likes."""
        wanted = [
            SessionLife(f"{life.session_id}-f{len(life.forks) + number + 1}")
            for number in range(self._random.choice((1, 1, 2)))
        ]
        named = self._random.choice([None, None, *life.checkpoints])
        life.forks += wanted
        command = ForkSession(session_ids=[SessionId(one.session_id) for one in wanted], checkpoint_id=named)
        return await self._ask(life, command)

    async def _roll_back(self, life: SessionLife) -> Reply | None:
        if not life.checkpoints:
            return await self._checkpoint(life)
        return await self._ask(life, RollbackSession(checkpoint_id=self._random.choice(life.checkpoints)))

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

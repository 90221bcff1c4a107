"""Whatever is asked of them in whatever order, the logs in SQLite and PostgreSQL answer as the one in memory does."""

import asyncio
from random import Random
from typing import Final

import pytest

from tests.support.event_logs import Open, check_sound, commit, new_id
from torpor_contracts.errors import Rejected, VersionConflict
from torpor_contracts.replies import Receipt
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.port import Commit, EventLog

pytestmark = pytest.mark.anyio

BATCHES: Final = 60
BATCH_MAX: Final = 12


class Story:
    """Commits as careless writers would make them: new ones, stale ones, repeated ones, ones with a stolen id."""

    def __init__(self, random: Random, model: MemoryLog) -> None:
        self._random = random
        self._model = model
        self._streams = [new_id("stream") for _ in range(8)]
        self._made: list[Commit] = []

    async def next_batch(self) -> list[Commit]:
        """Some commits that are appended at once."""
        return [await self._next() for _ in range(self._random.randint(1, BATCH_MAX))]

    async def _next(self) -> Commit:
        kind = self._random.random()
        if self._made and kind < 0.15:
            return self._random.choice(self._made)
        streams = self._random.choices(self._streams, k=self._random.choice((1, 1, 1, 2, 4)))
        if kind < 0.3:
            streams[0] = new_id("stream")
        expected = {stream: len(await self._model.load(stream)) for stream in streams}
        if kind < 0.4:
            unwritten = self._random.choice(self._streams)
            expected.setdefault(unwritten, len(await self._model.load(unwritten)))
        if kind < 0.5:
            wrong = self._random.choice(list(expected))
            expected[wrong] = max(0, expected[wrong] + self._random.choice((-2, -1, 1, 2)))
        made = commit(*streams, expected=expected, data=self._random.randbytes(self._random.choice((0, 30, 3000))))
        if self._made and 0.5 < kind < 0.55:
            stolen = self._random.choice(self._made).command_id
            made = commit(*streams, expected=expected, command_id=stolen, request=b"another")
        self._made.append(made)
        return made


async def answers(log: EventLog, batch: list[Commit]) -> list[tuple[object, ...]]:
    """What each caller hears, in a form that can be compared."""
    heard: list[tuple[object, ...]] = []
    for answer in await asyncio.gather(*(log.append(one) for one in batch), return_exceptions=True):
        match answer:
            case Receipt():
                heard.append((answer,))
            case VersionConflict():
                heard.append(("conflict", answer.stream, answer.expected, answer.actual))
            case Rejected():
                heard.append(("rejected", answer.code))
            case _:
                raise AssertionError(answer)
    return heard


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
@pytest.mark.parametrize("seed", range(6))
async def test_every_answer_and_every_row_is_that_of_the_model(open_log: Open, seed: int) -> None:
    random = Random(seed)
    model = MemoryLog()
    story = Story(random, model)
    replicas = [await open_log() for _ in range(2)]
    for number in range(BATCHES):
        batch = await story.next_batch()
        replica = replicas[random.random() < 0.2]
        assert await answers(replica, batch) == await answers(model, batch), f"seed {seed}, batch {number}"
    assert await check_sound(replicas[0]) == await check_sound(model)

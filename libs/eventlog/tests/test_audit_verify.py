"""An audit names the first bad position and what is wrong there, in the log, against kept heads, and in the stream."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import msgspec
import pytest

from tests.support.event_stream import FakeStream
from torpor_contracts.errors import Transient
from torpor_contracts.host import HostUndrained
from torpor_contracts.ids import HostId
from torpor_eventlog.audit.verify import KeptHead, Verified, open_heads, verify
from torpor_eventlog.canonical import row_digest
from torpor_eventlog.memory import MemoryDatabase, MemoryLog
from torpor_eventlog.notes import SigningKey
from torpor_eventlog.port import Recorded

pytestmark = pytest.mark.anyio
Grow = Callable[..., Awaitable[None]]
EVENT = HostUndrained(host_id=HostId("host-a"), requested_at=datetime(2026, 1, 1, tzinfo=UTC))


class World:
    """A log of ten rows with heads kept after each of them, and a stream that has it all."""

    def __init__(self) -> None:
        self.database = MemoryDatabase()
        self.log = MemoryLog(self.database)
        self.stream = FakeStream()
        self.kept: list[KeptHead] = []

    async def keep_head(self) -> None:
        head = await self.log.head()
        self.kept.append(KeptHead(size=head.position, root=head.root, kept_in="heads.txt"))

    async def verify(self) -> Verified:
        return await verify(self.log, self.kept, self.stream, relay_grace_s=0)

    async def found(self) -> list[tuple[str, int, str]]:
        return [(finding.place, finding.position, finding.kind) for finding in (await self.verify()).findings]

    def change(self, position: int, **fields: object) -> Recorded:
        changed = msgspec.structs.replace(self.database.rows[position - 1], **fields)
        self.database.rows[position - 1] = changed
        return changed

    def forge_from(self, position: int) -> None:
        """Recompute every digest from here on, and the head, as somebody would who can write to the database."""
        rows = self.database.rows[:]
        digest = rows[position - 2].digest if position > 1 else bytes(32)
        forged = MemoryDatabase()
        for at, row in enumerate(rows):
            if at + 1 >= position:
                digest = row_digest(digest, row)
                rows[at] = msgspec.structs.replace(row, digest=digest)
        frontier = forged.end.frontier.copy()
        nodes = frontier.extend(row.digest for row in rows)
        self.database.rows[:] = rows
        self.database.nodes = {(node.level, node.number): node.digest for node in nodes}
        self.database.end = self.database.end._replace(digest=rows[-1].digest, position=len(rows), frontier=frontier)


@pytest.fixture
async def world(grow: Grow) -> World:
    world = World()
    for _ in range(10):
        await grow(world.log, "host-a", EVENT)
        await world.keep_head()
    world.stream.stored = await world.log.read(0, 100)
    return world


async def test_a_sound_log_and_stream_have_no_findings(world: World) -> None:
    verified = await world.verify()
    assert verified.ok
    assert verified.first_bad_position is None
    assert (verified.position, verified.rows, verified.heads, verified.stream_messages) == (10, 10, 10, 10)
    assert verified.root == (await world.log.head()).root.hex()


async def test_a_note_that_the_key_has_not_signed_is_a_finding(world: World) -> None:
    ours, other = SigningKey("torpor.example/log", bytes(32)), SigningKey("torpor.example/log", bytes(range(32)))
    head = await world.log.head()
    notes = [ours.sign_checkpoint(head), other.sign_checkpoint(head), "no note"]
    kept, refused = open_heads(notes, ours.verifier.open_checkpoint, "heads.txt")
    assert kept == world.kept[-1:]
    verified = await verify(world.log, kept, refused=refused)
    assert [(finding.place, finding.kind) for finding in verified.findings] == [("head", "changed")] * 2
    assert "note 2 in heads.txt" in verified.findings[0].detail
    assert verified.first_bad_position is None


async def test_an_empty_log_is_sound() -> None:
    verified = await verify(MemoryLog(), [], FakeStream())
    assert verified.ok
    assert verified.rows == 0


@pytest.mark.parametrize(
    "field", ["data", "stream", "tag", "command_id", "causation_id", "correlation_id", "tenant_id"]
)
async def test_a_changed_row_is_named(world: World, field: str) -> None:
    world.change(4, **{field: b"{}" if field == "data" else "changed"})
    assert ("log", 4, "changed") in await world.found()
    assert ("stream", 4, "changed") in await world.found()
    (finding,) = [finding for finding in (await world.verify()).findings if finding.place == "stream"]
    assert f"in {field}; the digest says that the message is right" in finding.detail


async def test_a_missing_row_is_named(world: World) -> None:
    del world.database.rows[3]
    found = await world.found()
    assert ("log", 4, "missing") in found


async def test_a_forged_log_differs_from_the_kept_heads_and_the_stream(world: World) -> None:
    world.change(4, data=b"{}")
    world.forge_from(4)
    found = await world.found()
    assert ("log", 4, "changed") in found
    assert ("stream", 4, "changed") in found
    assert (await world.verify()).first_bad_position == 4


async def test_a_forged_log_is_bounded_by_the_heads_that_agree(world: World) -> None:
    world.kept = [world.kept[1], world.kept[7]]
    world.change(4, data=b"{}")
    world.forge_from(4)
    world.stream.stored = await world.log.read(0, 100)
    assert await world.found() == [("log", 3, "changed")]


async def test_a_forged_log_without_kept_heads_only_differs_from_the_stream(world: World) -> None:
    world.kept = []
    world.change(4, data=b"{}")
    world.forge_from(4)
    assert await world.found() == [("stream", position, "changed") for position in range(4, 11)]


async def test_a_cut_off_tail_shows_against_the_kept_head(world: World) -> None:
    del world.database.rows[7:]
    world.forge_from(8)
    world.kept = world.kept[-1:]
    assert await world.found() == [("log", 8, "truncated"), ("stream", 8, "extra")]


async def test_a_head_row_that_promises_more_than_there_is(world: World) -> None:
    del world.database.rows[7:]
    world.stream.stored = world.stream.stored[:7]
    assert ("log", 8, "missing") in await world.found()


async def test_a_head_row_that_says_something_else(world: World) -> None:
    world.database.end = world.database.end._replace(digest=bytes(32))
    assert await world.found() == [("log", 10, "changed")]


async def test_damaged_nodes_of_the_tree_are_found(grow: Grow) -> None:
    world = World()
    await grow(world.log, "host-a", *[EVENT] * 600)
    assert (await verify(world.log)).ok
    for node in list(world.database.nodes):
        sound, world.database.nodes[node] = world.database.nodes[node], bytes(32)
        verified = await verify(world.log)
        assert [finding.kind for finding in verified.findings] == ["changed"], node
        assert "stored nodes" in verified.findings[0].detail
        world.database.nodes[node] = sound


async def test_a_log_that_cannot_be_read_says_from_where(world: World) -> None:
    class Torn(MemoryLog):
        async def read(self, after_position: int, limit: int) -> list[Recorded]:
            if after_position + limit > 6:
                raise Transient("the disk fails")
            return await super().read(after_position, limit)

    log = Torn(world.database)
    verified = await verify(log, world.kept[:5], world.stream, relay_grace_s=0)
    assert [(finding.position, finding.kind) for finding in verified.findings] == [(6, "unreadable")]


async def test_messages_the_stream_lost_are_one_finding_each_run(world: World) -> None:
    world.stream.lost = {1, 4, 5, 6, 10}
    found = (await world.verify()).findings
    assert [(finding.position, finding.kind) for finding in found] == [(1, "missing"), (4, "missing"), (10, "missing")]
    assert "4 to 6" in found[1].detail


async def test_a_changed_or_unreadable_message_is_named(world: World) -> None:
    world.stream.stored[2] = msgspec.structs.replace(world.stream.stored[2], tenant_id="other")
    world.stream.garbled = {7}
    assert await world.found() == [("stream", 3, "changed"), ("stream", 7, "unreadable")]


async def test_a_stream_that_ends_early_is_truncated(world: World) -> None:
    del world.stream.stored[6:]
    assert await world.found() == [("stream", 7, "truncated")]


async def test_a_stream_that_is_being_filled_is_waited_for(world: World) -> None:
    class Filling(FakeStream):
        async def _step(self) -> None:
            await super()._step()
            if len(self.stored) < 10:
                self.stored.append(world.database.rows[len(self.stored)])

    stream = Filling()
    assert (await verify(world.log, [], stream, relay_grace_s=10)).ok


async def test_a_stream_with_more_than_the_log_has_extra_messages(world: World) -> None:
    world.stream.stored.append(world.stream.stored[-1])
    assert await world.found() == [("stream", 11, "extra")]


async def test_progress_is_told(world: World) -> None:
    told: list[tuple[str, int, int]] = []
    await verify(world.log, world.kept, world.stream, on_progress=lambda *step: told.append(step))
    assert ("log", 10, 10) in told
    assert ("stream", 10, 10) in told

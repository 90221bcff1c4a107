"""Heads are signed when the log has grown, never for a log that was rewritten, and kept through any crash."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from torpor_contracts.errors import Transient
from torpor_contracts.host import HostUndrained
from torpor_contracts.ids import HostId
from torpor_eventlog.heads import HeadsFile, HeadSigner, LogRewritten
from torpor_eventlog.memory import MemoryDatabase, MemoryLog
from torpor_eventlog.notes import SigningKey

pytestmark = pytest.mark.anyio
Grow = Callable[..., Awaitable[None]]
EVENT = HostUndrained(host_id=HostId("host-a"), requested_at=datetime(2026, 1, 1, tzinfo=UTC))
KEY = SigningKey("torpor.example/log", bytes(32))


class Shelf:
    """Keeps notes, after some failures."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.failures = 0

    async def keep(self, note: str) -> None:
        if self.failures:
            self.failures -= 1
            raise Transient("away")
        self.notes.append(note)

    def sizes(self) -> list[int]:
        return [KEY.verifier.open_checkpoint(note).size for note in self.notes]


async def test_a_head_is_signed_once_each_time_the_log_has_grown(grow: Grow) -> None:
    log, shelves = MemoryLog(), [Shelf(), Shelf()]
    signer = HeadSigner(log, KEY.sign_checkpoint, [shelf.keep for shelf in shelves])
    assert await signer.sign_if_grown() is None
    await grow(log, "host-a", EVENT, EVENT)
    note = await signer.sign_if_grown()
    assert note == shelves[0].notes[0] == shelves[1].notes[0]
    assert KEY.verifier.open_checkpoint(note) == (2, (await log.head()).root)
    assert await signer.sign_if_grown() is None
    await grow(log, "host-a", EVENT)
    await signer.sign_if_grown()
    assert shelves[1].sizes() == [2, 3]


async def test_a_head_that_could_not_be_kept_is_signed_again(grow: Grow) -> None:
    log, near, far = MemoryLog(), Shelf(), Shelf()
    await grow(log, "host-a", EVENT)
    signer = HeadSigner(log, KEY.sign_checkpoint, [near.keep, far.keep])
    far.failures = 1
    with pytest.raises(Transient):
        await signer.sign_if_grown()
    await signer.sign_if_grown()
    assert near.sizes() == [1, 1]
    assert far.sizes() == [1]


async def test_a_restarted_signer_goes_on_from_the_last_note(grow: Grow) -> None:
    log, shelf = MemoryLog(), Shelf()
    await grow(log, "host-a", EVENT)
    await HeadSigner(log, KEY.sign_checkpoint, [shelf.keep]).sign_if_grown()
    last = KEY.verifier.open_checkpoint(shelf.notes[-1])
    restarted = HeadSigner(log, KEY.sign_checkpoint, [shelf.keep], last)
    assert await restarted.sign_if_grown() is None
    await grow(log, "host-a", EVENT)
    await restarted.sign_if_grown()
    assert shelf.sizes() == [1, 2]


@pytest.mark.parametrize("rows", [1, 3, 5])
async def test_a_log_that_was_rewritten_is_not_signed(grow: Grow, rows: int) -> None:
    log, shelf = MemoryLog(), Shelf()
    await grow(log, "host-a", *[EVENT] * 3)
    signer = HeadSigner(log, KEY.sign_checkpoint, [shelf.keep])
    await signer.sign_if_grown()
    other = MemoryLog(MemoryDatabase())
    await grow(other, "host-b", *[EVENT] * rows)
    forged = HeadSigner(other, KEY.sign_checkpoint, [shelf.keep], signer.last)
    with pytest.raises(LogRewritten, match="torpor audit verify"):
        await forged.sign_if_grown()
    assert shelf.sizes() == [3]


async def test_notes_in_a_file_outlive_the_process(tmp_path: Path) -> None:
    file = HeadsFile(tmp_path / "heads")
    assert await file.newest() is None
    assert await file.all() == []
    for note in ("one\n\n\u2014 a b\n", "two\n"):
        await file.keep(note)
    again = HeadsFile(tmp_path / "heads")
    assert await again.all() == ["one\n\n\u2014 a b\n", "two\n"]
    assert await again.newest() == "two\n"


NOTE = "torpor/log\n41\nq83v\n\n\u2014 torpor/log+b4ad8f7e ARrRL274\n"


async def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    file = HeadsFile(tmp_path / "heads")
    await file.keep(NOTE)
    whole = (tmp_path / "heads").read_bytes()
    for torn in range(1, len(whole)):
        (tmp_path / "heads").write_bytes(whole + whole[:torn])
        await file.keep("two\n")
        assert [note for note in await file.all() if note != NOTE] == ["two\n"]
        assert await file.newest() == "two\n"


async def test_a_line_with_a_changed_byte_is_given_so_that_it_is_found(tmp_path: Path) -> None:
    file = HeadsFile(tmp_path / "heads")
    await file.keep(NOTE)
    line = (tmp_path / "heads").read_bytes()
    for place in range(len(line)):
        (tmp_path / "heads").write_bytes(line[:place] + bytes([line[place] ^ 4]) + line[place + 1 :] + line)
        assert any(note != NOTE for note in await file.all()), f"byte {place}"


async def test_the_newest_of_many_notes_is_found_at_the_end(tmp_path: Path) -> None:
    file = HeadsFile(tmp_path / "heads")
    (tmp_path / "heads").write_text('"an old note"\n' * 20_000)
    await file.keep("new\n")
    assert await file.newest() == "new\n"
    assert len(await file.all()) == 20_001

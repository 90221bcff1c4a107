from itertools import pairwise
from pathlib import Path

import pytest

from torpor.embedded.store_watch import (
    FULL_BYTES,
    LOOK_S,
    PAUSE_S_FIRST,
    PAUSE_S_MAX,
    ROOM_BYTES,
    StoreWatch,
    writable_bytes,
)

STUCK = "[7] 2026/11/30 20:34:34.159737 [ERR] JetStream failed to store a msg on stream 'T > COMMANDS': no space left\n"


class World:
    """A log that a server writes, a clock, and a disk with or without room."""

    def __init__(self, root: Path) -> None:
        self.now_s = 1000.0
        self.log = root / "nats-server.log"
        self.disk = root / "disk"
        self.disk.mkdir()
        self.said("[7] 2026/11/30 20:30:00.000000 [INF] Server is ready\n")
        self.left_bytes = 10 * ROOM_BYTES
        self.watch = StoreWatch(self.log, self.disk, lambda: self.now_s, lambda _: self.left_bytes)

    def said(self, text: str) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(text)

    def wants_restart_within(self, seconds: float) -> bool:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += LOOK_S
            if self.watch.wants_restart():
                return True
        return False


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_sound_server_is_left_alone(world: World) -> None:
    world.said("[7] 2026/11/30 20:30:01.000000 [ERR] 127.0.0.1:4 - cid:3 - Slow Consumer Detected\n")
    assert not world.wants_restart_within(60)


def test_a_server_that_cannot_store_is_started_again_once(world: World) -> None:
    world.said(STUCK * 3)
    assert world.wants_restart_within(LOOK_S)
    assert not world.wants_restart_within(60)


def test_what_was_said_before_the_whole_was_started_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "nats-server.log").write_text(STUCK)
    assert not World(tmp_path).wants_restart_within(60)


def test_without_room_it_waits_until_there_is_some(world: World) -> None:
    world.said(STUCK)
    world.left_bytes = ROOM_BYTES - 1
    assert not world.wants_restart_within(300)
    world.left_bytes = ROOM_BYTES
    assert world.wants_restart_within(LOOK_S)
    assert list(world.disk.iterdir()) == []


def test_a_quota_counts_as_no_room(world: World) -> None:
    world.said(STUCK)
    world.disk.rmdir()  # nothing can be made there, whatever is left
    assert not world.wants_restart_within(300)
    world.disk.mkdir()
    assert world.wants_restart_within(LOOK_S)


def test_a_disk_that_was_full_is_enough_as_the_log_could_not_tell(world: World) -> None:
    world.left_bytes = FULL_BYTES - 1
    assert not world.wants_restart_within(60)
    world.left_bytes = 10 * ROOM_BYTES
    assert world.wants_restart_within(LOOK_S)
    assert not world.wants_restart_within(60)


def test_a_disk_that_is_gone_or_read_only_has_nothing_left(tmp_path: Path) -> None:
    assert writable_bytes(tmp_path) > 0
    assert writable_bytes(tmp_path / "gone") == 0
    assert writable_bytes(Path("/proc/sys")) == 0


def test_a_server_that_stops_again_and_again_is_started_ever_less_often(world: World) -> None:
    began_s, restarts = world.now_s, []
    while world.now_s - began_s < 3600:
        world.said(STUCK)
        if world.wants_restart_within(LOOK_S):
            restarts.append(world.now_s)
    pauses_s = [later - earlier for earlier, later in pairwise(restarts)]
    assert pauses_s[0] == pytest.approx(PAUSE_S_FIRST, abs=LOOK_S)
    assert pauses_s == sorted(pauses_s)
    assert len(restarts) < 14
    assert max(pauses_s) <= PAUSE_S_MAX + LOOK_S


def test_a_log_that_was_begun_anew_is_read_from_its_beginning(world: World) -> None:
    world.said("x" * 5000 + "\n")
    assert not world.wants_restart_within(LOOK_S)
    world.log.write_text(STUCK)
    assert world.wants_restart_within(LOOK_S)

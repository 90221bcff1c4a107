"""Files as the host handles them: whole or not at all, whatever their names, however large."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.guest_agent import AgentProcess, AgentRefused, running_agent

NAMES = [
    b"plain",
    b"with space",
    b"new\nline",
    b"tab\tand'quote\"",
    b"not-utf8-\xff\xfe\x80",
    "größe-日本".encode(),
    b"-rf",
    b"x" * 255,
    b"\x01\x02",
]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with running_agent(tmp_path) as running:
        yield running


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "place"
    place.mkdir()
    return place


def text(path: bytes) -> str:
    return path.decode(errors="surrogateescape")


def refused_code(agent: AgentProcess, op: str, body: bytes = b"", **header: Any) -> str:
    with pytest.raises(AgentRefused) as refused:
        agent.request(op, body, **header)
    return refused.value.code


@pytest.mark.parametrize("name", NAMES)
def test_any_name_makes_the_whole_round(agent: AgentProcess, place: Path, name: bytes) -> None:
    path = bytes(place) + b"/" + name
    content = b"\x00\x01\x02 content of " + name
    agent.request("write", content, path=text(path), upload="u", last=True, mode=0o640)
    assert Path(os.fsdecode(path)).read_bytes() == content
    answer = agent.request("read", path=text(path))
    assert (answer.body, answer.header["size"]) == (content, len(content))
    found = agent.request("stat", path=text(path)).header
    assert (found["name"], found["kind"], found["mode"], found["size"]) == (text(name), "file", 0o640, len(content))
    (entry,) = agent.request("list", path=str(place)).header["entries"]
    assert entry["name"] == text(name)
    agent.request("move", path=text(path), to=f"{place}/moved")
    agent.request("remove", path=f"{place}/moved")
    assert list(place.iterdir()) == []


def test_a_large_file_is_written_in_pieces_and_seen_only_when_whole(agent: AgentProcess, place: Path) -> None:
    target = place / "deep" / "er" / "file"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"old")
    piece = os.urandom(250_000)
    for number in range(20):
        assert target.read_bytes() == b"old"
        agent.request("write", piece, path=str(target), upload="u-1", offset=number * len(piece), last=number == 19)
    assert target.read_bytes() == piece * 20
    assert [path.name for path in target.parent.iterdir()] == ["file"]
    taken = b""
    while data := agent.request("read", path=str(target), offset=len(taken)).body:
        taken += data
    assert taken == piece * 20


def test_a_sparse_file_of_many_gigabytes_is_read_from_anywhere(agent: AgentProcess, place: Path) -> None:
    large = place / "large"
    with large.open("wb") as file:
        file.truncate(5 * 2**30)
        file.seek(4 * 2**30 + 17)
        file.write(b"here")
    answer = agent.request("read", path=str(large), offset=4 * 2**30 + 17, length=4)
    assert (answer.body, answer.header["size"]) == (b"here", 5 * 2**30)
    assert agent.request("read", path=str(large), offset=6 * 2**30).body == b""


def test_a_piece_behind_one_that_is_missing_is_refused(agent: AgentProcess, place: Path) -> None:
    agent.request("write", b"1234", path=f"{place}/f", upload="u")
    assert refused_code(agent, "write", b"b", path=f"{place}/f", upload="u", offset=5) == "upload-unknown"
    agent.request("write", b"5", path=f"{place}/f", upload="u", offset=4, last=True)
    assert (place / "f").read_bytes() == b"12345"


def test_a_piece_without_its_beginning_is_refused(agent: AgentProcess, place: Path) -> None:
    assert refused_code(agent, "write", b"b", path=f"{place}/f", upload="u", offset=4) == "upload-unknown"
    assert list(place.iterdir()) == []


def test_directories_are_made_owned_and_removed(agent: AgentProcess, place: Path) -> None:
    agent.request("make-directory", path=f"{place}/a/b/c", user="nobody", mode=0o750)
    agent.request("make-directory", path=f"{place}/a/b/c")
    made = place / "a" / "b" / "c"
    assert stat.S_IMODE(made.stat().st_mode) == 0o750
    if os.getuid() == 0:
        assert [path.owner() for path in (made, made.parent, made.parent.parent)] == ["nobody"] * 3
    agent.request("write", b"x", path=f"{made}/new/file", upload="u", last=True, user="nobody")
    if os.getuid() == 0:
        assert ((made / "new").owner(), (made / "new" / "file").owner()) == ("nobody", "nobody")
    assert refused_code(agent, "remove", path=f"{place}/a") == "not-empty"
    agent.request("remove", path=f"{place}/a", recursive=True)
    assert list(place.iterdir()) == []


def test_links_are_described_and_removed_as_themselves(agent: AgentProcess, place: Path) -> None:
    (place / "kept").mkdir()
    (place / "link").symlink_to("kept")
    found = agent.request("stat", path=f"{place}/link").header
    assert (found["kind"], found["to"]) == ("link", "kept")
    agent.request("remove", path=f"{place}/link", recursive=True)
    assert [path.name for path in place.iterdir()] == ["kept"]


def test_a_long_listing_comes_in_pages(agent: AgentProcess, place: Path) -> None:
    names = [f"{number:05d}-" + "ÿ" * 100 for number in range(2500)]
    for name in names:
        (place / name).touch()
    found: list[str] = []
    more = True
    while more:
        answer = agent.request("list", path=str(place), after=found[-1] if found else None).header
        found += [entry["name"] for entry in answer["entries"]]
        more = answer["more"]
    assert found == names


@pytest.mark.parametrize(
    ("op", "header", "code"),
    [
        ("read", {"path": "/nothing/here"}, "not-found"),
        ("read", {"path": "/"}, "not-a-file"),
        ("read", {"path": "/etc/passwd/x"}, "not-a-directory"),
        ("read", {"path": "relative"}, "illegal-path"),
        ("read", {"path": "/nul\0"}, "illegal-path"),
        ("read", {"path": "/" + "n" * 300}, "name-too-long"),
        ("stat", {"path": "/nothing"}, "not-found"),
        ("list", {"path": "/etc/passwd"}, "not-a-directory"),
        ("remove", {"path": "/nothing"}, "not-found"),
        ("move", {"path": "/nothing", "to": "/elsewhere"}, "not-found"),
        ("watch", {"path": "/nothing", "watch": "w"}, "not-found"),
        ("write", {"path": "/dev/full/x", "upload": "u", "last": True}, "exists"),
        ("make-directory", {"path": "/etc/passwd"}, "exists"),
    ],
)
def test_what_cannot_be_has_a_code(agent: AgentProcess, op: str, header: dict[str, Any], code: str) -> None:
    assert refused_code(agent, op, **header) == code


def test_a_named_pipe_holds_nobody_up(agent: AgentProcess, place: Path) -> None:
    os.mkfifo(place / "pipe")
    assert refused_code(agent, "read", path=f"{place}/pipe") == "not-a-file"


def test_a_watch_tells_what_happens_in_a_directory(agent: AgentProcess, place: Path) -> None:
    agent.request("watch", path=str(place), watch="w-1")
    agent.request("watch", path=str(place), watch="w-2")

    def kinds(watch: str) -> list[tuple[str, str]]:
        return [(e.header["kind"], e.header["name"]) for e in agent.events if e.header.get("watch") == watch]

    Path(os.fsdecode(bytes(place) + b"/n\xff")).write_bytes(b"x")
    agent.wait(lambda: ("written", "n\udcff") in kinds("w-2"))
    assert ("made", "n\udcff") in kinds("w-1")
    agent.request("unwatch", watch="w-1")
    before = len(kinds("w-1"))
    (place / "other").mkdir()
    agent.wait(lambda: ("made", "other") in kinds("w-2"))
    assert len(kinds("w-1")) == before
    (place / "other").rmdir()
    Path(os.fsdecode(bytes(place) + b"/n\xff")).unlink()
    place.rmdir()
    agent.wait(lambda: ("gone", "") in kinds("w-2"))
    agent.hello()
    place.mkdir()
    assert agent.request("ping").header["ok"]
